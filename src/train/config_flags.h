// The command line of a training run: `fsdp train CONFIG --optim.lr 1e-4`. CLI11 parses it and
// prints the help; config_resolve.h merges flags with the file.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace CLI {
class App;
}

namespace fsdp::train {

struct CommandLine {
  std::vector<std::string> configs;                        // TOML files, or names of ready configs
  std::vector<std::pair<std::string, std::string>> flags;  // "optim.lr", "1e-4", in order
};

// Adds a positional argument for configs and a flag for every option to `command`. CLI11 fills
// `line` when it parses, so `line` must live until then. An unknown flag is an Error that names the
// nearest.
void declare(CLI::App& command, CommandLine& line);

}  // namespace fsdp::train
