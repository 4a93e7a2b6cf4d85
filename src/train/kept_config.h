// config.toml of a run: the config that --resume goes on with.
//
// Its last line is a sum, so that a file that was cut is told from one that was edited. Every
// checkpoint has a copy of the config, which says what differs and what is missing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "train/run_directory.h"

namespace fsdp::train {

// The config as it is kept: without what says how this process starts.
std::string kept_toml(Config config);
// Writes config.toml, atomically and durably.
void keep_config(const RunDirectory& run, const Config& config);

struct KeptConfig {
  std::string file;  // for errors
  std::string text;
  std::vector<std::string> notes;  // what was edited
};

// For a run to be resumed: config.toml, or, if that is missing, the newest checkpoint's copy.
// nullopt: there is neither. An Error if the file is damaged: it isn't TOML, or it lacks its end.
std::optional<KeptConfig> read_kept_config(const RunDirectory& run);

}  // namespace fsdp::train
