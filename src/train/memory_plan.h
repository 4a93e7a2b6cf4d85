// Compares planned and measured memory after a few steps, and explains out-of-memory errors with the
// plan.
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

  // Called around every step. After this process's third step, rank 0 returns a table of planned and
  // measured memory by kind, on GPUs and on CPUs that profile; otherwise "". Warns if the two differ by
  // more than 10 %.
  void before_step();
  std::string after_step();

 private:
  bool looks() const;

  const Training& training_;
  int64_t step_ = 0;                // of this process
  std::optional<Profile> profile_;  // of the measured step: memory at its peak
};

// fsdp::explain_out_of_memory with the plan of this run. `sharded` is empty before there is a model.
Error explain_out_of_memory(const World& world, const Config& config, const Sharded& sharded,
                            const std::exception& problem);

}  // namespace fsdp::train
