// Plans compared with each other: kinds of memory, settings that fit, worlds, and advice.
#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <optional>
#include <utility>

#include "base/seams.h"
#include "fsdp/error.h"
#include "fsdp/out_of_memory.h"
#include "fsdp/plan.h"
#include "memory/activation_offload.h"
#include "memory/plan_subjects.h"
#include "shard/counting_allocator.h"
#include "shard/world.h"

namespace fsdp::testing::choices {
namespace {

PlanOptions options_for(const PlannedModel& subject) {
  return {.shard = {.wrap = subject.wrap, .share_host_memory = false},
          .world = world_size(),
          .ranks_per_node = world_size(),
          .batch = subject.batch};
}

TEST(Plan, KindsAddUpAndShrinkWithTheWorld) {
  PlanOptions options = options_for(llama());
  options.gpu = gpu("h100");
  options.world = 1;
  Plan alone = plan(llama().model, options);
  options.world = 8;
  Plan eight = plan(llama().model, options);
  EXPECT_GT(alone.memory.activations, 0);
  EXPECT_EQ(alone.memory.activations, eight.memory.activations);
  EXPECT_NEAR(static_cast<double>(alone.memory.states) / static_cast<double>(eight.memory.states),
              8, 0.1);
  const PlannedMemory& m = eight.memory;
  EXPECT_EQ(m.peak(), m.parameters + m.master + m.gradients + m.states + m.gather_buffers +
                          m.communication + m.activations + m.logits + m.temporaries +
                          m.workspaces);
  EXPECT_GT(eight.flops, 0);
  EXPECT_EQ(alone.flops, eight.flops);
  EXPECT_GT(eight.time.communication, 0);
  EXPECT_EQ(alone.time.communication, 0);
}

TEST(Plan, LogitsAreTheInputsAndOutputsOfALossOverClasses) {
  const int64_t vocab = 50000, tokens = 512;
  auto subject = [&](bool ours) {
    return plan_model([=] { return torch::nn::Linear(torch::nn::LinearOptions(64, vocab)); },
                      [=](torch::nn::Linear& model, const PlanStep& step) {
                        at::Tensor logits = model->forward(at::ones({tokens, 64}, step.device));
                        if (ours) return logits.square().mean();
                        at::Tensor to =
                            at::zeros({tokens}, at::TensorOptions(at::kLong).device(step.device));
                        return at::cross_entropy_loss(logits, to);
                      });
  };
  int64_t one = tokens * vocab * 4;
  PlannedMemory classes = plan(subject(false), {.world = 1}).memory;
  // The logits or log-softmax, and a gradient: at most all of them at once.
  EXPECT_GE(classes.logits, 2 * one);
  EXPECT_LE(classes.logits, 4 * one + 4096);
  EXPECT_LT(classes.activations + classes.temporaries, one);
  PlannedMemory squares = plan(subject(true), {.world = 1}).memory;
  EXPECT_EQ(squares.logits, 0);
  EXPECT_GE(squares.activations + squares.temporaries, one);
}

TEST(Plan, ChunkedLogitsAreFewerThanAll) {
  models::LlamaConfig config{.vocab = 65536, .dim = 64, .layers = 1, .heads = 2, .kv_heads = 1};
  PlanOptions options = options_for(llama(config, 1024));
  options.gpu = gpu("h100");
  options.batch = 16;  // 16384 rows; 2048 of them at a time
  PlannedMemory memory = plan(llama(config, 1024).model, options).memory;
  int64_t all = 16 * 1024 * 65536 * int64_t{4};
  EXPECT_GE(memory.logits, all / 8);
  EXPECT_LT(memory.logits, all / 4);
}

TEST(Plan, OffloadedActivationsCountAsHostMemory) {
  PlannedModel subject =
      llama({.vocab = 512, .dim = 256, .layers = 6, .heads = 4, .kv_heads = 2}, 512);
  PlanOptions options = options_for(subject);
  options.gpu = gpu("h100");
  options.batch = 8;
  Plan kept = plan(subject.model, options);
  options.recompute = Recompute::OFFLOAD;
  Plan away = plan(subject.model, options);
  EXPECT_LT(away.memory.activations, kept.memory.activations / 2);
  EXPECT_EQ(kept.memory.host, 0);
  EXPECT_GE(away.memory.host, kept.memory.activations - away.memory.activations);
  EXPECT_EQ(away.flops, kept.flops);
  EXPECT_GE(away.time.offload, 0);
}

TEST(Plan, AFractionIsOffloadedInWholeUnits) {
  PlanOptions options = options_for(llama());
  options.gpu = gpu("h100");
  auto on_host = [&](double fraction) {
    options.shard.offload = {.optimizer = true, .fraction = fraction};
    return plan(llama().model, options).memory.host;
  };
  const int64_t all = on_host(1), none = on_host(1e-6), some = on_host(0.6);
  EXPECT_EQ(none, 0);
  EXPECT_GT(some, 0);
  EXPECT_LT(some, all);
  EXPECT_EQ(on_host(0.601), some);  // not one unit more
}

TEST(Plan, HostMemoryForActivationsIsReported) {
  std::optional<WithSeams> everything(std::in_place, Seams{.smallest_offloaded = 1});
  PlannedModel subject = llama();
  torch::manual_seed(7);
  PlanSubject made = subject.model();
  Sharded sharded(
      shard::shard_modules({made.module}, {.wrap = subject.wrap, .share_host_memory = false}));
  apply_activation_checkpointing(sharded,
                                 RecomputePolicy(subject.wrap, {.mode = Recompute::OFFLOAD}));
  made.loss({subject.batch, at::kCPU}).backward();
  everything.reset();
  MemoryReport report = sharded.memory();
  EXPECT_GT(report.host_activations, 0);
  EXPECT_EQ(report.host_activations, memory::offload::use_of(at::kCPU).pool);
  EXPECT_TRUE(contains(report.table(), "host memory for activations"));
}

TEST(Plan, NothingIsComputedAndNothingAllocated) {
  // 70 times 4 GiB of parameters, and products that would take hours.
  PlanModel large =
      plan_model([] { return models::MLP(models::MLPConfig{.width = 32768, .layers = 70}); },
                 [](models::MLP& model, const PlanStep& step) {
                   return model->predict(at::empty({step.batch, 32768}, step.device)).sum();
                 });
  CountingAllocator& counted = testing::counted();
  size_t before = counted.live;
  counted.peak = before;
  Plan planned = plan(large, {.shard = {.wrap = wrap::modules<torch::nn::Linear>()},
                              .world = 512,
                              .gpu = gpu("h100"),
                              .batch = 4096});
  EXPECT_EQ(planned.parameters, 70ll * 32768 * 32769);
  EXPECT_EQ(planned.units, 71);
  EXPECT_NEAR(planned.flops, 70 * 6.0 * 4096 * 32768 * 32768, 0.02 * planned.flops);
  EXPECT_LE(counted.peak - before, size_t{32} << 20);
}

TEST(Plan, TheLargestBatchFitsAndAQuarterMoreDoesNot) {
  PlanOptions options = options_for(llama());
  options.gpu = gpu("h100");
  options.gpu->memory = (int64_t{3} << 30);
  int64_t most = largest_batch(llama().model, options);
  ASSERT_GT(most, 10);
  options.batch = most;
  EXPECT_TRUE(plan(llama().model, options).fits);
  options.batch = most + 1 + most / 4;
  EXPECT_FALSE(plan(llama().model, options).fits);
  options.gpu->memory = int64_t{1} << 20;
  EXPECT_EQ(largest_batch(llama().model, options), 0);
}

TEST(Plan, OffloadMovesBytesToTheHost) {
  PlanOptions options = options_for(llama());
  options.gpu = gpu("h100");
  Plan on_device = plan(llama().model, options);
  options.shard.offload = {.parameters = true, .gradients = true, .optimizer = true};
  Plan off = plan(llama().model, options);
  EXPECT_EQ(off.memory.states + off.memory.gradients + off.memory.parameters, 0);
  EXPECT_LE(off.memory.activations, on_device.memory.activations);  // the peak may come later
  EXPECT_LT(off.memory.peak(), on_device.memory.peak());
  EXPECT_GE(off.memory.host, on_device.memory.states + on_device.memory.gradients);
  EXPECT_GT(off.time.offload, 0);
}

// Includes one rank, which gathers and reduces nothing without offload.
TEST(Plan, OffloadedModelsHoldOnTheDeviceWhatThePlanSays) {
  const PlannedModel subject = mlp();
  const std::vector<std::pair<ShardingStrategy, int>> ways = {{ShardingStrategy::FULL_SHARD, 0},
                                                              {ShardingStrategy::FULL_SHARD, 1},
                                                              {ShardingStrategy::SHARD_GRAD_OP, 1},
                                                              {ShardingStrategy::NO_SHARD, 1}};
  for (const Offload& offload :
       {Offload{.optimizer = true}, Offload{.parameters = true}, Offload{.gradients = true},
        Offload{.parameters = true, .gradients = true, .optimizer = true}})
    for (const auto& [strategy, ahead] : ways) {
      SCOPED_TRACE(name(strategy) + std::string(offload.parameters ? " parameters" : ""));
      PlanOptions options = options_for(subject);
      options.shard.strategy = strategy;
      options.shard.offload = offload;
      options.shard.forward_prefetch = options.shard.backward_prefetch = ahead;
      const PlannedMemory planned = plan(subject.model, options).memory;
      PlanSubject real = subject.model();
      Sharded sharded = fully_shard(real.module, options.shard);
      AdamW optimizer(sharded);
      for (int i = 0; i < 2; ++i) {
        real.loss({subject.batch, at::kCPU}).backward();
        optimizer.step();
      }
      const MemoryReport memory = sharded.memory();
      const int64_t held = planned.parameters + planned.master + planned.gradients +
                           planned.states + planned.gather_buffers + planned.communication;
      EXPECT_NEAR(static_cast<double>(held), static_cast<double>(memory.total() - memory.host),
                  0.05 * static_cast<double>(held));
      EXPECT_NEAR(static_cast<double>(planned.host), static_cast<double>(memory.host),
                  0.01 * static_cast<double>(memory.host));
    }
}

TEST(Plan, OffloadMustFitInHostMemory) {
  PlanOptions options = options_for(llama());
  options.world = 16;
  options.ranks_per_node = 8;
  options.gpu = gpu("h100");
  options.shard.offload.optimizer = true;
  int64_t each = plan(llama().model, options).memory.host;
  options.host_memory = 8 * each;
  EXPECT_TRUE(plan(llama().model, options).fits);
  options.host_memory = 8 * each - 1;
  Plan too_much = plan(llama().model, options);
  EXPECT_FALSE(too_much.fits);
  ASSERT_FALSE(too_much.advice.empty());
  EXPECT_TRUE(contains(too_much.advice.back(), "8 ranks of a host need"));
  options.shard.offload = {};
  EXPECT_TRUE(plan(llama().model, options).fits);
}

TEST(Plan, Fp8KeepsNoMoreAndIsFaster) {
  const models::LlamaConfig config{.vocab = 512, .dim = 2048, .layers = 2, .heads = 16};
  const PlannedModel usual = llama(config, 1024);
  PlanOptions options = options_for(usual);
  options.gpu = gpu("h100");
  options.shard.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  const Plan bf16 = plan(usual.model, options);
  for (auto recipe :
       {fsdp::nn::Fp8::kTensorwise, fsdp::nn::Fp8::kRowwise, fsdp::nn::Fp8::kRowwiseBf16Grad}) {
    const Plan fp8 = plan(fp8_llama(recipe, config, 1024).model, options);
    EXPECT_NEAR(fp8.flops, bf16.flops, 1e-6 * bf16.flops);
    EXPECT_LT(fp8.time.compute, bf16.time.compute);
    EXPECT_LT(static_cast<double>(fp8.memory.peak()),
              1.02 * static_cast<double>(bf16.memory.peak()));
  }
}

TEST(Plan, RecomputationKeepsLessAndTakesLonger) {
  PlanOptions options = options_for(llama());
  options.gpu = gpu("h100");
  Plan none = plan(llama().model, options);
  options.recompute = Recompute::SELECTIVE;
  Plan selective = plan(llama().model, options);
  options.recompute = Recompute::FULL;
  Plan full = plan(llama().model, options);
  EXPECT_LT(full.memory.activations, selective.memory.activations);
  EXPECT_LT(full.memory.activations, none.memory.activations / 2);
  EXPECT_GT(full.flops, 1.2 * none.flops);
  EXPECT_LT(selective.flops, 1.1 * none.flops);
}

TEST(Plan, TheSurveyMarksTheFastestThatFits) {
  PlanOptions options = options_for(llama());
  options.gpu = gpu("h100");
  options.gpu->memory = int64_t{2} << 30;
  options.batch = 4;
  std::vector<PlanChoice> choices = survey(llama().model, options);
  // No HYBRID_SHARD: there is one node. NO_SHARD keeps parameters on the device.
  EXPECT_EQ(choices.size(), 32);
  int marked = 0;
  double best = 0;
  for (const PlanChoice& choice : choices) {
    if (choice.largest_batch > 0) best = std::max(best, choice.samples_per_second());
    marked += choice.fastest;
  }
  EXPECT_EQ(marked, 1);
  for (const PlanChoice& choice : choices)
    if (choice.fastest) {
      EXPECT_EQ(choice.samples_per_second(), best);
    }
  options.gpu->memory = 1;
  for (const PlanChoice& choice : survey(llama().model, options)) {
    EXPECT_EQ(choice.largest_batch, 0);
    EXPECT_FALSE(choice.fastest);
  }
}

TEST(Plan, ADiskIsAChoiceIfHostMemoryIsTooSmall) {
  PlannedModel deep = llama(
      {.vocab = 512, .dim = 128, .layers = 12, .heads = 4, .kv_heads = 2});  // units are small
  PlanOptions options = options_for(deep);
  options.gpu = gpu("h100");
  options.gpu->memory = int64_t{2} << 30;
  options.batch = 1;
  options.shard.offload = {.parameters = true, .gradients = true, .optimizer = true};
  const Plan host = plan(deep.model, options);
  options.shard.offload.directory = "somewhere";
  const Plan disk = plan(deep.model, options);
  EXPECT_EQ(disk.memory.peak(), host.memory.peak());
  EXPECT_GT(disk.memory.disk, 0);
  EXPECT_LT(disk.memory.host, host.memory.host);
  EXPECT_LE(host.memory.host, disk.memory.host + disk.memory.disk);
  options.disk_speed = 1e-3;
  EXPECT_GT(plan(deep.model, options).time.offload, 10 * disk.time.offload);

  const auto on_disk = [&](int64_t host_memory) {
    options.host_memory = host_memory;
    options.disk_speed = 5;
    int fitting = 0;
    for (const PlanChoice& choice :
         survey(deep.model, options, {.strategies = {ShardingStrategy::FULL_SHARD}}))
      fitting += !choice.offload.directory.empty() && choice.largest_batch == 1;
    return fitting;
  };
  const int ranks = std::min(options.ranks_per_node, options.world);
  const SurveyOptions asked{.strategies = {ShardingStrategy::FULL_SHARD},
                            .recompute = {std::nullopt},
                            .offload = {options.shard.offload}};
  EXPECT_EQ(survey(deep.model, options, asked).size(), 1);  // the only choice is always planned
  EXPECT_EQ(on_disk(0), 0);
  // With offloaded activations, a disk may not be enough either.
  EXPECT_LE(on_disk(ranks * host.memory.host), 1);
  EXPECT_GE(on_disk(ranks * (host.memory.host - 1)), 3);
}

TEST(Plan, HybridShardingIsAChoiceForSeveralNodes) {
  PlanOptions options = options_for(llama());
  options.gpu = gpu("h100");
  options.gpu->memory = int64_t{2} << 30;
  options.batch = 1;
  options.ranks_per_node = 2;
  auto hybrids = [&](int world) {
    options.world = world;
    int count = 0;
    for (const PlanChoice& choice :
         survey(llama().model, options, {.recompute = {std::nullopt}, .offload = {{}}}))
      count += choice.strategy == ShardingStrategy::HYBRID_SHARD;
    return count;
  };
  EXPECT_EQ(hybrids(4), 1);
  EXPECT_EQ(hybrids(2), 0);
  EXPECT_EQ(hybrids(3), 0);
  options.shard_ranks = 3;
  EXPECT_EQ(hybrids(6), 1);
  EXPECT_EQ(hybrids(4), 0);
}

TEST(Plan, AHybridHoldsWhatANodeOfItsSizeHolds) {
  PlanOptions options = options_for(llama());
  options.gpu = gpu("h100");
  options.world = 4;
  options.ranks_per_node = 4;
  PlannedMemory node = plan(llama().model, options).memory;
  options.world = 16;
  options.shard.strategy = ShardingStrategy::HYBRID_SHARD;
  PlannedMemory nodes = plan(llama().model, options).memory;
  EXPECT_EQ(nodes.parameters, node.parameters);
  EXPECT_EQ(nodes.states, node.states);
  options.shard_ranks = 2;
  EXPECT_NEAR(static_cast<double>(plan(llama().model, options).memory.states),
              2.0 * static_cast<double>(node.states), 0.05 * static_cast<double>(node.states));
  options.world = 15;
  expect_error([&] { plan(llama().model, options); }, {"HYBRID_SHARD", "groups of 2", "15"});
}

TEST(Plan, ASurveyOfWorldsMatchesASurveyOfEach) {
  std::vector<PlanOptions> worlds;
  for (int world : {1, 4, 8, 32}) {
    worlds.push_back(options_for(llama()));
    worlds.back().gpu = gpu("h100");
    worlds.back().gpu->memory = int64_t{2} << 30;
    worlds.back().world = world;
    worlds.back().ranks_per_node = std::min(world, 8);
    worlds.back().batch = 0;
  }
  SurveyOptions few{.recompute = {std::nullopt, Recompute::FULL}, .offload = {{}}};
  std::vector<WorldChoice> rows = survey_worlds(llama().model, worlds, few);
  ASSERT_EQ(rows.size(), 4);
  for (size_t i = 0; i < rows.size(); ++i) {
    SCOPED_TRACE(rows[i].world);
    EXPECT_EQ(rows[i].world, worlds[i].world);
    std::vector<PlanChoice> alone = survey(llama().model, worlds[i], few);
    EXPECT_EQ(rows[i].settings, static_cast<int>(alone.size()));
    EXPECT_EQ(rows[i].fitting, rows[i].settings);
    double best = 0;
    for (const PlanChoice& choice : alone) best = std::max(best, choice.samples_per_second());
    EXPECT_NEAR(rows[i].fastest.samples_per_second(), best, 0.03 * best);
    EXPECT_NEAR(static_cast<double>(rows[i].largest_batch),
                static_cast<double>(alone.front().largest_batch),
                0.04 * static_cast<double>(alone.front().largest_batch));
  }
  for (PlanOptions& one : worlds) one.gpu->memory = int64_t{1} << 20;
  for (const WorldChoice& row : survey_worlds(llama().model, worlds, few)) {
    EXPECT_EQ(row.fitting, 0);
    EXPECT_EQ(row.largest_batch, 0);
    EXPECT_EQ(row.fastest.largest_batch, 0);
  }
}

TEST(Plan, AdvisesAgainstBadSettings) {
  PlanOptions options = options_for(llama());
  options.world = 8;
  options.gpu = gpu("h100");
  auto said = [&](const char* word) {
    std::string all;
    for (const std::string& one : plan(llama().model, options).advice) all += one;
    return contains(all, word);
  };
  EXPECT_FALSE(said("root unit"));
  options.shard.wrap = wrap::names({"layers.0"});
  EXPECT_TRUE(said("root unit"));
  options.shard.wrap = wrap::types({"RMSNorm"});
  EXPECT_TRUE(said("less than 1 MiB"));
  options.gpu->memory = int64_t{1} << 30;
  EXPECT_TRUE(said("does not fit"));
}

TEST(Plan, AnOperatorThatReadsValuesIsRefusedByName) {
  PlanModel looks = plan_model([] { return torch::nn::Linear(8, 8); },
                               [](torch::nn::Linear& model, const PlanStep& step) {
                                 at::Tensor y = model->forward(at::ones({2, 8}, step.device));
                                 return y.masked_select(y > 0).sum();
                               });
  expect_error([&] { plan(looks, {}); }, {"masked_select", "values"});
}

// --- out of memory ---

TEST(OutOfMemory, TheErrorSaysWhatHeldItAndWhatHelps) {
  PlannedModel subject = llama();
  PlanOptions options = options_for(subject);
  options.batch = 16;
  int64_t before = static_cast<int64_t>(counted().live);
  torch::manual_seed(7);
  PlanSubject made = subject.model();
  Sharded sharded(shard::shard_modules({made.module}, options.shard));
  AdamW optimizer(sharded);
  auto step = [&] {
    made.loss({options.batch, at::kCPU}).backward();
    sharded.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  int64_t planned = plan(subject.model, options).memory.peak();
  counted().limit = static_cast<size_t>(before + planned * 8 / 10);
  std::string said;
  try {
    step();
  } catch (const std::exception& problem) {
    EXPECT_TRUE(is_out_of_memory(problem));
    counted().limit = std::numeric_limits<size_t>::max();
    said = explain_out_of_memory(sharded, problem, subject.model, options).what();
  }
  counted().limit = std::numeric_limits<size_t>::max();
  for (const char* word :
       {"can't allocate memory", "held:", "optimizer states", "the process peaked at",
        "planned:", "1. ", "2. ", "3. ", "--activations.mode", "--train.micro_batch 8", "saves"})
    EXPECT_TRUE(contains(said, word)) << word << " in\n" << said;
  EXPECT_FALSE(contains(said, "4. "));
}

TEST(OutOfMemory, OtherErrorsAreNotOutOfMemory) {
  EXPECT_FALSE(is_out_of_memory(Error("no", "")));
  EXPECT_FALSE(is_out_of_memory(std::runtime_error("out of memory")));
  EXPECT_TRUE(is_out_of_memory(std::bad_alloc()));
}

}  // namespace
}  // namespace fsdp::testing::choices
