// plan: what a training step would need, before anything is launched.
//
//   auto plan = fsdp::plan([] { return Net(config); },
//                          [](Net& net, const fsdp::PlanStep& step) {
//                            auto x = torch::randn({step.batch, 512}, step.device);
//                            return net->forward(x).sum();
//                          },
//                          {.shard = {.wrap = fsdp::wrap::modules<Block>()},
//                           .world = 64, .gpu = fsdp::gpu("h100"), .batch = 8});
//   std::cout << plan.describe();
//
// It is no formula but a dry run: the module is built without memory, sharded by the engine itself
// over a world of fake ranks, and trained for a few steps on the meta device, while every tensor
// that would have been allocated is counted. Nothing is computed, so a model of any size can be
// planned anywhere. docs/memory.md says what each kind is.
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

// What a plan must know of a device. Speeds are those of data sheets.
struct Gpu {
  std::string name;
  int64_t memory = 0;  // bytes that the driver reports
  double tflops = 0;   // of bfloat16 and float16 matrix products, dense
  double tflops_fp32 = 0;
  double bandwidth = 0;  // GB/s of its memory
  double link = 0;       // GB/s to the other GPUs of a node, one way
  double network = 0;    // GB/s to other nodes, for each GPU, one way
  double host_link = 0;  // GB/s to host memory, one way
};

const std::vector<Gpu>& known_gpus();
// "a100-40", "a100-80", "h100", "h200", "b200", or a number of GB: an h100 with that memory.
Gpu gpu(const std::string& name);

struct PlanStep {     // what a step is asked for
  int64_t batch;      // samples
  at::Device device;  // where its inputs must be made
};

// What is not kept as it is for backward.
struct PlanRecompute {
  std::optional<Recompute> mode = {};  // none: everything is
  bool inner = false;                  // of PlanOptions::inner_modules

  PlanRecompute() = default;
  PlanRecompute(std::nullopt_t) {}  // NOLINT: meant to convert
  PlanRecompute(Recompute mode, bool inner = false) : mode(mode), inner(inner) {}  // NOLINT
  auto operator<=>(const PlanRecompute&) const = default;
};

struct PlanOptions {
  ShardOptions shard = {};      // .mesh and .device are the plan's own
  int world = 8;                // ranks
  int ranks_per_node = 8;       // links are faster there
  int shard_ranks = 0;          // of HYBRID_SHARD, that hold one copy together; 0: a node's
  std::optional<Gpu> gpu = {};  // none: the habits and the allocator of the CPU, and no limit
  int64_t host_memory = 0;      // bytes of a node, for all its ranks; 0: not known, and no limit
  double disk_speed = 5;        // GB/s of a node's disk, read and written together
  int64_t batch = 1;            // samples of a micro-batch
  int micro_batches = 1;        // in a step
  double clip = 1.0;            // 0: none
  PlanRecompute recompute = {};
  WrapPolicy recompute_modules = {};  // none: those of shard.wrap
  WrapPolicy inner_modules = {};      // parts of these that may be chosen instead, such as
                                      // the feed-forwards of blocks
  int every = 1;                      // of these modules, every how many-th
  int keep_last = 0;                  // so many at the end are kept
  // AdamW where none is given.
  std::function<std::unique_ptr<Optimizer>(const Sharded&)> optimizer = {};
};

// Bytes of one rank when it needs the most, by kind.
struct PlannedMemory {
  int64_t parameters = 0;      // shards in the type they are computed with
  int64_t master = 0;          // what the optimizer updates, where that is not the same
  int64_t gradients = 0;       // reduced shards
  int64_t states = 0;          // of the optimizer
  int64_t gather_buffers = 0;  // gathered units
  int64_t communication = 0;   // whole gradients on their way
  int64_t activations = 0;     // what autograd keeps for backward
  int64_t logits = 0;          // what a loss over classes reads and makes
  int64_t temporaries = 0;     // all else: gradients of activations, inputs, buffers
  int64_t workspaces = 0;      // of cuBLAS and cuDNN
  int64_t fragmentation = 0;   // in segments of the allocator that nobody can use
  int64_t outside = 0;         // of the allocator: the driver's context, NCCL's buffers
  int64_t host = 0;            // offloaded: not on the device, in no sum
  int64_t disk = 0;            // in files, with offload.directory; neither

  // What the allocator hands out at most: what can be measured.
  int64_t peak() const {
    return parameters + master + gradients + states + gather_buffers + communication + activations +
           logits + temporaries + workspaces;
  }
  int64_t total() const { return peak() + fragmentation + outside; }
};

struct PlannedTime {  // seconds of a step, by a simple model
  double compute = 0;
  double communication = 0;  // all of it; most happens beside the computation
  double exposed = 0;        // what does not
  double optimizer = 0;
  double offload = 0;  // copies and host updates that do not hide
  double total() const { return compute + exposed + optimizer + offload; }
};

struct Plan {
  PlannedMemory memory;
  PlannedTime time;        // zero without a GPU
  int64_t batch = 0;       // as asked for
  int64_t samples = 0;     // of a step, over all ranks
  double flops = 0;        // of a rank's step
  int64_t parameters = 0;  // elements of the whole model
  int64_t units = 0;
  bool fits = true;                 // in the GPU's memory, and the host's
  std::vector<std::string> advice;  // bad ideas that were found
  std::string describe() const;     // memory by kind, time, advice: some lines
};

// A model and its loss, as plans use them.
struct PlanSubject {
  ModuleRef module;
  std::function<at::Tensor(const PlanStep&)> loss;
};
using PlanModel = std::function<PlanSubject()>;  // called under deferred_init

// An Error where a step looks at values or uses an operator that the meta device lacks; it names
// the operator.
Plan plan(const PlanModel& model, const PlanOptions& options);

// The most samples of a micro-batch that fit; 0: not even one. With a GPU.
int64_t largest_batch(const PlanModel& model, const PlanOptions& options);

// How many modules at the end need not be recomputed (options.keep_last).
struct KeepLast {
  int free = 0;  // without more memory at the peak than the options as they are take
  int fits = 0;  // in the GPU's memory; without a GPU the same
};
KeepLast most_kept(const PlanModel& model, const PlanOptions& options);

template <typename Make, typename Step>
PlanModel plan_model(Make make_model, Step step) {
  return [make_model, step] {
    auto model = make_model();
    return PlanSubject{ModuleRef(model),
                       [model, step](const PlanStep& what) mutable { return step(model, what); }};
  };
}

template <typename Make, typename Step>
Plan plan(Make make_model, Step step, const PlanOptions& options) {
  return plan(plan_model(std::move(make_model), std::move(step)), options);
}

// One way to train the model, and what comes of it.
struct PlanChoice {
  ShardingStrategy strategy = ShardingStrategy::FULL_SHARD;
  PlanRecompute recompute;
  Offload offload;
  int64_t largest_batch = 0;  // 0: does not fit
  Plan plan;                  // at that batch; at one sample where nothing fits
  bool fastest = false;       // of those that fit, by samples a second
  double samples_per_second() const;
};

struct SurveyOptions {
  // HYBRID_SHARD is left out where it is no choice of its own: with one node, or with parts of one.
  std::vector<ShardingStrategy> strategies = {
      ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::HYBRID_SHARD,
      ShardingStrategy::NO_SHARD};
  // Inner modules are left out where there are none.
  std::vector<PlanRecompute> recompute = {std::nullopt,
                                          Recompute::SELECTIVE,
                                          {Recompute::FULL, /*inner=*/true},
                                          Recompute::FULL,
                                          Recompute::OFFLOAD};
  // A directory is looked at where the same without it lacks host memory; its name does not matter.
  std::vector<Offload> offload = {
      {},
      {.optimizer = true},
      {.parameters = true, .gradients = true, .optimizer = true},
      {.parameters = true, .gradients = true, .optimizer = true, .directory = "disk"}};
};

// Every combination, each with the largest micro-batch that fits up to options.batch (0: any).
std::vector<PlanChoice> survey(const PlanModel& model, const PlanOptions& options,
                               const SurveyOptions& survey = {});

// What a number of ranks can do.
struct WorldChoice {
  int world = 0;
  int64_t largest_batch = 0;  // with the settings asked for; 0: they do not fit
  int settings = 0;           // that were looked at
  int fitting = 0;            // of these, with one sample
  bool host_lacks = false;    // some would fit, but for the memory of the host
  PlanChoice fastest;         // of these; its largest_batch is 0 where nothing fits
};

// A row for each of `options`, which differ in .world. One sample is planned for every setting and
// world; how much more each further sample takes is known from the first world. The few that seem
// the fastest then are planned as they are.
std::vector<WorldChoice> survey_worlds(const PlanModel& model,
                                       const std::vector<PlanOptions>& options,
                                       const SurveyOptions& survey = {});

}  // namespace fsdp
