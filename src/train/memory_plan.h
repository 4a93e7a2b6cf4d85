// The plan of a run beside the run: planned and measured memory after a few steps, and an error
// that helps where memory runs out.
#pragma once

#include <exception>
#include <string>

#include "fsdp/error.h"
#include "train/training.h"

namespace fsdp::train {

class MemoryPlan {
 public:
  explicit MemoryPlan(const Training& training) : training_(training) {}

  // Around step `step` (from 1). After the third, on rank 0 of GPUs, and on CPUs that profile:
  // planned and measured, by kind. Else "". Warns where they are more than 10 % apart.
  void before_step(int64_t step) const;
  std::string after_step(int64_t step) const;

  Error explain(const std::exception& out_of_memory) const;  // fsdp/out_of_memory.h

 private:
  bool looks_at(int64_t step) const;

  const Training& training_;
};

}  // namespace fsdp::train
