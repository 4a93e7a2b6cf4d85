// Optimizers, schedules and the gradient scaler on a sharded model. Every rank runs these tests
// with a plain copy of the model, which gets the batches of all ranks and is trained with
// torch::optim.
#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <limits>

#include "fsdp/fully_shard.h"
#include "fsdp/grad_scaler.h"
#include "fsdp/lr_schedule.h"
#include "fsdp/optim.h"
#include "kernels/split.h"
#include "optim/states.h"
#include "shard/model.h"
#include "shard/models.h"
#include "shard/update.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

constexpr double kEps = 1e-3;  // large, so that AdamW doesn't amplify the rounding of gradients

ShardOptions options(MixedPrecision precision = {}) {
  return {.wrap = wrap::modules<Block, nn::Linear>(),
          .mixed_precision = precision,
          .device = test_device()};
}

// The same transformer sharded and plain.
struct Both {
  explicit Both(const ShardOptions& shard_options = options()) {
    torch::manual_seed(7);
    model = Transformer();
    torch::manual_seed(7);
    plain = Transformer();
    plain->to(test_device());
    sharded = fully_shard(model, shard_options);
  }

  static Batch batch(int step, int of) {
    return moved(model_case("transformer").batch(step, of), test_device());
  }
  void backward(int step) {
    auto mine = batch(step, rank());
    model->loss(mine.x, mine.y).backward();
    for (int r = 0; r < world_size(); ++r) {
      auto theirs = batch(step, r);
      (plain->loss(theirs.x, theirs.y) / world_size()).backward();
    }
  }
  void zero_grad() {
    sharded.zero_grad();
    plain->zero_grad();
  }
  void expect_same(double tolerance = 2e-6) {
    for (const auto& item : plain->named_parameters()) {
      auto full = sharded.full_tensor(item.key());
      EXPECT_TRUE(at::allclose(full, item.value().detach(), tolerance, tolerance))
          << item.key() << " differs by "
          << (full - item.value().detach()).abs().max().item<double>();
    }
  }
  // The head's weight is the embedding's; torch::optim would update it twice.
  std::vector<at::Tensor> plain_parameters(
      const std::function<bool(const at::Tensor&)>& which = {}) {
    std::vector<at::Tensor> chosen;
    for (const auto& parameter : plain->parameters())
      if (!parameter.is_same(plain->head->weight) && (!which || which(parameter)))
        chosen.push_back(parameter);
    if (!which || which(plain->head->weight)) chosen.push_back(plain->head->weight);
    return chosen;
  }

  Transformer model{nullptr}, plain{nullptr};
  Sharded sharded;
};

std::vector<at::Tensor> masters(const Sharded& sharded) {
  std::vector<at::Tensor> copies;
  for (const auto* flat : shard::trainable_flats(*shard::lock(sharded)))
    copies.push_back(flat->read_master().clone());
  return copies;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool equal = a.size() == b.size();
  for (size_t i = 0; equal && i < a.size(); ++i) equal = at::equal(a[i], b[i]);
  return equal;
}

// --- optimizers ---

TEST(Optimizers, AdamWWithGroupsAndClippingEqualsTorch) {
  Both both;
  AdamW optimizer(both.sharded,
                  {.lr = 1e-2,
                   .betas = {0.9, 0.95},
                   .eps = kEps,
                   .weight_decay = 0.3,
                   .groups = {no_decay(),
                              {.where = [](const std::string& name,
                                           const at::Tensor&) { return name == "position"; },
                               .lr = 3e-2}}});
  const auto theirs = [](double lr, double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(lr).betas({0.9, 0.95}).eps(kEps).weight_decay(decay));
  };
  const auto is_position = [&](const at::Tensor& p) { return p.is_same(both.plain->position); };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(
      both.plain_parameters([&](const auto& p) { return p.dim() > 1 && !is_position(p); }),
      theirs(1e-2, 0.3));
  groups.emplace_back(both.plain_parameters([](const auto& p) { return p.dim() <= 1; }),
                      theirs(1e-2, 0.0));
  groups.emplace_back(both.plain_parameters(is_position), theirs(3e-2, 0.3));
  torch::optim::AdamW reference(groups, torch::optim::AdamWOptions(1e-2));

  for (int step = 0; step < 5; ++step) {
    both.backward(step);
    auto norm = both.sharded.clip_grad_norm_(0.5);
    const double expected = torch::nn::utils::clip_grad_norm_(both.plain_parameters(), 0.5);
    EXPECT_NEAR(norm.item<double>(), expected, 1e-5 * expected);
    EXPECT_GT(expected, 0.5);  // clipping has an effect
    optimizer.step();
    reference.step();
    both.expect_same(1e-5);
    both.zero_grad();
  }
}

TEST(Optimizers, SgdWithMomentumEqualsTorch) {
  Both both;
  SGD optimizer(both.sharded,
                {.lr = 0.05, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true});
  torch::optim::SGD reference(
      both.plain_parameters(),
      torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01).nesterov(true));
  for (int step = 0; step < 4; ++step) {
    both.backward(step);
    optimizer.step();
    reference.step();
    both.expect_same(1e-5);
    both.zero_grad();
  }
}

TEST(Optimizers, WhatIsGatheredIsTheMasterRounded) {
  for (bool split : {false, true}) {
    Both both(
        options({.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .split_master = split}));
    AdamW optimizer(both.sharded, {.lr = 1e-2});
    for (int step = 0; step < 2; ++step) {
      auto batch = Both::batch(step, rank());
      both.model->loss(batch.x, batch.y).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    auto whole = both.sharded.summon_full_params({.writeback = false});
    for (const auto& [name, value] : whole.values()) {
      auto master = both.sharded.full_tensor(name);
      auto rounded = master.to(at::kBFloat16);
      if (split) {  // rounds ties away from zero
        auto flat = master.flatten(), high = at::empty_like(flat, at::kBFloat16);
        kernels::split_float(flat, high, at::empty_like(flat, at::kShort));
        rounded = high.view_as(master);
      }
      EXPECT_TRUE(at::equal(value, rounded)) << name << " " << split;
    }
  }
}

// One step of training on a model whose gradients are bfloat16 or not, and its master split or not.
void train(Both& both, Optimizer& optimizer, int step, double clip = 0) {
  auto batch = Both::batch(step, rank());
  both.model->loss(batch.x, batch.y).backward();
  if (clip > 0) both.sharded.clip_grad_norm_(clip);
  optimizer.step();
  optimizer.zero_grad();
}

TEST(Optimizers, ASplitMasterTrainsAsAWholeOne) {
  for (auto grad_dtype : {at::kFloat, at::kBFloat16}) {
    const auto precision = [&](bool split) {
      return options({.param_dtype = at::kBFloat16,
                      .reduce_dtype = at::kFloat,
                      .grad_dtype = grad_dtype,
                      .split_master = split});
    };
    Both split(precision(true)), whole(precision(false));
    for (const auto* flat : shard::trainable_flats(*shard::lock(split.sharded))) {
      EXPECT_TRUE(flat->rest.defined());
      EXPECT_FALSE(flat->master.defined());
    }
    AdamW one(split.sharded, {.lr = 1e-2, .eps = kEps, .groups = {no_decay()}});
    AdamW two(whole.sharded, {.lr = 1e-2, .eps = kEps, .groups = {no_decay()}});
    for (int step = 0; step < 4; ++step) {
      train(split, one, step, 0.5);
      train(whole, two, step, 0.5);
    }
    const auto a = masters(split.sharded), b = masters(whole.sharded);
    ASSERT_EQ(a.size(), b.size());
    // The shards differ where a value is halfway between two bfloat16 numbers.
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::allclose(a[i], b[i], 1e-3, 1e-3)) << i;
  }
}

TEST(Optimizers, CapturableOnesGiveTheSame) {
  const auto groups = std::vector<ParamGroup>{no_decay()};
  Both host, device;
  AdamW one(host.sharded, {.lr = 1e-2, .weight_decay = 0.1, .groups = groups});
  AdamW two(device.sharded, {.lr = 1e-2, .weight_decay = 0.1, .groups = groups});
  const auto expect_alike = [&] {
    const auto a = masters(host.sharded), b = masters(device.sharded);
    for (size_t i = 0; i < a.size(); ++i) {
      if (test_device().is_cpu()) {
        EXPECT_TRUE(at::equal(a[i], b[i])) << i;
      }
      EXPECT_TRUE(at::allclose(a[i], b[i], 1e-5, 1e-5)) << i;
    }
  };
  const auto steps_of = [](const Both& both, const Optimizer& optimizer) {
    std::vector<int64_t> steps;
    for (const auto* flat : shard::trainable_flats(*shard::lock(both.sharded)))
      steps.push_back(optim::states_of(optimizer).steps(*flat));
    return steps;
  };
  train(host, one, 0);
  train(device, two, 0);
  two.set_capturable(true);  // continues from its counts
  EXPECT_TRUE(two.capturable());
  for (int step = 1; step < 4; ++step) {
    for (Optimizer* optimizer : {static_cast<Optimizer*>(&one), static_cast<Optimizer*>(&two)}) {
      optimizer->set_lr(1e-2 / (step + 1));
      optimizer->set_weight_decay(0.1 * step, 0);
    }
    train(host, one, step, 0.5);
    train(device, two, step, 0.5);
  }
  expect_alike();
  EXPECT_EQ(steps_of(device, two), steps_of(host, one));
  const auto* flat = shard::trainable_flats(*shard::lock(device.sharded)).front();
  optim::states_of(two).restore(*flat, 4);  // its current count
  EXPECT_EQ(optim::states_of(two).steps(*flat), 4);
  two.set_capturable(false);
  EXPECT_FALSE(two.capturable());
  EXPECT_EQ(steps_of(device, two), steps_of(host, one));
  train(host, one, 4);
  train(device, two, 4);
  expect_alike();
}

TEST(Optimizers, AStepWithoutAFiniteNormIsSkipped) {
  for (bool capturable : {false, true})
    for (float poison :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      Both both;
      AdamW optimizer(both.sharded, {.lr = 1e-2});
      optimizer.set_capturable(capturable);
      bool poisoned = true;
      both.sharded.set_reduce_hook([&](at::Tensor shard, const std::string&) {
        if (poisoned && rank() == world_size() - 1) shard.narrow(0, 0, 1).fill_(poison);
      });
      const auto before = masters(both.sharded);
      const auto* flat = shard::trainable_flats(*shard::lock(both.sharded)).front();
      train(both, optimizer, 0, 1.0);
      EXPECT_TRUE(same(masters(both.sharded), before));
      const bool host_knows = capturable || test_device().is_cpu();
      EXPECT_EQ(optim::states_of(optimizer).steps(*flat), host_knows ? 0 : 1);
      poisoned = false;
      train(both, optimizer, 1, 1.0);
      EXPECT_FALSE(same(masters(both.sharded), before));
      for (const auto& master : masters(both.sharded))
        EXPECT_TRUE(master.isfinite().all().item<bool>());
    }
}

TEST(Optimizers, GroupsListTheirParameters) {
  Both both;
  AdamW optimizer(both.sharded, {.weight_decay = 0.1, .groups = {no_decay()}});
  ASSERT_EQ(optimizer.groups().size(), 2u);
  EXPECT_EQ(optimizer.groups()[0].weight_decay, 0.1);
  EXPECT_EQ(optimizer.groups()[1].weight_decay, 0.0);
  for (size_t group : {0, 1})
    for (const auto& name : optimizer.groups()[group].parameters)
      EXPECT_EQ(both.plain->named_parameters()[name].dim() <= 1, group == 1) << name;
  EXPECT_EQ(optimizer.groups()[0].parameters.size() + optimizer.groups()[1].parameters.size(),
            both.plain_parameters().size());
}

TEST(Optimizers, AUnitWithoutGradientIsLeftAlone) {
  Mlp model;
  auto sharded = fully_shard(model, options());
  AdamW optimizer(sharded, {.lr = 0.1, .weight_decay = 0.5});
  const auto idle = sharded.full_tensor("layers.3.weight");
  const auto used = sharded.full_tensor("layers.0.weight");
  model->layer(0)->forward(random_normal(0, rank(), 0, {4, 16}).to(test_device())).sum().backward();
  optimizer.step();
  EXPECT_TRUE(at::equal(sharded.full_tensor("layers.3.weight"), idle));
  EXPECT_FALSE(at::equal(sharded.full_tensor("layers.0.weight"), used));
  int64_t stepped = 0;
  for (const auto* flat : shard::trainable_flats(*shard::lock(sharded)))
    stepped += optim::states_of(optimizer).steps(*flat);
  EXPECT_EQ(stepped, 1);
}

TEST(Optimizers, FrozenParametersAreLeftAloneUntilTheyAreNot) {
  torch::manual_seed(7);
  Mlp model;
  model->layer(2)->weight.set_requires_grad(false);
  auto sharded = fully_shard(model, options());
  AdamW optimizer(sharded, {.lr = 0.1, .weight_decay = 0.5});
  const auto frozen = sharded.full_tensor("layers.2.weight");
  const auto bias = sharded.full_tensor("layers.2.bias");
  const auto train = [&](int step) {
    auto batch = moved(model_case("mlp").batch(step, rank()), test_device());
    mean_square(model->forward(batch.x), batch.y).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  train(0);
  EXPECT_TRUE(at::equal(sharded.full_tensor("layers.2.weight"), frozen));
  EXPECT_FALSE(at::equal(sharded.full_tensor("layers.2.bias"), bias));
  model->layer(2)->weight.set_requires_grad(true);
  train(1);
  EXPECT_FALSE(at::equal(sharded.full_tensor("layers.2.weight"), frozen));
}

TEST(Optimizers, StatesAreCountedInTheMemoryReport) {
  Both both;
  {
    AdamW optimizer(both.sharded, {});
    EXPECT_EQ(both.sharded.memory().optimizer, 0);  // allocated at the first step
    both.backward(0);
    optimizer.step();
    EXPECT_EQ(both.sharded.memory().optimizer, optimizer.state_bytes());
    EXPECT_EQ(optimizer.state_bytes(), 2 * both.sharded.memory().parameters);
  }
  EXPECT_EQ(both.sharded.memory().optimizer, 0);
}

TEST(Optimizers, RestoredStatesGoOnWithTheSameBits) {
  Both one, two;
  AdamW first(one.sharded, {.lr = 1e-2}), second(two.sharded, {.lr = 1e-2});
  const auto train = [](Both& both, AdamW& optimizer, int step) {
    both.backward(step);
    optimizer.step();
    both.zero_grad();
  };
  for (int step = 0; step < 3; ++step) {
    train(one, first, step);
    train(two, second, step);
  }
  AdamW resumed(two.sharded, {.lr = 1e-2});
  for (const auto* flat : shard::trainable_flats(*shard::lock(two.sharded))) {
    const optim::States& old = optim::states_of(second);
    const auto from = old.slots(*flat);
    auto to = optim::states_of(resumed).restore(*flat, old.steps(*flat));
    ASSERT_EQ(to.size(), 2u);
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }
  for (int step = 3; step < 5; ++step) {
    train(one, first, step);
    train(two, resumed, step);
  }
  EXPECT_TRUE(same(masters(one.sharded), masters(two.sharded)));
}

TEST(Optimizers, BadOptionsAreErrorsThatNameTheField) {
  Both both;
  expect_error([&] { AdamW(both.sharded, {.lr = -1}); }, {"lr = -1"});
  expect_error([&] { AdamW(both.sharded, {.betas = {0.9, 1.0}}); }, {"betas.second"});
  expect_error([&] { AdamW(both.sharded, {.eps = -1}); }, {"eps"});
  expect_error([&] { AdamW(both.sharded, {.groups = {{.norms = true, .lr = -2}}}); },
               {"groups[0].lr"});
  expect_error([&] { AdamW(both.sharded, {.groups = {ParamGroup{}}}); }, {"groups[0]"});
  expect_error([&] { SGD(both.sharded, {.nesterov = true}); }, {"nesterov"});
  expect_error([&] { AdamW(Sharded(), {}); }, {"fully_shard"});
  EXPECT_EQ(both.sharded.memory().optimizer, 0);
}

TEST(Optimizers, AModelThatIsShardedAgainNeedsANewOptimizer) {
  Mlp model;
  auto layer = fully_shard(model->layer(0), {.device = test_device()});
  AdamW early(layer, {});
  auto sharded = fully_shard(model, options());
  expect_error([&] { early.step(); }, {"after its optimizer was created", "HINT"});
}

// --- schedules ---

TEST(LRSchedulers, MultiplyEveryGroupsOwnRate) {
  Both both;
  AdamW optimizer(both.sharded,
                  {.lr = 1.0,
                   .groups = {{.where = [](const std::string& name,
                                           const at::Tensor&) { return name == "position"; },
                               .lr = 4.0}}});
  LRScheduler scheduler(
      optimizer, LRSchedule::linear({.total_steps = 10, .warmup_steps = 2, .final_ratio = 0.5}));
  EXPECT_DOUBLE_EQ(optimizer.lr(0), 0.5);
  EXPECT_DOUBLE_EQ(optimizer.lr(1), 2.0);
  scheduler.step();
  EXPECT_DOUBLE_EQ(optimizer.lr(0), 1.0);
  scheduler.set_steps(6);
  EXPECT_DOUBLE_EQ(optimizer.lr(0), 0.75);
  EXPECT_DOUBLE_EQ(optimizer.lr(1), 3.0);
  EXPECT_EQ(scheduler.steps(), 6);
  scheduler.set_steps(1000);
  EXPECT_DOUBLE_EQ(optimizer.lr(0), 0.5);
}

// --- the gradient scaler ---

TEST(GradScalers, AScaleThatIsAPowerOfTwoChangesNoBit) {
  Both scaled, unscaled;
  AdamW one(scaled.sharded, {.lr = 1e-2}), two(unscaled.sharded, {.lr = 1e-2});
  GradScaler scaler({.init_scale = 1024.0, .growth_interval = 2});
  for (int step = 0; step < 4; ++step) {
    auto batch = Both::batch(step, rank());
    scaler.scale(scaled.model->loss(batch.x, batch.y)).backward();
    if (step % 2 == 0) scaler.unscale_(scaled.sharded);
    EXPECT_TRUE(scaler.step(one));
    scaler.update();
    one.zero_grad();
    unscaled.model->loss(batch.x, batch.y).backward();
    two.step();
    two.zero_grad();
  }
  EXPECT_EQ(scaler.scale(), 4096.0);
  EXPECT_TRUE(same(masters(scaled.sharded), masters(unscaled.sharded)));
}

TEST(GradScalers, AnOverflowOnOneRankIsSkippedByAll) {
  for (float poison :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Both both;
    AdamW optimizer(both.sharded, {.lr = 1e-2});
    GradScaler scaler({.init_scale = 8.0});
    bool poisoned = true;
    both.sharded.set_reduce_hook([&](at::Tensor shard, const std::string&) {
      if (poisoned && rank() == world_size() - 1) shard.narrow(0, 0, 1).fill_(poison);
    });
    const auto train = [&](int step) {
      auto batch = Both::batch(step, rank());
      scaler.scale(both.model->loss(batch.x, batch.y)).backward();
      scaler.unscale_(optimizer);
      both.sharded.clip_grad_norm_(1.0);
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
      return stepped;
    };
    const auto before = masters(both.sharded);
    EXPECT_FALSE(train(0));
    EXPECT_EQ(scaler.scale(), 4.0);
    EXPECT_TRUE(same(masters(both.sharded), before));
    poisoned = false;
    EXPECT_TRUE(train(1));  // the skipped step's clip factor is gone
    EXPECT_FALSE(same(masters(both.sharded), before));
    for (const auto& master : masters(both.sharded))
      EXPECT_TRUE(master.isfinite().all().item<bool>());
  }
}

TEST(GradScalers, CallsOutOfOrderAreErrors) {
  Both both;
  AdamW optimizer(both.sharded, {});
  GradScaler scaler;
  expect_error([&] { scaler.update(); }, {"update()", "HINT"});
  expect_error([&] { scaler.unscale_(optimizer); }, {"no gradients", "HINT"});
  both.backward(0);
  scaler.unscale_(both.sharded);
  expect_error([&] { scaler.unscale_(optimizer); }, {"already", "HINT"});
  EXPECT_TRUE(scaler.step(optimizer));
  expect_error([&] { scaler.step(optimizer); }, {"twice", "HINT"});
  scaler.update();
  expect_error([&] { GradScaler({.growth_interval = 0}); }, {"growth_interval"});
  expect_error([&] { scaler.load_state({.scale = 0, .good_steps = 0}); }, {"scale = 0"});
}

TEST(GradScalers, ItsStateComesBack) {
  GradScaler one({.init_scale = 256.0}), two;
  one.load_state({.scale = 512.0, .good_steps = 77});
  two.load_state(one.state());
  EXPECT_EQ(two.scale(), 512.0);
  EXPECT_EQ(two.state().good_steps, 77);
}

TEST(GradScalers, SwitchedOffItPassesEverythingThrough) {
  Both both;
  AdamW optimizer(both.sharded, {.lr = 1e-2});
  GradScaler scaler({.enabled = false});
  auto batch = Both::batch(0, rank());
  auto loss = both.model->loss(batch.x, batch.y);
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale_(optimizer);
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
}

}  // namespace
}  // namespace fsdp::testing
