// The plan of a run beside the run: planned and measured memory after a few steps, and an error
// that helps where memory runs out.
#pragma once

#include <exception>
#include <optional>
#include <string>

#include "fsdp/error.h"
#include "fsdp/profile.h"
#include "train/training.h"

namespace fsdp::train {

class MemoryPlan {
 public:
  explicit MemoryPlan(const Training& training) : training_(training) {}

  // Around every step. After the third of this process, on rank 0 of GPUs, and on CPUs that
  // profile: planned and measured, by kind. Else "". Warns where they are more than 10 % apart.
  void before_step();
  std::string after_step();

 private:
  bool looks() const;

  const Training& training_;
  int64_t step_ = 0;                // of this process
  std::optional<Profile> profile_;  // of the step that is looked at: what there was at its peak
};

// fsdp/out_of_memory.h, with the plan of this run. `sharded` is empty where there is no model yet.
Error explain_out_of_memory(const World& world, const Config& config, const Sharded& sharded,
                            const std::exception& problem);

}  // namespace fsdp::train
