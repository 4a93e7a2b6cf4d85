// Runs of `fsdp train` on a small text, for tests: a config that takes seconds, the command under any
// launcher, and its output.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp::train {

using Words = std::vector<std::string>;

Words operator+(Words words, const Words& more);

// Writes some kilobytes of text to a file, the same every time.
void write_text(const std::string& file);

// A model of about ten thousand parameters: `steps` steps of 12 samples of 32 bytes from FOLDER/text.
Words tiny_run(const launch::Folder& folder, const std::string& run, int steps);

// fsdp run with these flags, of fsdp train with a line per step. Ranks write their pids to
// FOLDER/rank-N, and where their host keeps checkpoints in memory to FOLDER/memory-N.
Words run_with_pids(const launch::Folder& folder, const Words& launcher);

struct Said {
  int code = -1;
  std::string out, err;
};

// {fsdp, "train", arguments...} with --ranks.
Said train(int ranks, Words arguments);
Said run(Words command, Words environment = {});
Said fsdp(Words arguments);

std::vector<nlohmann::json> metrics(const launch::Folder& folder, const std::string& run);
std::vector<double> losses(const launch::Folder& folder, const std::string& run);

}  // namespace fsdp::train
