// The largest micro-batch that fits.
//
// What a step needs grows with its samples nearly along a line. The line through two dry runs
// promises a number, a third checks it, and the numbers between the last that fits and the first
// that does not are looked at until 2 % are left. How steep the line is depends on what is kept for
// backward, not on who holds the parameters: strategies and worlds hand it on to each other.
#pragma once

#include <map>
#include <optional>

#include "fsdp/plan.h"
#include "memory/plan_run.h"

namespace fsdp::memory {

constexpr int64_t kMostSamples = 4096;  // beyond that nobody looks

// Plans of one model by the number of samples. What is offloaded makes no other dry run.
class AtBatch {
 public:
  explicit AtBatch(const PlanModel& model) : model_(model) {}

  const DryRun& run(PlanOptions options, int64_t batch);
  Plan operator()(PlanOptions options, int64_t batch);

 private:
  const PlanModel& model_;
  std::map<int64_t, DryRun> runs_;
};

// What each further sample adds, of steps that keep the same for backward.
struct Slope {
  double bytes = 0;                 // 0: not known yet
  double host = 0;                  // bytes
  double compute = 0, offload = 0;  // seconds of a micro-batch
};
using Slopes = std::map<PlanRecompute, Slope>;

struct Found {
  int64_t batch = 0;
  Plan plan;
};

// The largest batch up to options.batch (0: any), with its plan; with the plan of one sample where
// none fits. Uses what is known of the slope, and tells what it found.
Found find_largest(AtBatch& at_batch, const PlanOptions& options, Slope& slope);

}  // namespace fsdp::memory
