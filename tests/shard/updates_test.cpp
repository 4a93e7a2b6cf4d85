// Updates that aren't the engine's: torch::optim on parameters(), writes in place, averages. Each
// is seen by the next use of the model, whatever happened to be gathered, or is an error.
#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <unistd.h>

#include <filesystem>

#include "fsdp/checkpoint.h"
#include "fsdp/optim.h"
#include "fsdp/wrap_optimizer.h"
#include "shard/uses.h"

namespace fsdp::testing {
namespace {

class Updates : public Uses {};
INSTANTIATE_TEST_SUITE_P(Memory, Updates, ::testing::Bool(), memory_name);

at::Tensor evaluate(Built& model, const Batch& batch) {
  at::NoGradGuard no_grad;
  return model.loss(batch);
}

// The plain model and the sharded one compute the same now.
void expect_same_output(SideBySide& both) {
  auto mine = evaluate(both.mine(), both.batch(9, rank())).item<double>();
  auto plain = evaluate(both.oracle().plain(), both.batch(9, rank())).item<double>();
  EXPECT_NEAR(mine, plain, 1e-6 * std::abs(plain));
}

TEST_P(Updates, AnEvaluationBetweenBackwardAndStep) {
  SideBySide both(model_case("mlp"), options());
  for (int step = 0; step < 3; ++step) {
    both.run(both.work(step));
    evaluate(both.mine(), both.batch(step, rank()));
    both.step();
    expect_same_output(both);
    both.zero_grad();
  }
}

TEST_P(Updates, AViewThatIsAliveDuringBackward) {
  SideBySide both(model_case("mlp"), options());
  for (int step = 0; step < 3; ++step) {
    std::vector<at::Tensor> views;
    auto work = [&](Built& model, int rank) {
      for (const char* name : {"layers.1.weight", "layers.7.weight"})
        views.push_back(model.parameter(name).t());
      auto loss = model.loss(both.batch(step, rank));
      loss.backward();
      return loss;
    };
    both.run(work);
    both.step();
    expect_same_output(both);
    both.zero_grad();
  }
}

// It has the values of its last gather until the update takes the memory away.
TEST_P(Updates, AViewKeptAcrossStepsIsRightOrAnError) {
  SideBySide both(model_case("mlp"), options());
  at::Tensor view, plain;
  auto work = [&](Built& model, int rank) {
    auto& kept = &model == &both.mine() ? view : plain;
    if (!kept.defined()) kept = model.parameter("layers.3.weight").t();
    auto loss = model.loss(both.batch(0, rank));
    loss.backward();
    return loss;
  };
  both.run(work);
  both.step();
  both.zero_grad();
  std::string error;
  try {
    EXPECT_TRUE(at::allclose(view, both.oracle().plain().parameter("layers.3.weight").t()));
  } catch (const std::exception& failure) {
    error = failure.what();
    EXPECT_TRUE(contains(error, "a view of it")) << error;
  }
  both.train(2, 1);
  expect_same_output(both);
}

TEST_P(Updates, SummonedParametersAreThoseAfterTheStep) {
  SideBySide both(model_case("mlp"), options());
  for (int step = 0; step < 2; ++step) {
    both.run(both.work(step));
    both.step();
    {
      auto full = both.sharded().summon_full_params();
      for (const auto& [name, value] : full.values())
        EXPECT_TRUE(at::allclose(value, both.oracle().plain().parameter(name), 1e-5, 1e-7)) << name;
      at::NoGradGuard no_grad;
      both.mine().parameter("layers.2.weight").mul_(0.5);
    }
    at::NoGradGuard no_grad;
    for (const auto& [name, master] : both.oracle().masters())
      if (name == "layers.2.weight") master.mul_(0.5);
    both.oracle().plain().parameter("layers.2.weight").mul_(0.5);
    both.expect_same_parameters();
    both.zero_grad();
  }
}

TEST_P(Updates, AnAverageOfWeightsAfterAnEvaluation) {
  SideBySide student(model_case("mlp"), options());
  for (bool by_hand : {true, false}) {
    SCOPED_TRACE(by_hand ? "lerp_" : "lerp_parameters");
    auto teacher = build_seeded(model_case("mlp"), 11), plain = build_seeded(model_case("mlp"), 11);
    plain.module->to(test_device());
    auto teacher_options = options();
    teacher_options.wrap = model_case("mlp").wrap;
    auto sharded = fully_shard(teacher.module, teacher_options);
    for (int step = 0; step < 3; ++step) {
      student.train(1, step);
      auto batch = student.batch(step, rank());
      EXPECT_NEAR(evaluate(teacher, batch).item<double>(), evaluate(plain, batch).item<double>(),
                  1e-5);
      at::NoGradGuard no_grad;
      if (by_hand) {
        auto to = sharded.parameters(), from = student.sharded().parameters();
        for (size_t i = 0; i < to.size(); ++i) to[i].lerp_(from[i], 0.5);
      } else {
        sharded.lerp_parameters(student.sharded(), 0.5);
      }
      for (auto& [name, value] : plain.parameters)
        value.lerp_(student.oracle().plain().parameter(name), 0.5);
      EXPECT_NEAR(evaluate(teacher, batch).item<double>(), evaluate(plain, batch).item<double>(),
                  1e-5);
    }
  }
}

TEST_P(Updates, LerpOfAnotherModelIsAnError) {
  auto mlp = build_seeded(model_case("mlp")), other = build_seeded(model_case("transformer"));
  auto one = fully_shard(mlp.module, options()), two = fully_shard(other.module, options());
  expect_error([&] { one.lerp_parameters(two, 0.5); }, {"lerp_parameters", "same options"});
}

// In one process: a parameter without a gradient isn't updated, and its count of updates begins
// when it gets one.
void freeze_and_unfreeze(const ShardOptions& options, bool ours, bool wrapped,
                         bool on_device = false) {
  auto mine = build_seeded(model_case("mlp")), plain = build_seeded(model_case("mlp"));
  plain.module->to(test_device());
  auto one_unit = options;
  one_unit.wrap = [](const ModuleView&) { return false; };
  auto settings = torch::optim::AdamWOptions(0.05).weight_decay(0.1);
  auto frozen = [](Built& model, bool on) {
    model.parameter("layers.2.weight").set_requires_grad(!on);
    model.parameter("layers.5.bias").set_requires_grad(!on);
  };
  auto late = [](Built& model, bool on) {
    model.parameter("layers.6.weight").set_requires_grad(on);
  };
  auto sharded = fully_shard(mine.module, one_unit);
  std::optional<AdamW> adamw;
  std::optional<torch::optim::AdamW> theirs;
  std::optional<optim::Wrapped<torch::optim::AdamW>> wrap;
  if (ours)
    adamw.emplace(sharded, AdamWOptions{.lr = 0.05, .weight_decay = 0.1}).set_capturable(on_device);
  else if (wrapped)
    wrap.emplace(sharded, settings);
  else
    theirs.emplace(sharded.parameters(), settings);
  torch::optim::AdamW reference(plain.module->parameters(), settings);
  late(mine, false);
  late(plain, false);
  for (int step = 0; step < 6; ++step) {
    if (step == 5 && adamw) {  // each parameter's count survives a checkpoint
      const std::string folder = text_of_rank_0(
          (std::filesystem::temp_directory_path() / ("fsdp-counts-" + std::to_string(getpid())))
              .string());
      checkpoint::save(folder, sharded, &*adamw);
      adamw.emplace(sharded, AdamWOptions{.lr = 0.05, .weight_decay = 0.1});
      checkpoint::load(folder, sharded, &*adamw);
      adamw->set_capturable(on_device);
      on_every_rank(true);
      if (rank() == 0) std::filesystem::remove_all(folder);
    }
    if (step == 2) frozen(mine, true), frozen(plain, true);
    if (step == 3) late(mine, true), late(plain, true);
    if (step == 4) frozen(mine, false), frozen(plain, false);
    mine.loss(moved(model_case("mlp").batch(step, 0), test_device())).backward();
    plain.loss(moved(model_case("mlp").batch(step, 0), test_device())).backward();
    reference.step();
    if (adamw) adamw->step(), adamw->zero_grad();
    if (theirs) theirs->step(), theirs->zero_grad();
    if (wrap) wrap->step(), wrap->zero_grad();
    reference.zero_grad();
    for (const auto& [name, value] : plain.parameters)
      EXPECT_LE((sharded.full_tensor(name) - value).abs().max().item<double>(), 1e-6)
          << name << " after step " << step;
  }
}

TEST_P(Updates, FrozenAndUnfrozenInsideAUnit) {
  freeze_and_unfreeze(options(), /*ours=*/false, /*wrapped=*/false);
}
TEST_P(Updates, FrozenAndUnfrozenWithAWrappedOptimizer) {
  freeze_and_unfreeze(options(), /*ours=*/false, /*wrapped=*/true);
}
TEST_P(Updates, FrozenAndUnfrozenWithOurOptimizer) {
  for (bool on_device : {false, true})
    freeze_and_unfreeze(options(), /*ours=*/true, /*wrapped=*/false, on_device);
}

TEST_P(Updates, LbfgsIsRefused) {
  SideBySide both(model_case("mlp"), options());
  torch::optim::LBFGS lbfgs(both.sharded().parameters(), torch::optim::LBFGSOptions(0.1));
  auto closure = [&] {
    lbfgs.zero_grad();
    auto loss = both.mine().loss(both.batch(0, rank()));
    loss.backward();
    return loss;
  };
  expect_error([&] { lbfgs.step(closure); }, {"LBFGS", "fsdp::AdamW"});
  both.zero_grad();
  both.train(2);
}

TEST_P(Updates, AWrappedOptimizerIsTheOptimizer) {
  auto mine = build_seeded(model_case("transformer"));
  auto shard_options = options();
  shard_options.wrap = model_case("transformer").wrap;
  auto sharded = fully_shard(mine.module, shard_options);
  auto settings = torch::optim::SGDOptions(0.05).momentum(0.9);
  auto optimizer = optim::wrap<torch::optim::SGD>(sharded, settings);
  Oracle oracle(model_case("transformer"), world_size(), {}, test_device());
  auto work = [&](Built& model, int rank) {
    auto loss = model.loss(moved(model_case("transformer").batch(0, rank), test_device()));
    loss.backward();
    return loss;
  };
  std::vector<at::Tensor> plain;  // each once: a tied weight is listed twice by parameters()
  for (auto& [name, parameter] : oracle.plain().parameters) plain.push_back(parameter);
  torch::optim::SGD reference(plain, settings);
  for (int step = 0; step < 3; ++step) {
    auto loss = optimizer.step([&] { return work(mine, rank()); });
    optimizer.zero_grad();
    oracle.run(work);
    EXPECT_NEAR(loss.item<double>(), oracle.loss(rank()).item<double>(), 1e-5);
    for (size_t i = 0; i < oracle.masters().size(); ++i) {
      auto& parameter = oracle.plain().parameters[i].second;
      parameter.mutable_grad() = oracle.gradient(i).to(parameter.options());
    }
    reference.step();
    oracle.zero_grad();
    for (const auto& [name, value] : oracle.plain().parameters)
      EXPECT_TRUE(at::allclose(sharded.full_tensor(name), value, 1e-5, 1e-6)) << name;
  }
  // Nobody else writes to its tensors.
  at::NoGradGuard no_grad;
  expect_error([&] { optimizer->param_groups()[0].params()[0].zero_(); }, {"update_parameters"});
}

TEST_P(Updates, ParametersKeepTheirNames) {
  SideBySide both(model_case("mlp"), options());
  both.run(both.work(0));
  int64_t numel = 0;
  for (const auto& [name, leaf] : both.sharded().named_parameters()) {
    auto local = both.sharded().shard_of(name);
    EXPECT_TRUE(at::equal(leaf, local.local.reshape({-1}))) << name;
    EXPECT_TRUE(at::equal(leaf.grad(), local.local_grad.reshape({-1}))) << name;
    numel += leaf.numel();
  }
  EXPECT_EQ(sum_over_ranks(static_cast<double>(numel)), 8 * (16 * 16 + 16));
}

TEST_P(Updates, AnUpdateWhileParametersAreSummonedIsAnError) {
  for (bool ours : {false, true}) {
    for (SummonOptions summon : {SummonOptions{}, SummonOptions{.writeback = false},
                                 SummonOptions{.offload_to_cpu = true}}) {
      SideBySide both(model_case("mlp"), options());
      std::optional<AdamW> adamw;
      if (ours) adamw.emplace(both.sharded());
      {
        auto full = both.sharded().summon_full_params(summon);
        both.run_mine(both.work(0));
        expect_error([&] { ours ? adamw->step() : both.step(); }, {"summon_full_params"});
        expect_error([&] { both.sharded().load_full_state_dict({}, false); },
                     {"summon_full_params"});
      }
      adamw.reset();
      both.zero_grad();
      both.expect_same_parameters();
    }
  }
}

TEST_P(Updates, AnUpdateWhileUnitsArePinned) {
  SideBySide both(model_case("mlp"), options());
  both.sharded().unshard();
  both.train(3);
  expect_same_output(both);
  both.sharded().reshard();
  both.train(2, 3);
}

TEST_P(Updates, AModuleOfTwoModelsIsAnErrorAtTheSecond) {
  torch::manual_seed(kSeed);
  auto shared = nn::Linear(8, 8);
  struct HolderImpl : nn::Module {
    explicit HolderImpl(nn::Linear part)
        : part(register_module("part", part)), own(register_module("own", nn::Linear(8, 8))) {}
    nn::Linear part, own;
  };
  auto one = std::make_shared<HolderImpl>(shared), two = std::make_shared<HolderImpl>(shared);
  auto sharded = fully_shard(one, options());
  expect_error([&] { fully_shard(two, options()); }, {"part.weight", "another sharded model"});
  // The first is as it was, and bottom-up use still works.
  one->own(one->part(at::ones({2, 8}, test_device()))).sum().backward();
  EXPECT_TRUE(sharded.full_grad("part.weight").defined());
  auto three = std::make_shared<HolderImpl>(nn::Linear(8, 8));
  fully_shard(three->part, options());
  EXPECT_NO_THROW(fully_shard(three, options()));
}

}  // namespace
}  // namespace fsdp::testing
