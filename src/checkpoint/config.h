// [checkpoint] of a run's config.
#pragma once

#include <array>
#include <cstdint>

#include "base/enum_names.h"
#include "base/options.h"

namespace fsdp::checkpoint {

// What a save in the background does if the one before is still being written.
enum class WhenBusy { kSkip, kWait, kQueue };
constexpr auto enum_table(WhenBusy) {
  return std::to_array<base::EnumName>(
      {{"skip", "this one is left out"},
       {"wait", "training waits for it"},
       {"queue", "this one is copied and written later, or left out if the pool has no room"}});
}

struct CheckpointConfig {
  int64_t every = 0;      // steps; 0: only at the end
  int64_t keep_last = 3;  // 0: all
  bool at_end = true;     // also after a signal
  bool async = true;      // written in the background, from a copy in host memory
  double pool = 0;        // GiB of host memory for such copies, per rank; 0: chosen
  WhenBusy when_busy = WhenBusy::kSkip;
};

inline void describe(CheckpointConfig& checkpoint, OptionList& list) {
  list.section("checkpoint", "Checkpoints");
  list.add("every", checkpoint.every, "Steps between checkpoints; 0: only at the end",
           {.least = 0});
  list.add("keep_last", checkpoint.keep_last,
           "Checkpoints to keep; older ones are deleted; 0: keep all", {.least = 0});
  list.add("at_end", checkpoint.at_end, "Save a checkpoint at the end, also after a signal");
  list.add("async", checkpoint.async,
           "Write checkpoints in the background; false: training waits until one is on disk");
  list.add(
      "pool", checkpoint.pool,
      "GiB of host memory per rank that background saves are copied to; larger ones flow "
      "through it while training waits; 0: half of what the host has left, shared by its ranks",
      {.least = 0});
  list.add("when_busy", checkpoint.when_busy,
           "If the save before is still being written; the last one and those after a signal wait");
}

}  // namespace fsdp::checkpoint
