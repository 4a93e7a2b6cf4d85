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

// Tells a run that crawls from one that was short of memory once.
class Crawling {
 public:
  // Called after every step with the allocator's retries so far. Whether there were new ones in
  // each of the last three steps.
  bool saw(int64_t retries);

 private:
  int64_t before_ = 0;
  int in_a_row_ = 0;
};

class MemoryPlan {
 public:
  explicit MemoryPlan(const Training& training) : training_(training) {}

  // Called around every step. After this process's third step, rank 0 records memory by kind. On
  // GPUs and on CPUs that profile it also shows the plan beside it, and warns if the two differ by
  // more than 10 %. From then on after_step() throws c10::OutOfMemoryError if the run crawls,
  // unless train.on_retries is warn.
  void before_step();
  void after_step(Report& report);

 private:
  bool looks() const;
  bool plans() const;
  void record(Report& report);

  const Training& training_;
  int64_t step_ = 0;  // of this process
  Crawling crawling_;
  std::optional<Profile> profile_;  // of the measured step: memory at its peak
};

// fsdp::explain_out_of_memory with the plan of this run; also writes a page and, on a GPU, a
// snapshot of its memory to the run's directory. `sharded` is empty before there is a model.
Error explain_out_of_memory(const World& world, const Config& config, const Sharded& sharded,
                            const RunDirectory& directory, const std::exception& problem);

}  // namespace fsdp::train
