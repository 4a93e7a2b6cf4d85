// [checkpoint] of a run's config.
#pragma once

#include <cstdint>

#include "base/options.h"

namespace fsdp::checkpoint {

struct CheckpointConfig {
  int64_t every = 0;      // steps; 0: only at the end
  int64_t keep_last = 3;  // 0: all
  bool at_end = true;     // also after a signal
  bool async = true;      // written in the background, from a copy in host memory
};

inline void describe(CheckpointConfig& checkpoint, OptionList& list) {
  list.section("checkpoint", "Checkpoints");
  list.add("every", checkpoint.every, "Steps between checkpoints; 0: only at the end",
           {.least = 0});
  list.add("keep_last", checkpoint.keep_last,
           "Checkpoints to keep; older ones are deleted; 0: keep all", {.least = 0});
  list.add("at_end", checkpoint.at_end, "Save a checkpoint at the end, also after a signal");
  list.add("async", checkpoint.async,
           "Write checkpoints in the background; training waits only while the rank's shards are "
           "copied to host memory; false: it waits until the checkpoint is on disk");
}

}  // namespace fsdp::checkpoint
