// Plans of models that fill a GPU, against the peak of its allocator. Runs on one rank with a GPU.
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/utils.h>

#include "fsdp/deferred_init.h"
#include "fsdp/profile.h"
#include "memory/plan_subjects.h"
#include "shard/world.h"

namespace fsdp::testing::cuda_plans {
namespace {

constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

c10::DeviceAllocator& allocator() {
  return *c10::getDeviceAllocator(at::kCUDA);
}

int64_t allocated(bool peak) {
  auto stats = allocator().getDeviceStats(test_device().index());
  return peak ? stats.allocated_bytes[kAll].peak : stats.allocated_bytes[kAll].current;
}

// cuBLAS keeps one workspace for the forward thread and one for the backward thread, for good. They
// are made before anything is measured, and left out of the plan.
void make_workspaces() {
  for (at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    at::Tensor x = at::ones({64, 64}, at::TensorOptions(type).device(test_device()));
    x.requires_grad_(true);
    at::mm(x, x).sum().backward();
  }
}

struct Measured {
  int64_t peak = 0;   // of the allocator, in the third step
  MemoryReport held;  // by the engine and autograd, in that step
};

Measured measured(const PlannedModel& subject, const PlanOptions& options) {
  make_workspaces();
  at::Device device = test_device();
  allocator().emptyCache();
  int64_t before = allocated(/*peak=*/false);
  torch::manual_seed(7);
  PlanSubject made = deferred_init(subject.model);
  ShardOptions shard = options.shard;
  shard.device = device;
  Sharded sharded(shard::shard_modules({made.module}, shard));
  if (options.recompute.mode)
    apply_activation_checkpointing(
        sharded, RecomputePolicy(options.shard.wrap, {.mode = *options.recompute.mode}));
  AdamW optimizer(sharded);
  Measured found;
  Profile profile;
  for (int step = 0; step < 3; ++step) {
    if (step == 2) profile.begin(sharded);
    allocator().resetPeakStats(device.index());
    for (int i = 0; i < options.micro_batches; ++i) made.loss({options.batch, device}).backward();
    sharded.clip_grad_norm_(options.clip);
    optimizer.step();
    optimizer.zero_grad();
    found.peak = allocated(/*peak=*/true) - before;
  }
  profile.end();
  found.held = profile.memory();
  return found;
}

// `held`: also expects that the engine and autograd account for nearly all of the peak.
void expect_close(const PlannedModel& subject, const PlanOptions& options, bool held = false) {
  if (!test_device().is_cuda()) GTEST_SKIP() << "needs a GPU";
  PlannedMemory planned = plan(subject.model, options).memory;
  const Measured found = measured(subject, options);
  int64_t expected = planned.peak() - planned.workspaces;
  auto off = [&](int64_t bytes) {
    return 100.0 * static_cast<double>(bytes - found.peak) / static_cast<double>(found.peak);
  };
  EXPECT_LE(std::abs(off(expected)), 5)
      << subject.name << ": planned " << expected << ", measured " << found.peak;
  ::testing::Test::RecordProperty(subject.name, std::to_string(off(expected)));
  const int64_t known = found.held.total() + found.held.activations;
  if (held) {
    EXPECT_LE(std::abs(off(known)), 3) << subject.name << ": " << known << " of " << found.peak;
  }
}

PlanOptions options_for(const PlannedModel& subject, int64_t batch, bool bf16) {
  PlanOptions options{.shard = {.wrap = subject.wrap, .share_host_memory = false},
                      .world = world_size(),
                      .ranks_per_node = world_size(),
                      .gpu = gpu("h200"),
                      .batch = batch};
  if (bf16)
    options.shard.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  return options;
}

PlannedModel llama_182m() {
  return llama({.vocab = 8192, .dim = 768, .layers = 24, .heads = 12}, 256);
}

PlannedModel llama_953m() {
  return llama({.vocab = 32000, .dim = 2048, .layers = 16, .heads = 16}, 2048);
}

TEST(PlanCuda, PredictsTheSmallLlama) {
  expect_close(llama_182m(), options_for(llama_182m(), 1, /*bf16=*/true));
}

TEST(PlanCuda, PredictsTheLlama) {
  expect_close(llama_953m(), options_for(llama_953m(), 4, /*bf16=*/true), /*held=*/true);
}

TEST(PlanCuda, PredictsTheLlamaWithRecomputation) {
  for (Recompute mode : {Recompute::FULL, Recompute::SELECTIVE, Recompute::OFFLOAD}) {
    PlanOptions options = options_for(llama_953m(), 4, /*bf16=*/true);
    options.recompute = mode;
    expect_close(llama_953m(), options);
  }
}

TEST(PlanCuda, PredictsLongSequences) {
  const PlannedModel subject =
      llama({.vocab = 32000, .dim = 2048, .layers = 16, .heads = 16}, 65536, /*tile=*/8192);
  PlanOptions options = options_for(subject, 1, /*bf16=*/true);
  options.recompute = Recompute::FULL_OFFLOAD;
  expect_close(subject, options);
}

TEST(PlanCuda, PredictsMicroBatches) {
  PlanOptions options = options_for(llama_953m(), 2, /*bf16=*/true);
  options.micro_batches = 2;
  expect_close(llama_953m(), options);
}

TEST(PlanCuda, PredictsTheMlp) {
  PlannedModel subject = mlp(20480, 8);
  expect_close(subject, options_for(subject, 64, /*bf16=*/false), /*held=*/true);
}

// Many blocks, so that the unpredictable workspace of a convolution matters little.
TEST(PlanCuda, PredictsAResNet) {
  PlannedModel subject = resnet(24, 64, 32);
  expect_close(subject, options_for(subject, 64, /*bf16=*/false));
}

// One layer, mostly weights: cuDNN doesn't report what it keeps for backward.
TEST(PlanCuda, PredictsAnLstm) {
  PlannedModel subject = lstm(2048, 2048, 1, 16);
  expect_close(subject, options_for(subject, 16, /*bf16=*/false));
}

}  // namespace
}  // namespace fsdp::testing::cuda_plans
