// The dry run behind a plan: a few steps of the real engine on the meta device, counted.
#pragma once

#include "fsdp/plan.h"
#include "shard/dry_run.h"

namespace fsdp::memory {

// A stretch of a step in which the engine holds the same, when the most was live.
struct Sample {
  MemoryReport engine;
  int64_t activations = 0;  // what autograd kept, beside logits
  int64_t logits = 0;
  int64_t live = 0;  // everything
};

struct DryRun {
  std::vector<Sample> samples;  // of one step
  int64_t peak = 0;             // the most that was live
  bool peak_in_loss = false;    // what came last then was logits
  int64_t held = 0;             // with what a GPU's allocator could not have given back
  int64_t allocated = 0;        // bytes that a step asks for, one after the other
  std::vector<shard::dry_run::Product> products;  // of a step
  Traffic traffic;                                // of a step
  int64_t shard_ranks = 1;                        // over which a model is spread
  int64_t away = 0;                               // activations in host memory, at most
  int64_t moved = 0;                              // bytes of them that leave, and come back
  double times = 1;  // that `allocated`, `products`, `traffic` and `moved` come in a step
  struct UnitSize {
    std::string name;
    bool root;
    int64_t numel, bytes;  // of the gathered parameters
    int64_t trained;       // of these elements
  };
  std::vector<UnitSize> units;
  int64_t parameters = 0;  // elements of all units
  double element = 0;      // bytes of a parameter in operators, on average
};

DryRun dry_run(const PlanModel& model, const PlanOptions& options);

// What offload.fraction comes to, in whole units, as the engine chooses them.
double offloaded_share(const DryRun& run, const Offload& offload);

// The dry run `to` would come to, from one of another world: shards are as much smaller as there
// are more ranks, and what is gathered stays as it is. Not where one of the two gathers nothing.
bool can_spread(const DryRun& run, const PlanOptions& from, const PlanOptions& to);
DryRun spread(const DryRun& run, const PlanOptions& from, const PlanOptions& to);

// What a dry run of these options comes to; they may differ from its own in offload and GPU.
Plan plan_from(const DryRun& run, const PlanOptions& options);
// Of a node, by what its ranks offload.
bool lacks_host_memory(const PlannedMemory& memory, const PlanOptions& options);

}  // namespace fsdp::memory
