// What a run's directory says about the run: config.toml, metrics.jsonl, events.jsonl, profile.json
// and the checkpoints. Whatever is missing or damaged becomes a note; the rest is still read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "report/page.h"

namespace fsdp::report {

struct CheckpointFiles {
  int64_t step = -1;
  std::string name;       // "step-200"
  bool complete = false;  // has its metadata
  int64_t bytes = 0;      // of all files
  int64_t files = 0;
  std::string holds;  // what is in it, if the caller knows
};

struct RunFiles {
  std::filesystem::path root;
  std::string name;  // that it is called on the page

  // Steps in the order of the file, and a value of every step for each key; NaN: none.
  std::vector<int64_t> steps;
  std::map<std::string, std::vector<double>> values;
  std::vector<int64_t> skipped;  // steps

  std::vector<std::pair<std::string, std::string>> config;  // "train.steps", "100"
  std::vector<Json> events;                                 // oldest first
  Json profile;                                             // null: none
  std::vector<CheckpointFiles> checkpoints;                 // by step
  std::vector<std::string> notes;                           // what is missing or damaged

  // The last event of a kind; null: none.
  const Json* last_event(const std::string& kind) const;
  // A value of the config; "" if it isn't there.
  std::string setting(const std::string& key) const;
  // The finite values of a key, from step index `first` on.
  std::vector<double> finite(const std::string& key, size_t first = 0) const;
};

// Throws Error if `root` isn't a run's directory.
RunFiles read_run(const std::filesystem::path& root);

// The keys of a config that fsdp wrote, with their values as text: "train.steps", "100".
std::vector<std::pair<std::string, std::string>> read_settings(const std::string& toml);

}  // namespace fsdp::report
