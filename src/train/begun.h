// Beginning a run: its directory, who owns it, and the checkpoints from which it may go on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "train/loop.h"
#include "train/owner.h"
#include "train/recovery.h"

namespace fsdp::train {

// The run's directory, and the checkpoints from which it may go on, the best one first.
struct Begun {
  RunDirectory directory;
  std::vector<StartingPoint> points;
  bool restarted = false;              // by the launcher
  std::shared_ptr<const Owner> owner;  // of the directory; on rank 0

  bool is_on_disk(int64_t step) const;  // one of them is that of the step in the directory
};

Begun begin(const World& world, const RunRequest& request);

// Whether the run to which --resume=auto returns has ended meanwhile; then says so.
bool is_complete(const Training& training, const Begun& begun);

}  // namespace fsdp::train
