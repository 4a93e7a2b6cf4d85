// Staging: host memory in which a checkpoint waits to be written while training goes on. It is kept
// from one save to the next: fresh memory costs more than the copy.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/save_plan.h"

namespace fsdp::checkpoint {

class Staging {
 public:
  // What a plan needs, in slabs: LibTorch rounds pinned memory up to a power of two, so large
  // pieces of another size would cost up to twice as much.
  struct Size {
    std::vector<int64_t> slabs;  // bytes of each
    bool pinned = false;         // something comes from a device
  };
  static Size size_of(const SavePlan& plan);
  // Gets as much memory, ready to be written to, where there is not enough.
  void reserve(const Size& size);

  // Copies what the plan points to, and lets it point to the copies. Returns when they are made.
  // The plan must be gone before the next call.
  void take(SavePlan& plan);

 private:
  std::vector<at::Tensor> slabs_;  // bytes
};

}  // namespace fsdp::checkpoint
