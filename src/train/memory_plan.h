// Measures memory after a few steps, compares it with the plan, and explains out-of-memory errors
// with the plan.
#pragma once

#include <exception>
#include <optional>
#include <string>

#include "fsdp/error.h"
#include "fsdp/profile.h"
#include "train/report.h"
#include "train/training.h"

namespace fsdp::train {

class MemoryPlan {
 public:
  explicit MemoryPlan(const Training& training) : training_(training) {}

  // Called around every step. After this process's third step, rank 0 records memory by kind. On
  // GPUs and on CPUs that profile it also shows the plan beside it, and warns if the two differ by
  // more than 10 %.
  void before_step();
  void after_step(Report& report);

 private:
  bool looks() const;
  bool plans() const;

  const Training& training_;
  int64_t step_ = 0;                // of this process
  std::optional<Profile> profile_;  // of the measured step: memory at its peak
};

// fsdp::explain_out_of_memory with the plan of this run; also writes a page and, on a GPU, a
// snapshot of its memory to the run's directory. `sharded` is empty before there is a model.
Error explain_out_of_memory(const World& world, const Config& config, const Sharded& sharded,
                            const RunDirectory& directory, const std::exception& problem);

}  // namespace fsdp::train
