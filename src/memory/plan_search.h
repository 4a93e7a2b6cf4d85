// The largest micro-batch that fits.
//
// The memory of a step grows almost linearly with its samples. A line through two dry runs predicts
// the batch, a third checks it, and the search narrows the gap between the largest batch that fits
// and the smallest that doesn't to 2 %. The slope depends on what is kept for backward, not on how
// parameters are sharded, so strategies and worlds share it.
#pragma once

#include <map>
#include <optional>

#include "fsdp/plan.h"
#include "memory/plan_run.h"

namespace fsdp::memory {

constexpr int64_t kMostSamples = 4096;  // upper limit of the search

// Plans of one model by batch. Settings that differ only in offload share a dry run.
class AtBatch {
 public:
  explicit AtBatch(const PlanModel& model) : model_(model) {}

  const DryRun& run(PlanOptions options, int64_t batch);
  Plan operator()(PlanOptions options, int64_t batch);

 private:
  const PlanModel& model_;
  std::map<int64_t, DryRun> runs_;
};

// What each further sample adds to a step; shared by steps that keep the same for backward.
struct Slope {
  double bytes = 0;                 // of device memory; 0: not known yet
  double host = 0;                  // bytes of host memory
  double compute = 0, offload = 0;  // seconds per micro-batch
};
using Slopes = std::map<PlanRecompute, Slope>;

struct Found {
  int64_t batch = 0;
  Plan plan;
};

// The largest batch up to options.batch (0: any) that fits, with its plan. If none fits, batch 0
// with the plan of one sample. Reads and updates `slope`.
Found find_largest(AtBatch& at_batch, const PlanOptions& options, Slope& slope);

}  // namespace fsdp::memory
