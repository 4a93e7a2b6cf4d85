// The dry run behind a plan: a few steps of the real engine on the meta device, with their memory
// counted.
#pragma once

#include "fsdp/plan.h"
#include "shard/dry_run.h"

namespace fsdp::memory {

// The peak of a stretch of a step in which the engine's own memory doesn't change.
struct Sample {
  MemoryReport engine;
  int64_t activations = 0;  // kept by autograd, without logits
  int64_t logits = 0;
  int64_t live = 0;  // all memory
};

struct DryRun {
  std::vector<Sample> samples;  // of one step
  int64_t peak = 0;             // most live bytes
  bool peak_in_loss = false;    // the allocation at the peak was logits
  int64_t held = 0;             // peak including what a GPU's allocator couldn't have freed
  int64_t allocated = 0;        // sum of all requests of a step
  std::vector<shard::Product> products;  // of a step
  Traffic traffic;                                // of a step
  int64_t shard_ranks = 1;                        // that the model is sharded over
  int64_t away = 0;                               // most bytes of activations in host memory
  int64_t moved = 0;                              // bytes of activations copied out (and back)
  double times = 1;  // factor on `allocated`, `products`, `traffic` and `moved` for a full step
  struct UnitSize {
    std::string name;
    bool root;
    int64_t numel, bytes;  // of the gathered parameters
    int64_t trained;       // elements that require gradients
  };
  std::vector<UnitSize> units;
  int64_t alone = 0;       // bytes of shards that are their own masters
  int64_t frozen = 0;      // bytes of shards that aren't updated
  int64_t parameters = 0;  // elements of all units
  double element = 0;      // average bytes per gathered parameter element
};

DryRun dry_run(const PlanModel& model, const PlanOptions& options);

// The share that offload.fraction selects, in whole units, as the engine chooses them.
double offloaded_share(const DryRun& run, const Offload& offload);

// Derives the dry run of `to` from that of another world: shards shrink with the number of ranks,
// gathered units keep their size. Impossible if exactly one of the two gathers nothing.
bool can_spread(const DryRun& run, const PlanOptions& from, const PlanOptions& to);
DryRun spread(const DryRun& run, const PlanOptions& from, const PlanOptions& to);

// The plan for a dry run. `options` may differ from the run's in offload and GPU.
Plan plan_from(const DryRun& run, const PlanOptions& options);
// Whether the ranks of a node offload more than the node's memory.
bool lacks_host_memory(const PlannedMemory& memory, const PlanOptions& options);

}  // namespace fsdp::memory
