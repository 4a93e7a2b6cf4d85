// The training loop: runs a config from the first step to the last checkpoint.
#pragma once

#include <string>
#include <vector>

#include "fsdp/world.h"
#include "train/config.h"

namespace fsdp::train {

struct RunRequest {
  Config config;
  std::string name;                // of the config; if `dir` is empty, the run is in runs/NAME
  std::vector<std::string> notes;  // lines to print first
};

enum class Ended { kDone, kStopped };

// Trains in this process, which is one rank of `world`. Collective. Returns when the last step is
// done, or, having saved, after a signal to stop (train/stop.h). Errors are for everything else;
// they are printed before anything is unwound.
Ended train(const World& world, RunRequest request);

}  // namespace fsdp::train
