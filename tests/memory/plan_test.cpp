// Plans against measurements: a plan predicts the bytes that LibTorch's CPU allocator hands out
// when the same steps really run, on as many ranks.
#include <ATen/ATen.h>
#include <torch/utils.h>

#include "base/seams.h"
#include "fsdp/plan.h"
#include "memory/plan_subjects.h"
#include "shard/counting_allocator.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

std::vector<PlannedModel> subjects() {
  return {mlp(), llama(), gemma3(), gpt2(), resnet(), lstm()};
}

PlanOptions options_for(const PlannedModel& subject) {
  return {.shard = {.wrap = subject.wrap, .share_host_memory = false},
          .world = world_size(),
          .ranks_per_node = world_size(),
          .batch = subject.batch};
}

// The peak of the CPU's allocator in a step like that of the plan.
int64_t measured(const PlannedModel& subject, const PlanOptions& options) {
  at::globalContext().setUserEnabledMkldnn(subject.onednn);
  CountingAllocator& counted = testing::counted();
  auto before = static_cast<int64_t>(counted.live);
  torch::manual_seed(7);
  PlanSubject made = subject.model();
  ShardOptions shard = options.shard;
  shard.device = at::kCPU;
  Sharded sharded(shard::shard_modules({made.module}, shard));
  if (options.recompute.mode)
    apply_activation_checkpointing(
        sharded, RecomputePolicy(options.shard.wrap, {.mode = *options.recompute.mode,
                                                      .every = options.every,
                                                      .keep_last = options.keep_last}));
  AdamW optimizer(sharded);
  for (int step = 0; step < 3; ++step) {
    counted.peak = counted.live.load();
    for (int i = 0; i < options.micro_batches; ++i) made.loss({options.batch, at::kCPU}).backward();
    sharded.clip_grad_norm_(options.clip);
    optimizer.step();
    optimizer.zero_grad();
  }
  at::globalContext().setUserEnabledMkldnn(true);
  // Ranks of a host read each other's gradients from shared memory, which the allocator doesn't
  // count.
  int64_t shared = world_size() > 1 ? sharded.memory().reduce_buffers : 0;
  const int64_t peak = static_cast<int64_t>(counted.peak) - before + shared;
  // The module first: a model whose handle goes first keeps its shards for a while.
  made = {.module = std::shared_ptr<torch::nn::Module>(), .loss = {}};
  return peak;
}

void expect_close(const std::string& name, int64_t planned, int64_t real) {
  double off = 100.0 * static_cast<double>(planned - real) / static_cast<double>(real);
  EXPECT_LE(std::abs(off), 5) << name << ": planned " << planned << ", measured " << real;
  ::testing::Test::RecordProperty(name, std::to_string(off));
}

TEST(Plan, PredictsThePeakOfAStep) {
  for (const PlannedModel& subject : subjects()) {
    PlanOptions options = options_for(subject);
    Plan planned = plan(subject.model, options);
    expect_close(subject.name, planned.memory.peak(), measured(subject, options));
  }
}

TEST(Plan, PredictsEveryStrategy) {
  for (ShardingStrategy strategy : {ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::NO_SHARD}) {
    PlanOptions options = options_for(llama());
    options.shard.strategy = strategy;
    expect_close(name(strategy), plan(llama().model, options).memory.peak(),
                 measured(llama(), options));
  }
}

TEST(Plan, PredictsRecomputation) {
  for (Recompute mode : {Recompute::FULL, Recompute::SELECTIVE}) {
    PlanOptions options = options_for(llama());
    options.recompute = mode;
    expect_close(mode == Recompute::FULL ? "full" : "selective",
                 plan(llama().model, options).memory.peak(), measured(llama(), options));
  }
}

// 1024 tokens in tiles of 128.
TEST(Plan, PredictsTilesAndInputsInHostMemory) {
  const WithSeams everything({.smallest_offloaded = 1});
  const models::LlamaConfig config{
      .vocab = 512, .dim = 64, .layers = 4, .heads = 4, .kv_heads = 2, .ffn = 512};
  auto peak = [&](int64_t tile, PlanRecompute recompute) {
    const PlannedModel subject = llama(config, 256, tile);
    PlanOptions options = options_for(subject);
    options.recompute = recompute;
    const Plan planned = plan(subject.model, options);
    const std::string mode = recompute.mode ? std::to_string(int(*recompute.mode)) : "none";
    expect_close("tiles of " + std::to_string(tile) + ", mode " + mode, planned.memory.peak(),
                 measured(subject, options));
    EXPECT_EQ(planned.memory.host > 0, recompute.mode == Recompute::FULL_OFFLOAD);
    return planned.memory.peak();
  };
  const int64_t whole = peak(0, Recompute::FULL), tiled = peak(128, Recompute::FULL);
  EXPECT_LT(tiled, whole * 3 / 4);
  EXPECT_LT(peak(128, std::nullopt), peak(0, std::nullopt) * 3 / 4);
  EXPECT_LT(peak(128, Recompute::FULL_OFFLOAD), tiled);
}

// Recomputing a block takes as much memory as keeping it, so keeping the last one is free.
TEST(Plan, PredictsThatTheLastBlocksAreKept) {
  PlanOptions options = options_for(llama());
  options.recompute = Recompute::FULL;
  options.batch = 16;
  Plan none = plan(llama().model, options);
  options.keep_last = 1;
  Plan one = plan(llama().model, options);
  EXPECT_EQ(one.memory.activations, none.memory.activations);
  options.keep_last = 2;
  Plan two = plan(llama().model, options);
  EXPECT_GT(two.memory.activations, none.memory.activations);
  expect_close("keep_last", two.memory.peak(), measured(llama(), options));
}

TEST(Plan, FindsHowManyBlocksNeedNotBeRecomputed) {
  PlanOptions options = options_for(llama());
  EXPECT_EQ(most_kept(llama().model, options).fits, 0);  // nothing is recomputed
  options.recompute = Recompute::FULL;
  options.batch = 16;
  KeepLast kept = most_kept(llama().model, options);
  EXPECT_EQ(kept.free, 1);  // as above
  EXPECT_EQ(kept.fits, 1);
  options.gpu = gpu("h100");
  kept = most_kept(llama().model, options);
  EXPECT_EQ(kept.fits, 2);  // of 3: at least one must be recomputed
  int64_t now = plan(llama().model, options).memory.total();
  options.keep_last = kept.free;
  EXPECT_EQ(plan(llama().model, options).memory.total(), now);
}

TEST(Plan, PredictsThatEverySecondBlockIsRecomputed) {
  PlanOptions options = options_for(llama());
  options.recompute = Recompute::FULL;
  options.batch = 16;
  int64_t all = plan(llama().model, options).memory.activations;
  options.every = 2;
  Plan half = plan(llama().model, options);
  EXPECT_GT(half.memory.activations, all);
  expect_close("every", half.memory.peak(), measured(llama(), options));
}

TEST(Plan, PredictsSmallNetworks) {
  std::vector<PlannedModel> small = {resnet(4), resnet(6, 32, 16), lstm(64, 192, 1),
                                     lstm(128, 96, 3)};
  for (size_t i = 0; i < small.size(); ++i) {
    PlanOptions options = options_for(small[i]);
    expect_close("small " + small[i].name + std::to_string(i),
                 plan(small[i].model, options).memory.peak(), measured(small[i], options));
  }
}

TEST(Plan, PredictsMicroBatches) {
  PlanOptions options = options_for(llama());
  options.micro_batches = 3;
  expect_close("micro", plan(llama().model, options).memory.peak(), measured(llama(), options));
}

TEST(Plan, PredictsMixedPrecision) {
  PlanOptions options = options_for(llama());
  options.shard.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  expect_close("bf16", plan(llama().model, options).memory.peak(), measured(llama(), options));
}

TEST(Plan, PredictsGathersInOneByte) {
  PlanOptions options = options_for(llama());
  options.shard.mixed_precision = {.param_dtype = at::kBFloat16, .gather = Wire::FP8};
  expect_close("wire", plan(llama().model, options).memory.peak(), measured(llama(), options));
}

}  // namespace
}  // namespace fsdp::testing
