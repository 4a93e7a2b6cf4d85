/// @file
/// What a training step will need, before anything is launched.
///
///     auto plan = fsdp::plan([] { return Net(config); },
///                            [](Net& net, const fsdp::PlanStep& step) {
///                              auto x = torch::randn({step.batch, 512}, step.device);
///                              return net->forward(x).sum();
///                            },
///                            {.shard = {.wrap = fsdp::wrap::modules<Block>()},
///                             .world = 64, .gpu = fsdp::gpu("h100"), .batch = 8});
///     std::cout << plan.describe();
///
/// A plan is a dry run, not a formula. The module is built without memory, sharded by the engine
/// over fake ranks, and trained for a few steps on the meta device, while every tensor that would
/// be allocated is counted. Nothing is computed, so any model can be planned on any machine.
/// docs/memory.md explains the kinds of memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/recompute.h"

namespace fsdp {

/// What a plan must know about a device. Speeds are from data sheets.
struct Gpu {
  std::string name;        ///< "h100".
  int64_t memory = 0;      ///< Bytes that the driver reports.
  double tflops = 0;       ///< Dense bfloat16 and float16 matrix products.
  double tflops_fp32 = 0;  ///< Float32 matrix products.
  double bandwidth = 0;    ///< GB/s of its memory.
  double link = 0;         ///< GB/s to the other GPUs of the node, one way.
  double network = 0;      ///< GB/s to other nodes, per GPU, one way.
  double host_link = 0;    ///< GB/s to host memory, one way.
};

/// The devices that gpu() knows.
const std::vector<Gpu>& known_gpus();
/// "a100-40", "a100-80", "h100", "h200", "b200", or a number of GB: an h100 with that memory.
Gpu gpu(const std::string& name);

/// What a loss function is asked for.
struct PlanStep {
  int64_t batch;      ///< Number of samples.
  at::Device device;  ///< Where to make its inputs.
};

/// How activations are saved for backward.
struct PlanRecompute {
  std::optional<Recompute> mode = {};  ///< nullopt: everything is saved.
  bool inner = false;                  ///< Applies to PlanOptions::inner_modules.

  /// Everything is saved.
  PlanRecompute() = default;
  /// Everything is saved.
  PlanRecompute(std::nullopt_t) {}  // NOLINT: meant to convert
  /// With a mode.
  PlanRecompute(Recompute mode, bool inner = false) : mode(mode), inner(inner) {}  // NOLINT
  /// Any order, for maps.
  auto operator<=>(const PlanRecompute&) const = default;
};

/// Options of plan() and the functions around it.
struct PlanOptions {
  ShardOptions shard = {};       ///< Without mesh and device, which the plan sets.
  int world = 8;                 ///< Number of ranks.
  int ranks_per_node = 8;        ///< Ranks of a node have faster links.
  int shard_ranks = 0;           ///< HYBRID_SHARD: ranks that share one copy. 0: those of a node.
  std::optional<Gpu> gpu = {};   ///< nullopt: a CPU, with its allocator and without a limit.
  int64_t host_memory = 0;       ///< Bytes per node, for all its ranks. 0: unknown, no limit.
  double disk_speed = 5;         ///< GB/s of a node's disk, reads and writes together.
  int64_t batch = 1;             ///< Samples per micro-batch.
  int micro_batches = 1;         ///< Micro-batches per step.
  double clip = 1.0;             ///< Gradient clipping. 0: none.
  PlanRecompute recompute = {};  ///< How activations are saved.
  WrapPolicy recompute_modules = {};  ///< Modules to recompute. Empty: those of shard.wrap.

  /// Parts of these modules to recompute instead with PlanRecompute::inner, such as feed-forwards.
  WrapPolicy inner_modules = {};
  int every = 1;      ///< Recompute every k-th of these modules.
  int keep_last = 0;  ///< Don't recompute the last k of them.

  /// Makes the optimizer. Empty: AdamW.
  std::function<std::unique_ptr<Optimizer>(const Sharded&)> optimizer = {};
};

/// Bytes of one rank at its peak, by kind.
struct PlannedMemory {
  int64_t parameters = 0;      ///< Shards in the dtype of computation.
  int64_t master = 0;          ///< Masters, if they have another dtype.
  int64_t gradients = 0;       ///< Reduced shards.
  int64_t states = 0;          ///< Optimizer states.
  int64_t gather_buffers = 0;  ///< Gathered units.
  int64_t communication = 0;   ///< Whole gradients waiting to be reduced.
  int64_t activations = 0;     ///< What autograd keeps for backward.
  int64_t logits = 0;          ///< What a loss over classes reads and makes.
  int64_t temporaries = 0;     ///< The rest: gradients of activations, inputs, buffers.
  int64_t workspaces = 0;      ///< cuBLAS and cuDNN.
  int64_t fragmentation = 0;   ///< Unusable parts of the allocator's segments.
  int64_t outside = 0;         ///< Outside the allocator: driver context, NCCL buffers.
  int64_t host = 0;            ///< Offloaded to host memory. In no sum.
  int64_t disk = 0;            ///< In files, with offload.directory. In no sum.

  /// The most that the allocator hands out, which can be measured.
  int64_t peak() const {
    return parameters + master + gradients + states + gather_buffers + communication + activations +
           logits + temporaries + workspaces;
  }
  /// All device memory.
  int64_t total() const { return peak() + fragmentation + outside; }
};

/// Seconds of a step, by a simple model.
struct PlannedTime {
  double compute = 0;        ///< Forward and backward.
  double communication = 0;  ///< All of it; most overlaps with compute.
  double exposed = 0;        ///< The part of communication that doesn't overlap.
  double optimizer = 0;      ///< The update.
  double offload = 0;        ///< Copies and host updates that don't overlap.

  /// The whole step.
  double total() const { return compute + exposed + optimizer + offload; }
};

/// What a step needs.
struct Plan {
  PlannedMemory memory;             ///< Memory of a rank.
  PlannedTime time;                 ///< Zero without a GPU.
  int64_t batch = 0;                ///< Samples per micro-batch, as asked for.
  int64_t samples = 0;              ///< Samples per step, over all ranks.
  double flops = 0;                 ///< Floating-point operations of a rank's step.
  int64_t parameters = 0;           ///< Elements of the whole model.
  int64_t units = 0;                ///< Number of units.
  bool fits = true;                 ///< In the GPU's memory and the host's.
  std::vector<std::string> advice;  ///< Bad settings that were found.

  /// Memory by kind, time and advice as text.
  std::string describe() const;
};

/// A model and its loss.
struct PlanSubject {
  ModuleRef module;                                 ///< The model.
  std::function<at::Tensor(const PlanStep&)> loss;  ///< The loss of one micro-batch.
};
/// Builds the model. Called inside deferred_init().
using PlanModel = std::function<PlanSubject()>;

/// Plans a step. Throws Error with the operator's name if the step reads values or uses an operator
/// that the meta device lacks.
Plan plan(const PlanModel& model, const PlanOptions& options);

/// The largest micro-batch that fits, in samples; 0: not even one. Needs options.gpu.
int64_t largest_batch(const PlanModel& model, const PlanOptions& options);

/// How many modules at the end needn't be recomputed (PlanOptions::keep_last).
struct KeepLast {
  int free = 0;  ///< Without raising the peak of the given options.
  int fits = 0;  ///< Within the GPU's memory. Without a GPU the same as `free`.
};
/// Finds how many modules at the end needn't be recomputed.
KeepLast most_kept(const PlanModel& model, const PlanOptions& options);

/// A PlanModel from a function that builds the model and one that computes its loss.
template <typename Make, typename Step>
PlanModel plan_model(Make make_model, Step step) {
  return [make_model, step] {
    auto model = make_model();
    return PlanSubject{ModuleRef(model),
                       [model, step](const PlanStep& what) mutable { return step(model, what); }};
  };
}

/// Plans a step of `step(model, PlanStep)`, with the model that `make_model()` builds.
template <typename Make, typename Step>
Plan plan(Make make_model, Step step, const PlanOptions& options) {
  return plan(plan_model(std::move(make_model), std::move(step)), options);
}

/// One way to train the model, with its plan.
struct PlanChoice {
  ShardingStrategy strategy = ShardingStrategy::FULL_SHARD;  ///< The strategy.
  PlanRecompute recompute;                                   ///< How activations are saved.
  Offload offload;                                           ///< What is offloaded.
  int64_t largest_batch = 0;                                 ///< 0: doesn't fit.
  Plan plan;             ///< At that micro-batch; at one sample if it doesn't fit.
  bool fastest = false;  ///< Most samples per second of those that fit.

  /// Samples per second of the plan.
  double samples_per_second() const;
};

/// What survey() combines.
struct SurveyOptions {
  /// HYBRID_SHARD is left out on a single node or a part of one, where it has no copies.
  std::vector<ShardingStrategy> strategies = {
      ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::HYBRID_SHARD,
      ShardingStrategy::NO_SHARD};
  /// Inner modules are left out if there are none.
  std::vector<PlanRecompute> recompute = {std::nullopt,
                                          Recompute::SELECTIVE,
                                          {Recompute::FULL, /*inner=*/true},
                                          Recompute::FULL,
                                          Recompute::OFFLOAD};
  /// A directory is tried only if the same without it lacks host memory. Its name doesn't matter.
  std::vector<Offload> offload = {
      {},
      {.optimizer = true},
      {.parameters = true, .gradients = true, .optimizer = true},
      {.parameters = true, .gradients = true, .optimizer = true, .directory = "disk"}};
};

/// Every combination, each with the largest micro-batch that fits, up to options.batch (0: any).
std::vector<PlanChoice> survey(const PlanModel& model, const PlanOptions& options,
                               const SurveyOptions& survey = {});

/// What a number of ranks can do.
struct WorldChoice {
  int world = 0;              ///< Number of ranks.
  int64_t largest_batch = 0;  ///< With the settings asked for; 0: they don't fit.
  int settings = 0;           ///< Number of combinations tried.
  int fitting = 0;            ///< Those that fit with one sample.
  bool host_lacks = false;    ///< Some fit the GPU but not the host's memory.
  PlanChoice fastest;         ///< The fastest. Its largest_batch is 0 if nothing fits.
};

/// One row for each of `options`, which differ in PlanOptions::world.
///
/// Plans one sample for every combination and world. The memory per further sample is taken from
/// the first world, and the few combinations that then look fastest are planned exactly.
std::vector<WorldChoice> survey_worlds(const PlanModel& model,
                                       const std::vector<PlanOptions>& options,
                                       const SurveyOptions& survey = {});

}  // namespace fsdp
