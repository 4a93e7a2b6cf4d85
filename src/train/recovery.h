// Recovery: how a run goes on when ranks die (docs/recovery.md).
//
// A launcher that restarts ranks gives them a folder in the host's memory. There the run notes its
// directory and keeps checkpoints (memory_saves.h), so that ranks of the next start find both.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "fsdp/world.h"
#include "train/loop.h"
#include "train/run_directory.h"
#include "train/training.h"

namespace fsdp::train {

// Joins the world and trains. If other ranks die and the launcher replaces them, lets go of the
// world, joins the next one, and goes on from the last checkpoint; this process stays.
Ended train_through_faults(const InitOptions& options, const RunRequest& request);

// For checkpoints in memory; empty: the launcher gave none.
std::filesystem::path memory_checkpoints();

// The directory of the run that an earlier start by this launcher trained; empty: this is the first
// start, or another run. Collective.
std::string run_before_restart(const World& world, const Config& config);
// At a first start: notes the run, and forgets one before. Collective.
void note_run(const World& world, const RunDirectory& run);

// A checkpoint from which a run may go on.
struct StartingPoint {
  std::filesystem::path path;
  bool in_memory = false;
};
// After a restart, the best one first: the newest in memory or `disk`, the newest there ("": none).
// Collective.
std::vector<StartingPoint> starting_points(const World& world, const std::string& disk);
// Makes ready what loading it needs. Collective.
void prepare_to_load(const StartingPoint& from, const Training& training);
// Checkpoints in memory other than this one are of no use anymore. Collective.
void forget_others(const World& world, const StartingPoint& used);

}  // namespace fsdp::train
