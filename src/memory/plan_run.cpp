#include "memory/plan_run.h"

#include <algorithm>

#include "base/format.h"
#include "fsdp/deferred_init.h"
#include "fsdp/error.h"
#include "fsdp/mesh.h"
#include "fsdp/train_step.h"
#include "fsdp/world.h"
#include "memory/activation_offload.h"
#include "memory/plan_meter.h"
#include "memory/plan_operators.h"
#include "shard/contents.h"
#include "shard/dry_run.h"
#include "shard/model.h"
#include "shard/offload.h"
#include "shard/saved_activations.h"
#include "shard/unit.h"

namespace fsdp::memory {
namespace {

// All micro-batches from the second on need the same memory; further ones are only counted.
constexpr int kMicroBatches = 2;

void check_plan(const PlanModel& model, const PlanOptions& options) {
  if (!model) throw Error("plan() has no model.", "pass a function that makes one.");
  if (options.world < 1 || options.ranks_per_node < 1 || options.batch < 1 ||
      options.micro_batches < 1 || options.every < 1)
    throw Error("plan(): world, ranks_per_node, batch, micro_batches and every must be at least 1.",
                "use a world of 1 for a plan without sharding.");
}

int ranks_that_share(const PlanOptions& options) {
  switch (options.shard.strategy) {
    case ShardingStrategy::NO_SHARD:
      return 1;
    case ShardingStrategy::HYBRID_SHARD:
      return std::min(options.shard_ranks > 0 ? options.shard_ranks : options.ranks_per_node,
                      options.world);
    default:
      return options.world;
  }
}

DeviceMesh mesh_of(const World& world, const PlanOptions& options) {
  int shard = ranks_that_share(options);
  if (world.size() % shard != 0)
    throw Error(formatted("plan(): HYBRID_SHARD over groups of {} ranks doesn't divide a world of "
                          "{}.",
                          shard, world.size()),
                "choose a world that is a multiple of the group (shard_ranks, else "
                "ranks_per_node), or use FULL_SHARD.");
  if (options.shard.strategy == ShardingStrategy::NO_SHARD)
    return DeviceMesh(world, {{"replicate", world.size()}});
  if (options.shard.strategy == ShardingStrategy::HYBRID_SHARD)
    return DeviceMesh(world, {{"replicate", world.size() / shard}, {"shard", shard}});
  return DeviceMesh(world, {{"shard", world.size()}});
}

ShardOptions shard_options(const World& world, const PlanOptions& options) {
  ShardOptions shard = options.shard;
  shard.mesh = mesh_of(world, options);
  shard.device = at::Device(at::kMeta);
  shard.initialize = false;
  shard.sync_module_states = false;
  shard.offload = {};  // plan_from() accounts for offload
  return shard;
}

// Rethrows LibTorch's error about an operator, in one line.
[[noreturn]] void explain(const c10::Error& error) {
  std::string what = error.what_without_backtrace();
  what = what.substr(0, what.find('\n'));
  throw Error("the step can't run without values: " + what,
              "a plan runs the step on the meta device: the model must create its tensors on "
              "step.device, and nothing may read values (item(), nonzero(), a mask as an index).");
}

void note_units(const shard::Engine& model, DryRun& run) {
  for (const auto& unit : shard::units_of(model)) {
    int64_t trained = 0;
    for (const auto& flat : unit->flats) {
      if (!flat->trainable()) run.frozen += static_cast<int64_t>(flat->shard.nbytes());
      if (flat->shard.is_same(flat->master))
        run.alone += static_cast<int64_t>(flat->shard.nbytes());
      for (const shard::Parameter& p : flat->parameters())
        if (p.handle.requires_grad()) trained += p.handle.numel();
    }
    run.units.push_back({unit->name, unit->root, unit->numel(), unit->full_bytes(), trained});
    run.parameters += unit->numel();
    run.element += static_cast<double>(unit->full_bytes());
  }
  run.element /= static_cast<double>(std::max<int64_t>(1, run.parameters));
}

// Called at every allocation: samples what was live before it, by owner.
void note(std::vector<Sample>& samples, const shard::Engine& model, const Meter& meter) {
  MemoryReport engine = shard::memory_of(model);
  int64_t live = meter.live();
  bool same = !samples.empty() && samples.back().engine.total() == engine.total() &&
              samples.back().engine.gradients == engine.gradients;
  if (same && samples.back().live >= live) return;
  Meter::Logits logits = meter.logits();
  Sample sample{engine, shard::saved_activations::held() - logits.saved, logits.all, live};
  if (same)
    samples.back() = sample;
  else
    samples.push_back(sample);
}

RecomputePolicy policy_of(const PlanOptions& options) {
  RecomputeOptions how{
      .mode = *options.recompute.mode, .every = options.every, .keep_last = options.keep_last};
  if (options.recompute.inner && !options.inner_modules)
    throw Error("plan(): recompute.inner is set without options.inner_modules.",
                "set options.inner_modules to the modules to recompute.");
  if (options.recompute.inner) return RecomputePolicy(options.inner_modules, how);
  return RecomputePolicy(options.recompute_modules ? options.recompute_modules : options.shard.wrap,
                         how);
}

DryRun run_steps(const PlanModel& build, const PlanOptions& options) {
  PlanSubject subject = deferred_init(build, {.random = false});
  Meter meter(/*blocks=*/options.gpu.has_value());
  World world = fake_world(options.world, options.ranks_per_node);
  Sharded sharded(shard::shard_modules({subject.module}, shard_options(world, options)));
  if (options.recompute.mode) apply_activation_checkpointing(sharded, policy_of(options));
  std::unique_ptr<Optimizer> optimizer =
      options.optimizer ? options.optimizer(sharded) : std::make_unique<AdamW>(sharded);
  shard::saved_activations::CountedApart counting;
  TrainStep train_step(
      sharded, *optimizer,
      [&](const auto&) { return subject.loss({options.batch, at::Device(at::kMeta)}); },
      {.clip = options.clip, .graph = false, .sum = true});
  auto step = [&](int micro_batches) {
    train_step(std::vector<TrainStep::Inputs>(static_cast<size_t>(micro_batches)));
  };
  step(1);  // creates states and buffers and learns the order of units
  DryRun run{.shard_ranks = ranks_that_share(options)};
  auto look = [&] { note(run.samples, *shard::lock(sharded), meter); };
  sharded.reset_traffic();
  shard::dry_run::take_products();
  auto& offloaded = shard::this_thread().dry_run.offloaded;
  offloaded = {.now = offloaded.now, .most = offloaded.now};
  meter.begin(look);
  int micro_batches = std::min(options.micro_batches, kMicroBatches);
  step(micro_batches);  // like every later step
  look();
  run.peak = meter.peak();
  run.peak_in_loss = meter.peak_in_loss();
  run.held = std::max(meter.peak_held(), meter.peak());
  run.allocated = meter.allocated();
  run.products = shard::dry_run::take_products();
  run.traffic = sharded.traffic();
  run.away = offloaded.most;
  run.moved = offloaded.moved;
  run.times = static_cast<double>(options.micro_batches) / micro_batches;
  note_units(*shard::lock(sharded), run);
  return run;
}

}  // namespace

DryRun dry_run(const PlanModel& model, const PlanOptions& options) {
  check_plan(model, options);
  install_missing_operators();
  shard::dry_run::Scope scope(options.gpu ? shard::dry_run::As::kGpu : shard::dry_run::As::kCpu);
  try {
    return run_steps(model, options);
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    explain(error);
  }
}

double offloaded_share(const DryRun& run, const Offload& offload) {
  std::vector<shard::UnitShare> units;
  for (const auto& unit : run.units) units.push_back({unit.trained, unit.root});
  const std::vector<bool> chosen = shard::last_units(units, offload.fraction);
  double all = 0, taken = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    all += static_cast<double>(units[i].numel);
    if (chosen[i]) taken += static_cast<double>(units[i].numel);
  }
  return all > 0 ? taken / all : 0;
}

bool can_spread(const DryRun& run, const PlanOptions& from, const PlanOptions& to) {
  int64_t ranks = ranks_that_share(to);
  bool micro = (from.micro_batches > 1) == (to.micro_batches > 1);
  return micro && from.world > 1 && to.world > 1 && (run.shard_ranks > 1) == (ranks > 1);
}

DryRun spread(const DryRun& run, const PlanOptions& from, const PlanOptions& to) {
  DryRun other = run;
  other.shard_ranks = ranks_that_share(to);
  double share = static_cast<double>(run.shard_ranks) / static_cast<double>(other.shard_ranks);
  int64_t before = 0, after = 0;
  for (Sample& sample : other.samples) {
    before = std::max(before, sample.live);
    auto shrink = [&](int64_t& kind) {
      auto now = static_cast<int64_t>(static_cast<double>(kind) * share);
      sample.live += now - kind;
      kind = now;
    };
    shrink(sample.engine.parameters);
    shrink(sample.engine.gathered_from);
    shrink(sample.engine.gradients);
    shrink(sample.engine.optimizer);
    after = std::max(after, sample.live);
  }
  other.alone = static_cast<int64_t>(static_cast<double>(run.alone) * share);
  other.frozen = static_cast<int64_t>(static_cast<double>(run.frozen) * share);
  other.peak += after - before;
  other.held += after - before;
  // Each of n ranks sends (n - 1) / n of a buffer.
  auto sent = [](int64_t ranks) { return static_cast<double>(ranks - 1) / ranks; };
  auto scale = [&](int64_t& bytes, int64_t ranks_before, int64_t ranks_now) {
    if (ranks_before > 1)
      bytes =
          static_cast<int64_t>(static_cast<double>(bytes) * sent(ranks_now) / sent(ranks_before));
  };
  scale(other.traffic.all_gather, run.shard_ranks, other.shard_ranks);
  scale(other.traffic.reduce_scatter, run.shard_ranks, other.shard_ranks);
  scale(other.traffic.all_to_all, run.shard_ranks, other.shard_ranks);
  scale(other.traffic.all_reduce, from.world / run.shard_ranks, to.world / other.shard_ranks);
  int done = std::min(from.micro_batches, kMicroBatches);
  other.times = static_cast<double>(to.micro_batches) / done;
  return other;
}

}  // namespace fsdp::memory
