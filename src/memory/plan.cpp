// plan(): the memory of a dry run by kind, plus what a device adds to it.
#include "fsdp/plan.h"

#include <algorithm>
#include <sstream>

#include "base/format.h"
#include "base/table.h"
#include "memory/host_pool.h"
#include "memory/plan_run.h"
#include "memory/plan_time.h"

namespace fsdp {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// cuBLAS keeps one workspace for the forward thread and one for the backward thread.
constexpr int64_t kWorkspaces = 2 * 32 * kMiB;
// The driver, the loaded kernels and cuDNN; and NCCL's buffers for a few communicators.
constexpr int64_t kContext = 600 * kMiB;
constexpr int64_t kNccl = 400 * kMiB;

int64_t share_of(int64_t bytes, double share) {
  return static_cast<int64_t>(static_cast<double>(bytes) * share);
}

PlannedMemory kinds_of(const memory::DryRun& run, const memory::Sample& sample,
                       const PlanOptions& options) {
  const MemoryReport& engine = sample.engine;
  PlannedMemory kinds;
  const int64_t alone = std::min(run.alone, engine.parameters);
  kinds.parameters = engine.gathered_from + alone;
  kinds.master = engine.parameters - alone;
  kinds.gradients = engine.gradients;
  kinds.states = engine.optimizer;
  kinds.gather_buffers = engine.unsharded + engine.secondary;
  kinds.communication = engine.reduce_buffers + engine.accumulated;
  kinds.activations = sample.activations;
  kinds.logits = sample.logits;
  kinds.temporaries = sample.live - kinds.peak();
  if (kinds.temporaries < 0) {  // a saved tensor can be in the engine's memory
    kinds.activations += kinds.temporaries;
    kinds.temporaries = 0;
  }
  if (options.gpu) {
    kinds.workspaces = kWorkspaces;
    kinds.fragmentation = std::max<int64_t>(0, run.held - run.peak);
    kinds.outside = kContext + (options.world > 1 ? kNccl : 0);
  }
  return kinds;
}

// The share of the state on disk that is in memory: units that are read, updated and written
// (shard/on_disk.cpp). More than 1 if a few units are most of the model.
double buffered_share(const memory::DryRun& run) {
  const auto buffers = static_cast<double>(std::min<size_t>(3, 1 + run.units.size()));
  int64_t largest = 0;
  for (const auto& unit : run.units) largest = std::max(largest, unit.numel);
  return buffers * double(largest) / double(std::max<int64_t>(1, run.parameters));
}

// As the engine does it (shard/offload.h): gradients are offloaded with the optimizer, and the host
// holds the shards whether or not the device also does.
void move_to_host(PlannedMemory& kinds, const memory::DryRun& run, const Offload& offload) {
  double share = memory::offloaded_share(run, offload);
  auto take = [&](int64_t& kind) {
    int64_t moved = share_of(kind, share);
    kind -= moved;
    return moved;
  };
  if (offload.optimizer) {
    const int64_t master = take(kinds.master), updated = take(kinds.states) + master;
    (offload.directory.empty() ? kinds.host : kinds.disk) += updated;
    // Masters are in memory until the first update writes them to the disk.
    if (!offload.directory.empty())
      kinds.host += std::max(master, share_of(updated, buffered_share(run)));
  }
  if (offload.optimizer || offload.gradients) kinds.host += take(kinds.gradients);
  if (!offload.optimizer && !offload.parameters) return;
  const int64_t stay = offload.parameters ? 0 : std::min(run.frozen, kinds.parameters);
  int64_t shards = share_of(kinds.parameters - stay, share);
  kinds.host += shards;
  if (offload.parameters) kinds.parameters -= shards;
}

// Whether all units stay gathered from forward to backward (shard/build.cpp).
bool keeps_units(const ShardOptions& shard) {
  const bool kept = shard.strategy == ShardingStrategy::SHARD_GRAD_OP ||
                    shard.strategy == ShardingStrategy::NO_SHARD;
  return shard.reshard_after_forward.keep_parts.value_or(kept ? 1 : 0) == 1;
}

// Adds the buffers of offload, which the dry run doesn't have. Reduced gradients on their way to
// the host need memory next to the unreduced ones. An unsharded model has no buffers without
// offload, since its parameters and gradients stay in place.
void add_buffers(PlannedMemory& kinds, const memory::DryRun& run, const PlanOptions& options) {
  const Offload& offload = options.shard.offload;
  const bool gradients_leave = offload.optimizer || offload.gradients;
  if (memory::offloaded_share(run, offload) <= 0) return;
  if (run.shard_ranks > 1) {
    if (gradients_leave) kinds.communication += kinds.communication / run.shard_ranks;
    return;
  }
  int64_t largest = 0, root = 0, others = 0;
  for (const auto& unit : run.units) {
    if (unit.root) root += unit.bytes;
    if (!unit.root) largest = std::max(largest, unit.bytes), ++others;
  }
  auto slots = [&](int64_t count) { return std::min(count, others) * largest + root; };
  if (offload.parameters && keeps_units(options.shard)) {
    int64_t all = 0;
    for (const auto& unit : run.units) all += unit.bytes;
    kinds.gather_buffers += share_of(all, memory::offloaded_share(run, offload));
  } else if (offload.parameters) {
    int64_t ahead = std::max({0, options.shard.forward_prefetch, options.shard.backward_prefetch});
    kinds.gather_buffers += slots(ahead > 0 ? 2 + ahead : 1);
  }
  if (gradients_leave && kinds.gradients > 0 && options.world == 1) {  // else already counted
    double bytes = static_cast<double>(kinds.gradients) / static_cast<double>(run.parameters);
    kinds.communication += share_of(slots(options.gpu ? 2 : 1), bytes / run.element);
  }
}

std::vector<std::string> advice_on(const memory::DryRun& run, const Plan& plan,
                                   const PlanOptions& options) {
  std::vector<std::string> advice;
  auto all = static_cast<double>(std::max<int64_t>(1, run.parameters));
  int64_t tiny = 0;
  for (const auto& unit : run.units) {
    auto numel = static_cast<double>(unit.numel);
    if (unit.root && numel > 0.5 * all && options.world > 1)
      advice.push_back(
          formatted("the root unit holds {:.0f} % of the parameters and stays gathered from "
                    "forward to backward; wrap more of its modules (shard.wrap).",
                    100 * numel / all));
    if (!unit.root && unit.bytes < kMiB) ++tiny;
  }
  if (options.world > 1 && tiny > 1 && 2 * tiny > static_cast<int64_t>(run.units.size()))
    advice.push_back(
        formatted("{} of {} units have less than 1 MiB, so latency dominates their gathers; wrap "
                  "larger modules.",
                  tiny, run.units.size()));
  int64_t ranks = std::min(options.ranks_per_node, options.world);
  if (!plan.fits && plan.memory.total() <= options.gpu->memory) {
    advice.push_back(
        formatted("{} ranks of a host need {} of host memory for offload, and the host has {}; "
                  "offload less, offload to a disk (offload.directory), or shard over more ranks "
                  "(FULL_SHARD).",
                  ranks, human_bytes(static_cast<double>(ranks * plan.memory.host)),
                  human_bytes(static_cast<double>(options.host_memory))));
  } else if (!plan.fits) {
    auto without = plan.memory;
    without.activations = without.logits = without.temporaries = without.fragmentation = 0;
    bool ever = without.total() <= options.gpu->memory;
    advice.push_back(
        formatted("a micro-batch of {} does not fit: it needs {} and the GPU has {}{}.",
                  options.batch, human_bytes(static_cast<double>(plan.memory.total())),
                  human_bytes(static_cast<double>(options.gpu->memory)),
                  ever ? ""
                       : "; it would not fit without activations either, so use more ranks or "
                         "offload"));
  }
  return advice;
}

}  // namespace

bool memory::lacks_host_memory(const PlannedMemory& memory, const PlanOptions& options) {
  int64_t all = memory.host * std::min(options.ranks_per_node, options.world);
  return options.host_memory > 0 && all > options.host_memory;
}

Plan memory::plan_from(const DryRun& run, const PlanOptions& options) {
  // Offload may move the peak to another sample.
  PlannedMemory most, before;
  int64_t all_here = 0;  // peak without offload
  for (const Sample& sample : run.samples) {
    PlannedMemory kinds = kinds_of(run, sample, options), here = kinds;
    all_here = std::max(all_here, here.peak());
    add_buffers(kinds, run, options);
    move_to_host(kinds, run, options.shard.offload);
    before.gradients = std::max(before.gradients, here.gradients);
    before.states = std::max(before.states, here.states);
    before.parameters = here.parameters;
    before.master = here.master;
    // The host's peak may be in another sample.
    const int64_t host = std::max(kinds.host, most.host), disk = std::max(kinds.disk, most.disk);
    if (kinds.peak() >= most.peak()) most = kinds;
    most.host = host;
    most.disk = disk;
  }
  // The dry run fragments memory with the offloaded tensors as well: scale fragmentation down.
  if (most.peak() < all_here)
    most.fragmentation = share_of(most.fragmentation,
                                  static_cast<double>(most.peak()) / static_cast<double>(all_here));
  // Samples are taken before the next allocation, when the last one may already be freed.
  int64_t seen = 0;
  for (const Sample& sample : run.samples) seen = std::max(seen, sample.live);
  (run.peak_in_loss ? most.logits : most.temporaries) += std::max<int64_t>(0, run.peak - seen);
  if (run.away > 0) most.host += HostPool::size_for(run.away);
  Plan plan{.memory = most,
            .batch = options.batch,
            .samples = options.batch * options.micro_batches * options.world,
            .parameters = run.parameters,
            .units = static_cast<int64_t>(run.units.size())};
  for (const auto& product : run.products) plan.flops += run.times * product.flops;
  plan.time = time_of(run, before, options);
  plan.fits = !options.gpu || (plan.memory.total() <= options.gpu->memory &&
                               !memory::lacks_host_memory(plan.memory, options));
  plan.advice = advice_on(run, plan, options);
  return plan;
}

Plan plan(const PlanModel& model, const PlanOptions& options) {
  return memory::plan_from(memory::dry_run(model, options), options);
}

std::string Plan::describe() const {
  Table table({{"kind", "memory per rank", Table::kLeft}, {"bytes", "bytes"}, {"size", "size"}});
  auto add = [&](const char* kind, int64_t bytes) {
    if (bytes == 0) return;
    auto size = static_cast<double>(bytes);
    table.add({text(kind), text(with_separators(bytes)), Cell{size, human_bytes(size)}});
  };
  add("parameters", memory.parameters);
  add("master weights", memory.master);
  add("gradients", memory.gradients);
  add("optimizer states", memory.states);
  add("gather buffers", memory.gather_buffers);
  add("communication", memory.communication);
  add("activations", memory.activations);
  add("logits", memory.logits);
  add("temporaries", memory.temporaries);
  add("workspaces", memory.workspaces);
  add("allocator peak", memory.peak());
  add("fragmentation", memory.fragmentation);
  add("driver and NCCL", memory.outside);
  if (memory.outside > 0) add("total", memory.total());
  add("in host memory", memory.host);
  add("on disk", memory.disk);
  std::stringstream out;
  table.print(out, /*json=*/false);
  if (time.total() > 0)
    out << formatted(
        "a step takes about {:.1f} ms: {:.1f} compute, {:.1f} exposed communication (of {:.1f}), "
        "{:.1f} optimizer, {:.1f} offload\n",
        1e3 * time.total(), 1e3 * time.compute, 1e3 * time.exposed, 1e3 * time.communication,
        1e3 * time.optimizer, 1e3 * time.offload);
  for (const std::string& one : advice) out << "! " << one << "\n";
  return out.str();
}

}  // namespace fsdp
