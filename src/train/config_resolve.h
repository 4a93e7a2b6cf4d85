// From defaults, a TOML file and flags to one Config. The stronger wins: flags, then the file, then
// the defaults of config.h.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "train/config.h"
#include "train/config_flags.h"

namespace fsdp::train {

struct Resolved {
  Config config;
  std::string name;                // "llama-1b": the config's name without folder and ending
  std::set<std::string> given;     // names of options that a file or a flag has set
  std::vector<std::string> notes;  // what was adapted and why, to be shown
};

// Reads the config named on the line: a file, or a ready config by name. Without one: the config
// of the run that is resumed (DIR/config.toml), else the demo. Unknown keys, wrong types, values
// outside their range are Errors with file and line, or the flag. What single values cannot show,
// check() in config_check.h does.
//
// One of steps, tokens and epochs ends a run: a flag that sets one takes back what the file said.
Resolved resolve(const CommandLine& line);

// Sets `config` from TOML; `file` is for errors. Returns the names of the options it set.
std::vector<std::string> apply_toml(Config& config, std::string_view text, const std::string& file);

}  // namespace fsdp::train
