// StepWatch: what operators do, while alive: which unit's parameters they read, and the FLOPs of
// their products. Modules of the C++ frontend have no hooks, so this is how the work between two
// reads finds its unit. LibTorch's profiler would count FLOPs, too, but it looks for the memory of
// every input, and sharded parameters have none until they are gathered.
#pragma once

#include <vector>

#include "observe/step_trace.h"

namespace fsdp::observe {

// A process can have one at a time. Sees operators of all threads.
class StepWatch {
 public:
  StepWatch();
  ~StepWatch();
  StepWatch(const StepWatch&) = delete;
  StepWatch& operator=(const StepWatch&) = delete;

  // So far, by time; a thread's mark is where its unit changes.
  std::vector<UnitMark> marks() const;
  std::vector<ProductCall> products() const;

 private:
  uint64_t callback_ = 0;
};

}  // namespace fsdp::observe
