// Offload changes where tensors are and who updates them, but no bit of the results: on the CPU the
// same kernels compute the same sums. Every test trains the transformer with and without offload,
// on the same batches, in one of the ways users do. On a GPU the two kernels round differently, so
// results are close, not equal.
#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <filesystem>
#include <future>
#include <random>
#include <set>
#include <thread>

#include "fsdp/checkpoint.h"
#include "fsdp/grad_scaler.h"
#include "fsdp/optim.h"
#include "optim/states.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/offload.h"
#include "shard/oracle.h"

namespace fsdp::testing::offload {
namespace {

constexpr int kSteps = 3;
constexpr double kEpsilon = 1e-3;  // see strategies_test.cpp

struct Training {  // a model in training
  Transformer model{nullptr};
  Sharded sharded;
  std::unique_ptr<Optimizer> optimizer;

  at::Tensor loss(int batch) {
    auto [step, x, y] = moved(model_case("transformer").batch(batch, rank()), test_device());
    return model->loss(x, y);
  }
};

Training start(const ShardOptions& options, bool sgd = false) {
  Training run;
  torch::manual_seed(7);
  run.model = Transformer();
  run.sharded = fully_shard(run.model, options);
  if (sgd)
    run.optimizer = std::make_unique<SGD>(
        run.sharded, SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
  else
    run.optimizer = std::make_unique<AdamW>(
        run.sharded,
        AdamWOptions{.lr = 1e-2, .eps = kEpsilon, .weight_decay = 0.1, .groups = {no_decay()}});
  return run;
}

using Numbers = std::vector<std::pair<std::string, at::Tensor>>;
using Step = std::function<void(Training& run, int step, Numbers& seen)>;

void note(Numbers& seen, std::string name, const at::Tensor& value) {
  seen.emplace_back(std::move(name), value.detach().to(at::kCPU).clone());
}

void plain_step(Training& run, int step, Numbers& seen) {
  auto loss = run.loss(step);
  loss.backward();
  note(seen, "loss", loss);
  run.optimizer->step();
  run.optimizer->zero_grad();
}

void clipped_step(Training& run, int step, Numbers& seen) {
  auto loss = run.loss(step);
  loss.backward();
  note(seen, "loss", loss);
  note(seen, "norm", run.sharded.clip_grad_norm_(1.0));
  run.optimizer->step();
  run.optimizer->zero_grad();
}

Numbers parameters_of(const Training& run) {
  Numbers seen;
  const StateDict full = run.sharded.full_state_dict();
  for (const auto& item : run.model->named_parameters())
    note(seen, item.key(), full.at(item.key()).full());
  return seen;
}

Numbers train(const ShardOptions& options, const Step& step = clipped_step, bool sgd = false) {
  Training run = start(options, sgd);
  Numbers seen;
  for (int i = 0; i < kSteps; ++i) step(run, i, seen);
  for (auto& parameter : parameters_of(run)) seen.push_back(std::move(parameter));
  return seen;
}

void expect_same(const Numbers& seen, const Numbers& expected) {
  ASSERT_EQ(seen.size(), expected.size());
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto& [name, value] = seen[i];
    ASSERT_EQ(name, expected[i].first);
    if (test_device().is_cpu())
      EXPECT_TRUE(at::equal(value, expected[i].second)) << name << " (" << i << ")";
    else
      EXPECT_TRUE(at::allclose(value, expected[i].second, 1e-2, 1e-3)) << name << " (" << i << ")";
  }
}

ShardOptions by_block(Offload offload = {}) {
  return {.wrap = wrap::modules<Block>(), .device = test_device(), .offload = std::move(offload)};
}

const Offload kOptimizer{.optimizer = true};
const Offload kAll{.parameters = true, .gradients = true, .optimizer = true};
const Offload kParameters{.parameters = true};
const Offload kGradients{.gradients = true};
const Offload kBoth{.parameters = true, .gradients = true};
const Offload kDisk{.optimizer = true,
                    .directory = std::filesystem::temp_directory_path().string()};

void expect_same_with_offload(ShardOptions options, const Step& step = clipped_step,
                              bool sgd = false) {
  options.offload = {};
  const Numbers expected = train(options, step, sgd);
  const std::vector<std::pair<const char*, Offload>> ways = {
      {"optimizer", kOptimizer}, {"all", kAll},  {"disk", kDisk}, {"parameters", kParameters},
      {"gradients", kGradients}, {"both", kBoth}};
  for (const auto& [way, offload] : ways) {
    SCOPED_TRACE(way);
    options.offload = offload;
    expect_same(train(options, step, sgd), expected);
  }
}

std::vector<ShardOptions> strategies() {
  std::vector<ShardOptions> all;
  for (auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP,
                        ShardingStrategy::NO_SHARD, ShardingStrategy::HYBRID_SHARD}) {
    if (strategy == ShardingStrategy::HYBRID_SHARD && world_size() % 2) continue;
    all.push_back(by_block());
    all.back().strategy = strategy;
    if (strategy == ShardingStrategy::HYBRID_SHARD) all.back().mesh = hybrid_mesh();
  }
  return all;
}

// --- ways to shard ---

TEST(Offloads, ChangeNoBitUnderAnyStrategy) {
  for (const auto& options : strategies()) {
    SCOPED_TRACE(name(options.strategy));
    expect_same_with_offload(options);
  }
}

TEST(Offloads, ChangeNoBitOfMastersInTwoHalves) {
  for (auto options : strategies()) {
    SCOPED_TRACE(name(options.strategy));
    options.mixed_precision.param_dtype = at::kBFloat16;
    expect_same_with_offload(options);
  }
}

TEST(Offloads, ChangeNoBitInAnyPrecision) {
  MixedPrecision whole{.param_dtype = at::kBFloat16, .split_master = false};
  MixedPrecision bf16_gradients{.param_dtype = at::kBFloat16, .grad_dtype = at::kBFloat16};
  MixedPrecision fp32_sums{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  for (const auto& precision : {whole, bf16_gradients, fp32_sums}) {
    auto options = by_block();
    options.mixed_precision = precision;
    expect_same_with_offload(options);
  }
}

TEST(Offloads, ChangeNoBitHoweverUnitsAreGathered) {
  std::vector<ReshardAfterForward> choices = {true, false};
  if (world_size() % 2 == 0 && world_size() > 2) choices.push_back(2);
  for (size_t depth : {0, 2})
    for (size_t i = 0; i < choices.size(); ++i) {  // any two of the three settings together
      auto options = by_block();
      options.share_host_memory = test_device().is_cpu() && (depth / 2 + i) % 2 == 0;
      options.forward_prefetch = options.backward_prefetch = static_cast<int>(depth);
      options.reshard_after_forward = choices[i];
      expect_same_with_offload(options);
    }
}

TEST(Offloads, OfAFractionChangeNoBitAndMoveItsBytes) {
  const Numbers expected = train(by_block());
  int64_t before = 0;
  for (double fraction : {0.0, 0.4, 0.8, 1.0}) {
    SCOPED_TRACE(fraction);
    for (Offload offload : {kOptimizer, kAll, kBoth}) {
      offload.fraction = fraction;
      expect_same(train(by_block(offload)), expected);
    }
    Offload all = kAll;
    all.fraction = fraction;
    Training run = start(by_block(all));
    Numbers seen;
    plain_step(run, 0, seen);
    const MemoryReport memory = run.sharded.memory();
    EXPECT_EQ(memory.host > before, fraction > 0);
    before = memory.host;
    const int64_t movable =
        memory.parameters + memory.gathered_from + memory.gradients + memory.optimizer;
    EXPECT_EQ(memory.host == movable, fraction == 1);
  }
}

// --- ways to train ---

TEST(Offloads, ChangeNoBitWithoutClipping) {
  expect_same_with_offload(by_block(), plain_step);
}

TEST(Offloads, ChangeNoBitOfMomentum) {
  expect_same_with_offload(by_block(), clipped_step, /*sgd=*/true);
}

TEST(Offloads, ChangeNoBitOfOtherNorms) {
  for (double type : {1.0, 3.0, std::numeric_limits<double>::infinity()})
    expect_same_with_offload(by_block(), [type](Training& run, int step, Numbers& seen) {
      run.loss(step).backward();
      note(seen, "norm", run.sharded.clip_grad_norm_(0.1, type));
      run.optimizer->step();
      run.optimizer->zero_grad();
    });
}

TEST(Offloads, ChangeNoBitOfGradientsThatAccumulate) {
  for (bool bf16 : {false, true})
    for (bool quiet : {false, true}) {
      SCOPED_TRACE(quiet ? "no_sync" : "reduced each time");
      auto options = by_block();
      if (bf16) options.mixed_precision.param_dtype = at::kBFloat16;
      expect_same_with_offload(options, [quiet](Training& run, int step, Numbers& seen) {
        for (int part = 0; part < 3; ++part) {
          std::optional<NoSync> no_sync;
          if (quiet && part < 2) no_sync.emplace(run.sharded.no_sync());
          run.loss(3 * step + part).backward();
        }
        note(seen, "gradient", run.sharded.full_grad("blocks.1.up.weight"));
        note(seen, "norm", run.sharded.clip_grad_norm_(1.0));
        run.optimizer->step();
        run.optimizer->zero_grad();
      });
    }
}

TEST(Offloads, ChangeNoBitOfGradientsThatAreKeptOrZeroed) {
  expect_same_with_offload(by_block(), [](Training& run, int step, Numbers& seen) {
    run.loss(step).backward();
    note(seen, "norm", run.sharded.clip_grad_norm_(1.0));
    run.optimizer->step();
    if (step == 0) return;  // the next backward adds to the gradients just used
    run.optimizer->zero_grad(/*set_to_none=*/false);
    note(seen, "zero", run.sharded.full_grad("blocks.0.up.weight"));
  });
}

TEST(Offloads, ChangeNoBitOfScaledLosses) {
  auto options = by_block();
  options.mixed_precision.param_dtype = at::kBFloat16;
  expect_same_with_offload(options, [](Training& run, int step, Numbers& seen) {
    GradScaler scaler({.init_scale = 1024});
    scaler.scale(run.loss(step)).backward();
    scaler.unscale_(run.sharded);
    note(seen, "norm", run.sharded.clip_grad_norm_(1.0));
    EXPECT_TRUE(scaler.step(*run.optimizer));
    run.optimizer->zero_grad();
  });
}

TEST(Offloads, ChangeNoBitWhereTheFactorIsNotFinite) {
  expect_same_with_offload(by_block(), [](Training& run, int step, Numbers& seen) {
    auto loss = run.loss(step);
    if (step == 1) loss = loss * std::numeric_limits<double>::infinity();
    loss.backward();
    run.sharded.clip_grad_norm_(1.0);
    run.optimizer->step();
    run.optimizer->zero_grad();
  });
}

TEST(Offloads, AreSeenByEvaluationAndByOneStepAfterAnother) {
  expect_same_with_offload(by_block(), [](Training& run, int step, Numbers& seen) {
    run.loss(step).backward();
    run.optimizer->step();
    run.optimizer->step();  // with the same gradients
    at::NoGradGuard no_grad;
    note(seen, "evaluation", run.loss(step + 10));
    run.optimizer->zero_grad();
  });
}

// Without the waits under test, the next forward would read a partial update or none.
TEST(Offloads, AreWaitedForHoweverSlowTheThreadIs) {
  expect_same_with_offload(by_block(), [](Training& run, int step, Numbers& seen) {
    run.loss(step).backward();
    note(seen, "norm", run.sharded.clip_grad_norm_(1.0));
    const auto model = shard::lock(run.sharded);
    if (model->offload.in_use())
      model->offload.add(
          {.run = [] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }});
    run.optimizer->step();
    if (step == 1) run.optimizer->zero_grad();
    if (step == 2) run.optimizer->zero_grad(/*set_to_none=*/false);
  });
}

TEST(Offloads, LeaveTheHostFreeAfterStep) {
  Training run = start(by_block(kAll));
  run.loss(0).backward();
  std::promise<void> go;
  shard::lock(run.sharded)->offload.add({.run = [come = go.get_future().share()] { come.wait(); }});
  run.optimizer->step();  // wouldn't return if it waited for an update
  for (const auto* flat : shard::lock(run.sharded)->flats()) EXPECT_TRUE(flat->host->update);
  go.set_value();
  EXPECT_TRUE(at::isfinite(run.loss(1)).item<bool>());
  for (const auto* flat : shard::lock(run.sharded)->flats()) EXPECT_FALSE(flat->host->update);
}

TEST(Offloads, CountWhatLiesInHostMemory) {
  const auto memory_with = [](const Offload& offload) {
    auto options = by_block(offload);
    options.mixed_precision.param_dtype = at::kBFloat16;
    Training run = start(options);
    run.loss(0).backward();
    run.optimizer->step();
    return run.sharded.memory();
  };
  const MemoryReport none = memory_with({});
  EXPECT_EQ(none.host, 0);
  EXPECT_EQ(memory_with(kParameters).host, none.gathered_from);
  EXPECT_EQ(memory_with(kGradients).host, none.gradients);
  EXPECT_EQ(memory_with(kBoth).host, none.gathered_from + none.gradients);
  EXPECT_EQ(memory_with(kAll).host,
            none.gathered_from + none.gradients + none.parameters + none.optimizer);
}

TEST(Offloads, OfParametersAloneAreRefusedByOptimizersOfTorch) {
  for (const Offload& offload : {kParameters, kGradients}) {
    Training run = start(by_block(offload));
    expect_error([&] { run.sharded.parameters(); }, {"torch::optim", "offload.optimizer", "HINT"});
    Numbers seen;
    clipped_step(run, 0, seen);  // the failed call has changed nothing
    EXPECT_EQ(shard::lock(run.sharded)->masters.handed_out(), shard::HandedOut::kNowhere);
  }
}

// --- steps in backward ---

void early_step(Training& run, int step, Numbers& seen) {
  for (int part = 0; part < 2; ++part) {
    if (part == 1) run.optimizer->step_in_backward();
    run.loss(2 * step + part).backward();
  }
  note(seen, "norm", run.sharded.clip_grad_norm_(std::numeric_limits<double>::infinity()));
  run.optimizer->step();
  run.optimizer->zero_grad();
}

TEST(StepsInBackward, ChangeNoBit) {
  for (const auto& options : strategies()) {
    SCOPED_TRACE(name(options.strategy));
    expect_same_with_offload(options, early_step);
  }
  auto halves = by_block();
  halves.mixed_precision.param_dtype = at::kBFloat16;
  halves.mixed_precision.norms_in_fp32 = true;  // units of two flats
  expect_same_with_offload(halves, early_step);
  expect_same_with_offload(halves, early_step, /*sgd=*/true);
}

TEST(StepsInBackward, UpdateEveryUnitBeforeStepIsCalled) {
  Training run = start(by_block(kAll));
  run.optimizer->step_in_backward();
  run.loss(0).backward();
  for (const auto* flat : shard::lock(run.sharded)->flats()) {
    EXPECT_TRUE(flat->host->stepped);
    EXPECT_EQ(optim::states_of(*run.optimizer).steps(*flat), 1);
  }
  run.optimizer->step();
  for (const auto* flat : shard::lock(run.sharded)->flats()) {
    EXPECT_FALSE(flat->host->stepped);
    EXPECT_EQ(optim::states_of(*run.optimizer).steps(*flat), 1);
  }
  run.optimizer->zero_grad();
  run.loss(1).backward();  // step_in_backward() wasn't called again
  for (const auto* flat : shard::lock(run.sharded)->flats()) EXPECT_FALSE(flat->host->stepped);
}

TEST(StepsInBackward, RefuseWhatComesTooLateForThem) {
  Training run = start(by_block(kAll));
  run.optimizer->step_in_backward();
  run.loss(0).backward();
  expect_error([&] { run.sharded.clip_grad_norm_(1.0); }, {"clip_grad_norm_", "backward", "HINT"});
  GradScaler scaler;
  expect_error([&] { scaler.unscale_(run.sharded); }, {"unit", "step_in_backward", "HINT"});
  expect_error([&] { run.loss(1).backward(); }, {"second backward", "no_sync", "HINT"});
  run.optimizer->zero_grad();
  Numbers seen;
  plain_step(run, 2, seen);  // works again afterwards
}

TEST(Offloads, ChangeNoBitOfOptimizersOfTorch) {
  auto step = [](Training& run, std::unique_ptr<torch::optim::AdamW>& torchs, int i,
                 Numbers& seen) {
    auto loss = run.loss(i);
    loss.backward();
    note(seen, "loss", loss);
    note(seen, "norm", run.sharded.clip_grad_norm_(1.0));
    torchs->step();
    run.sharded.zero_grad();
  };
  for (bool bf16 : {false, true}) {
    std::vector<Numbers> seen;
    for (const auto& offload : {Offload{}, kOptimizer, kAll}) {
      auto options = by_block(offload);
      if (bf16) options.mixed_precision.param_dtype = at::kBFloat16;
      Training run = start(options);
      run.optimizer.reset();
      auto torchs = std::make_unique<torch::optim::AdamW>(
          run.sharded.parameters(), torch::optim::AdamWOptions(1e-2).eps(kEpsilon));
      seen.emplace_back();
      for (int i = 0; i < kSteps; ++i) step(run, torchs, i, seen.back());
      for (auto& parameter : parameters_of(run)) seen.back().push_back(std::move(parameter));
    }
    expect_same(seen[1], seen[0]);
    expect_same(seen[2], seen[0]);
  }
}

TEST(Offloads, KeepWhatIsWrittenToParameters) {
  for (bool bf16 : {false, true}) {
    auto options = by_block();
    if (bf16) options.mixed_precision.param_dtype = at::kBFloat16;
    expect_same_with_offload(options, [](Training& run, int step, Numbers& seen) {
      clipped_step(run, step, seen);
      auto full = run.sharded.summon_full_params();
      at::NoGradGuard no_grad;
      run.model->block(1)->up->weight.mul_(0.5);
    });
  }
}

// --- state ---

TEST(Offloads, StateDictsSeeUpdatesThatAreUnderWay) {
  Training plain = start(by_block()), away = start(by_block(kAll));
  Numbers seen;
  plain_step(plain, 0, seen);
  plain_step(away, 0, seen);  // the update thread may still be running
  const auto state = away.sharded.full_state_dict(), expected = plain.sharded.full_state_dict();
  expect_same({state.begin(), state.end()}, {expected.begin(), expected.end()});
}

TEST(Offloads, CheckpointsGoBetweenRunsWithAndWithout) {
  namespace fs = std::filesystem;
  const fs::path folder = text_of_rank_0(
      (fs::temp_directory_path() / ("fsdp-offload-" + std::to_string(std::random_device{}())))
          .string());
  Numbers seen, expected;
  Training straight = start(by_block());
  for (int i = 0; i < kSteps; ++i) clipped_step(straight, i, expected);
  const std::vector<Offload> ways = {{}, kOptimizer, kAll, kDisk, kBoth};
  for (size_t from = 0; from < ways.size(); ++from)
    for (size_t to = 0; to < ways.size(); ++to) {
      if (from != 0 && to != 0 && from != to) continue;  // each saves and loads; files are the same
      Training first = start(by_block(ways[from])), second = start(by_block(ways[to]));
      clipped_step(first, 0, seen);
      checkpoint::save(folder / "a", first.sharded, first.optimizer.get());
      clipped_step(second, 9, seen);  // must be replaced
      checkpoint::load(folder / "a", second.sharded, second.optimizer.get());
      for (int i = 1; i < kSteps; ++i) clipped_step(second, i, seen);
      expect_same(parameters_of(second), parameters_of(straight));
      test_world().comm().barrier();
      if (rank() == 0) fs::remove_all(folder);
      test_world().comm().barrier();
    }
}

// --- errors ---

TEST(Offloads, ThatMakeNoSenseAreRefused) {
  const auto refuse = [](const Offload& offload, const std::vector<std::string>& words) {
    Mlp model;
    expect_error([&] { fully_shard(model, by_block(offload)); }, words);
  };
  refuse({.optimizer = true, .fraction = 1.5}, {"offload.fraction", "1.5", "HINT"});
  refuse({.optimizer = true, .directory = "states"}, {"offload.directory", "HINT"});
}

TEST(HostUpdates, ThatFailAreReportedOnceWithTheirUnit) {
  shard::HostUpdates updates;
  auto failed = updates.add({.run = [] { throw std::runtime_error("no memory"); }});
  auto good = updates.add({.run = [] {}});
  expect_error([&] { failed->wait("blocks.1", std::chrono::seconds(60)); },
               {"blocks.1", "no memory", "HINT"});
  failed->wait("blocks.1", std::chrono::seconds(60));
  good->wait("blocks.2", std::chrono::seconds(60));
}

TEST(HostUpdates, StartInOrderAsSoonAsTheirGradientIsThere) {
  std::vector<int> done;
  std::promise<void> added;
  {
    std::set<int> here = {2};
    shard::HostUpdates updates;  // its destructor waits for them
    updates.add({.run = [all = added.get_future().share()] { all.wait(); }});
    const auto add = [&](int unit, uint64_t arrival) {
      updates.add({.run =
                       [&, unit] {
                         done.push_back(unit);
                         if (unit == 3) here = {0, 1};  // all inputs have arrived by now
                       },
                   .can_start = [&, unit] { return here.contains(unit); },
                   .arrival = arrival});
    };
    for (int unit = 0; unit < 4; ++unit) add(unit, /*arrival=*/4 - unit);
    added.set_value();
  }
  EXPECT_EQ(done, (std::vector<int>{2, 3, 0, 1}));
}

TEST(HostUpdates, AreWaitedForNoLongerThanTheLimit) {
  shard::HostUpdates updates;
  std::promise<void> go;
  auto slow = updates.add({.run = [come = go.get_future().share()] { come.wait(); }});
  expect_error([&] { slow->wait("blocks.1", std::chrono::milliseconds(1)); },
               {"blocks.1", "did not finish", "HINT"});
  go.set_value();
  slow->wait("blocks.1", std::chrono::seconds(60));
}

}  // namespace
}  // namespace fsdp::testing::offload
