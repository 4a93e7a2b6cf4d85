// Merges defaults, a TOML file and flags into one Config. Flags win over the file, and the file
// over the defaults of config.h.
#pragma once

#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "train/config.h"
#include "train/config_flags.h"

namespace fsdp::train {

struct Resolved {
  Config config;
  std::string name;                // of the config, without folder and extension: "llama-1b"
  std::set<std::string> given;     // names of options that the file or a flag set
  std::vector<std::string> notes;  // what was changed and why, to be shown
};

// Reads the config on the line: a file, or a ready config by name. Without one, the config of the
// resumed run (DIR/config.toml), else the demo. Unknown keys, wrong types and values out of range
// are Errors with file and line, or the flag. check() in config_check.h checks combinations.
//
// One of steps, tokens and epochs ends a run: a flag that sets one clears the file's.
Resolved resolve(const CommandLine& line);

// The text of a config. Throws Error.
std::string read_config_file(const std::filesystem::path& file);

// Sets `config` from TOML; `file` is for errors. Returns the names of the options that were set.
std::vector<std::string> apply_toml(Config& config, std::string_view text, const std::string& file);

}  // namespace fsdp::train
