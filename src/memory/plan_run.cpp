#include "memory/plan_run.h"

#include <algorithm>

#include "fsdp/deferred_init.h"
#include "fsdp/error.h"
#include "fsdp/mesh.h"
#include "fsdp/world.h"
#include "memory/plan_meter.h"
#include "memory/plan_operators.h"
#include "shard/deferred_trial.h"
#include "shard/dry_run.h"
#include "shard/model.h"
#include "shard/saved_activations.h"

namespace fsdp::memory {
namespace {

// The first makes states and buffers and learns the order of units, the second does as all that
// follow, the third is looked at when it needs the most.
constexpr int kStepsBefore = 2;
// From the second micro-batch on all need the same, so that more of them are only counted.
constexpr int kMicroBatches = 2;

void check(const PlanModel& model, const PlanOptions& options) {
  if (!model) throw Error("plan() was given no model.", "pass a function that makes one.");
  if (options.world < 1 || options.ranks_per_node < 1 || options.batch < 1 ||
      options.micro_batches < 1)
    throw Error("plan(): world, ranks_per_node, batch and micro_batches are at least 1.",
                "a world of one rank is a plan without sharding.");
}

int ranks_that_share(const PlanOptions& options) {
  switch (options.shard.strategy) {
    case ShardingStrategy::NO_SHARD:
      return 1;
    case ShardingStrategy::HYBRID_SHARD:
      return std::min(options.ranks_per_node, options.world);
    default:
      return options.world;
  }
}

DeviceMesh mesh_of(const World& world, const PlanOptions& options) {
  int shard = ranks_that_share(options);
  if (world.size() % shard != 0)
    throw Error("plan(): " + std::to_string(world.size()) + " ranks are no whole nodes of " +
                    std::to_string(shard) + ".",
                "choose a world that ranks_per_node divides, or FULL_SHARD.");
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
  shard.offload = {};  // moved to the host's side of the account afterwards
  return shard;
}

// What LibTorch says of an operator, in one line.
[[noreturn]] void explain(const c10::Error& error) {
  std::string what = error.what_without_backtrace();
  what = what.substr(0, what.find('\n'));
  throw Error(
      "a step cannot be taken without values: " + what,
      "a plan runs the step on the meta device: tensors that the model makes itself must be "
      "on step.device, and nothing may look at values (item(), nonzero(), a mask as an "
      "index).");
}

void note_units(const shard::Model& model, DryRun& run) {
  for (const auto& unit : model.units) {
    run.units.push_back({unit->name, unit->root, unit->numel(), unit->full_bytes()});
    run.parameters += unit->numel();
    run.element += static_cast<double>(unit->full_bytes());
  }
  run.element /= static_cast<double>(std::max<int64_t>(1, run.parameters));
}

// Sampled at every allocation: what was live before it, and whose it was.
void note(std::vector<Sample>& samples, const shard::Model& model, int64_t live) {
  MemoryReport engine = model.memory();
  bool same = !samples.empty() && samples.back().engine.total() == engine.total() &&
              samples.back().engine.gradients == engine.gradients;
  if (same && samples.back().live >= live) return;
  Sample sample{engine, shard::saved_activations::held(), live};
  if (same)
    samples.back() = sample;
  else
    samples.push_back(sample);
}

struct Counting {  // of what autograd keeps
  Counting() { shard::saved_activations::count(true); }
  ~Counting() { shard::saved_activations::count(false); }
};

DryRun run_steps(const PlanModel& build, const PlanOptions& options) {
  PlanSubject subject = [&] {
    shard::deferred::ShapesOnly shapes_only;
    return deferred_init(build);
  }();
  Meter meter(/*blocks=*/options.gpu.has_value());
  World world = fake_world(options.world, options.ranks_per_node);
  Sharded sharded(shard::shard_modules({subject.module}, shard_options(world, options)));
  const std::shared_ptr<shard::Model>& model = sharded.model();
  if (options.recompute) {
    const WrapPolicy& modules =
        options.recompute_modules ? options.recompute_modules : options.shard.wrap;
    apply_activation_checkpointing(sharded, RecomputePolicy(modules, {.mode = *options.recompute}));
  }
  std::unique_ptr<Optimizer> optimizer =
      options.optimizer ? options.optimizer(sharded) : std::make_unique<AdamW>(sharded);
  Counting counting;
  int micro_batches = std::min(options.micro_batches, kMicroBatches);
  auto step = [&] {
    for (int i = 0; i < micro_batches; ++i)
      subject.loss({options.batch, at::Device(at::kMeta)}).backward();
    if (options.clip > 0) sharded.clip_grad_norm_(options.clip);
    optimizer->step();
    optimizer->zero_grad();
  };
  for (int i = 0; i < kStepsBefore; ++i) {
    meter.begin();
    sharded.reset_traffic();
    shard::dry_run::take_products();
    step();
  }
  DryRun run{.peak = meter.peak(),
             .held = std::max(meter.peak_held(), meter.peak()),
             .allocated = meter.allocated(),
             .products = shard::dry_run::take_products(),
             .traffic = sharded.traffic(),
             .shard_ranks = ranks_that_share(options)};
  run.times = static_cast<double>(options.micro_batches) / micro_batches;
  note_units(*model, run);
  auto look = [&] { note(run.samples, *model, meter.live()); };
  meter.begin(look);
  step();
  look();
  return run;
}

}  // namespace

DryRun dry_run(const PlanModel& model, const PlanOptions& options) {
  check(model, options);
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

}  // namespace fsdp::memory
