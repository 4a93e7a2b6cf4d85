// The command line of a training run: `fsdp train CONFIG --optim.lr 1e-4`. CLI11 takes it apart and
// prints the help; what the words mean is decided by config_resolve.h, where files and flags meet.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace CLI {
class App;
}

namespace fsdp::train {

struct CommandLine {
  std::vector<std::string> configs;                        // TOML files or names of ready configs
  std::vector<std::pair<std::string, std::string>> flags;  // "optim.lr", "1e-4", in their order
};

// Adds a positional for configs and a flag for every option to `command`. `line` is filled while
// CLI11 parses and must live until then. A flag that does not exist is an Error that names the
// nearest one.
void declare(CLI::App& command, CommandLine& line);

}  // namespace fsdp::train
