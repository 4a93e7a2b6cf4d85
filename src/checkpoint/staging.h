// Staging: host memory that holds a checkpoint while it is written in the background. It is kept
// from one save to the next: allocating memory costs more than the copy.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/save_plan.h"

namespace fsdp::checkpoint {

class Staging {
 public:
  // What a plan needs, in slabs: LibTorch rounds pinned memory up to a power of two, so large
  // pieces of other sizes would take up to twice as much.
  struct Size {
    std::vector<int64_t> slabs;  // bytes of each
    bool pinned = false;         // some tensors are on a device
  };
  static Size size_of(const SavePlan& plan);
  // Allocates the missing memory and touches its pages.
  void reserve(const Size& size);

  // Copies the plan's tensors and makes the plan refer to the copies, which are complete on return.
  // The plan must be destroyed before the next call.
  void take(SavePlan& plan);

 private:
  std::vector<at::Tensor> slabs_;  // bytes
};

}  // namespace fsdp::checkpoint
