// Ranks that use different parameters of a unit, or different units: mixtures of experts,
// stochastic depth, early exit. Results equal those of one process.
#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include <cstdlib>

#include "fsdp/checkpoint.h"
#include "fsdp/optim.h"
#include "fsdp/recompute.h"
#include "shard/uses.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kWidth = 8, kTokens = 5;

// Tokens go to one expert each; most experts get none on a rank.
struct MixtureImpl : nn::Module {
  MixtureImpl(int64_t count, bool learned) : learned(learned) {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    router = register_module("router", nn::Linear(kWidth, count));
    experts = register_module("experts", nn::ModuleList());
    for (int64_t i = 0; i < count; ++i)
      experts->push_back(nn::Sequential(nn::Linear(kWidth, 2 * kWidth), nn::Tanh(),
                                        nn::Dropout(0.1), nn::Linear(2 * kWidth, kWidth)));
  }
  at::Tensor forward(at::Tensor x, int64_t hash) {
    auto h = norm(x);
    auto weights = router(h).softmax(-1);
    auto count = static_cast<int64_t>(experts->size());
    auto choice = learned
                      ? weights.argmax(-1)
                      : (at::arange(x.size(0), x.options().dtype(at::kLong)) * 3 + hash) % count;
    auto out = x;
    for (int64_t i = 0; i < count; ++i) {
      auto tokens = choice.eq(i).nonzero().squeeze(-1);
      if (tokens.numel() == 0) continue;
      auto expert = experts->ptr<nn::SequentialImpl>(i);
      auto weight = weights.index_select(0, tokens).select(1, i).unsqueeze(-1);
      out = out.index_add(0, tokens, expert->forward(h.index_select(0, tokens)) * weight);
    }
    return out;
  }

  bool learned;
  nn::LayerNorm norm{nullptr};
  nn::Linear router{nullptr};
  nn::ModuleList experts{nullptr};
};
TORCH_MODULE(Mixture);

struct MixturesImpl : nn::Module {
  explicit MixturesImpl(bool learned) {
    in = register_module("in", nn::Linear(kWidth, kWidth));
    layers = register_module("layers", nn::ModuleList());
    for (int i = 0; i < 3; ++i) layers->push_back(Mixture(4, learned));
    out = register_module("out", nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(at::Tensor x, int64_t hash) {
    x = in(x);
    for (size_t i = 0; i < layers->size(); ++i)
      x = layers->ptr<MixtureImpl>(i)->forward(x, hash + static_cast<int64_t>(i));
    return out(x);
  }
  nn::Linear in{nullptr}, out{nullptr};
  nn::ModuleList layers{nullptr};
};
TORCH_MODULE(Mixtures);

Batch mixture_batch(int step, int rank) {
  return {step * 16 + rank, random_normal(step, rank, 0, {kTokens, kWidth}),
          random_normal(step, rank, 1, {kTokens, kWidth})};
}

const ModelCase& mixture_case(bool learned) {
  static const auto make = [](bool learned) {
    return ModelCase{.name = learned ? "learned" : "hashed",
                     .build =
                         [learned] {
                           Mixtures model(learned);
                           return built(model.ptr(), [model](const Batch& batch) mutable {
                             return mean_square(model->forward(batch.x, batch.step), batch.y);
                           });
                         },
                     .batch = mixture_batch,
                     .wrap = wrap::names({"layers.*"}),
                     // A unit that no rank reached isn't updated; the oracle's gradient is zero.
                     .momentum = 0,
                     .weight_decay = 0};
  };
  static const ModelCase cases[] = {make(false), make(true)};
  return cases[learned];
}

// A chain of blocks. A rank leaves out some of them, or those after the first few.
struct ChainImpl : nn::Module {
  explicit ChainImpl(bool exits) : exits(exits) {
    in = register_module("in", nn::Linear(kWidth, kWidth));
    blocks = register_module("blocks", nn::ModuleList());
    for (int i = 0; i < 5; ++i)
      blocks->push_back(nn::Sequential(nn::Linear(kWidth, kWidth), nn::Tanh()));
    out = register_module("out", nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(at::Tensor x, int64_t hash) {
    x = in(x);
    for (size_t i = 0; i < blocks->size(); ++i) {
      auto chance = (hash * 7 + static_cast<int64_t>(i) * 5) % 11;
      if (exits && static_cast<int64_t>(i) > hash % 5) break;
      if (!exits && chance < 4) continue;
      x = x + blocks->ptr<nn::SequentialImpl>(i)->forward(x);
    }
    return out(x);
  }
  bool exits;
  nn::Linear in{nullptr}, out{nullptr};
  nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(Chain);

const ModelCase& chain_case(bool exits, bool as_units) {
  static const auto make = [](bool exits, bool as_units) {
    return ModelCase{.name = exits ? "early exit" : "stochastic depth",
                     .build =
                         [exits] {
                           Chain model(exits);
                           return built(model.ptr(), [model](const Batch& batch) mutable {
                             return mean_square(model->forward(batch.x, batch.step), batch.y);
                           });
                         },
                     .batch = mixture_batch,
                     .wrap = as_units ? wrap::names({"blocks.*"}) : wrap::names({"blocks"}),
                     .momentum = 0,
                     .weight_decay = 0};
  };
  static const ModelCase cases[] = {make(false, false), make(false, true), make(true, false),
                                    make(true, true)};
  return cases[2 * exits + as_units];
}

class Uneven : public Uses {
 protected:
  // Every strategy trains both models, one with and one without prefetch. More than three ranks add
  // only HYBRID_SHARD with several ranks per replica.
  void train(const ModelCase& one, const ModelCase& other, const ShardOptions& base) const {
    int prefetch = 0;
    for (auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP,
                          ShardingStrategy::NO_SHARD, ShardingStrategy::HYBRID_SHARD}) {
      const bool hybrid = strategy == ShardingStrategy::HYBRID_SHARD;
      if (hybrid ? world_size() % 2 != 0 : world_size() > 3) continue;
      for (const ModelCase* model : {&one, &other}) {
        SCOPED_TRACE(model->name + " " + name(strategy) + " prefetch " + std::to_string(prefetch));
        auto shard_options = base;
        shard_options.strategy = strategy;
        if (hybrid) shard_options.mesh = hybrid_mesh();
        shard_options.forward_prefetch = shard_options.backward_prefetch = prefetch;
        SideBySide both(*model, shard_options);
        both.train(4);
        prefetch = 1 - prefetch;
      }
      prefetch = 1 - prefetch;
    }
  }
  static WrapPolicy experts_apart() {
    return [](const ModuleView& module) -> WrapPolicy::Decision {
      if (module.type == "Mixture") return UnitOptions{};
      if (module.path.find("experts.") == std::string::npos || module.type != "Sequential")
        return {};
      return UnitOptions{.uneven_use = true};
    };
  }
};
INSTANTIATE_TEST_SUITE_P(Memory, Uneven, ::testing::Bool(), memory_name);

TEST_P(Uneven, ExpertsInsideAUnit) {
  train(mixture_case(false), mixture_case(true), options());
}

TEST_P(Uneven, ExpertsThatAreUnits) {
  auto apart = options();
  apart.wrap = experts_apart();
  train(mixture_case(false), mixture_case(true), apart);
}

TEST_P(Uneven, BlocksInsideAUnit) {
  train(chain_case(false, /*as_units=*/false), chain_case(true, false), options());
}

TEST_P(Uneven, BlocksThatAreUnits) {
  auto uneven = options();
  uneven.uneven_use = true;
  train(chain_case(false, /*as_units=*/true), chain_case(true, true), uneven);
}

TEST_P(Uneven, WithAccumulationEvaluationAndViews) {
  for (bool apart : {false, true}) {
    SCOPED_TRACE(apart ? "experts as units" : "experts in a unit");
    auto shard_options = options();
    if (apart) shard_options.wrap = experts_apart();
    SideBySide both(mixture_case(true), shard_options);
    for (int step = 0; step < 3; ++step) {
      {
        at::NoGradGuard no_grad;
        both.mine().loss(both.batch(50 + step, rank()));
      }
      auto view = both.mine().parameter("layers.1.router.weight").t();
      {
        auto off = both.sharded().no_sync();
        both.run_mine(both.work(2 * step));
      }
      both.oracle().run(both.work(2 * step));
      both.run(both.work(2 * step + 1));
      both.step();
      both.zero_grad();
    }
  }
}

// Evaluation uses units without a graph; the step after it is reduced as any other.
TEST_P(Uneven, RightAfterAnEvaluation) {
  for (bool apart : {false, true}) {
    auto shard_options = options();
    shard_options.forward_prefetch = shard_options.backward_prefetch = 0;
    if (apart) shard_options.wrap = experts_apart();
    SideBySide both(mixture_case(true), shard_options);
    for (int step = 0; step < 3; ++step) {
      {
        at::NoGradGuard no_grad;
        both.mine().loss(both.batch(50 + step, rank()));
      }
      both.train(1, step);
    }
  }
}

// A backward that isn't the model's leaves it alone, even on one rank.
TEST_P(Uneven, AnotherBackwardIsNoConcernOfTheirs) {
  auto apart = options();
  apart.wrap = experts_apart();
  SideBySide both(mixture_case(true), apart);
  both.train(1);
  if (rank() == 0) {
    auto x = at::ones({3}, test_device()).requires_grad_(true);
    x.sum().backward();
    torch::autograd::grad({(x * x).sum()}, {x});
  }
  for (const auto& [name, parameter] : both.mine().parameters)
    EXPECT_FALSE(parameter.grad().defined()) << name;
  both.train(2, 1);
}

TEST_P(Uneven, WithRecomputation) {
  for (auto mode : {Recompute::FULL, Recompute::SELECTIVE})
    for (bool apart : {false, true}) {
      auto shard_options = options();
      if (apart) shard_options.wrap = experts_apart();
      SideBySide both(mixture_case(false), shard_options);
      apply_activation_checkpointing(both.sharded(),
                                     RecomputePolicy(wrap::names({"layers.*"}), {.mode = mode}));
      both.train(3);
    }
}

TEST_P(Uneven, WithOffloadAndPartsThatAreKept) {
  for (bool apart : {false, true}) {
    auto shard_options = options();
    if (apart) shard_options.wrap = experts_apart();
    auto offloaded = shard_options, kept = shard_options;
    offloaded.offload = {.parameters = true, .gradients = true, .optimizer = true};
    SideBySide(mixture_case(true), offloaded).train(3);
    if (world_size() % 2 != 0) continue;
    kept.reshard_after_forward = ReshardAfterForward(2);
    SideBySide(mixture_case(true), kept).train(3);
  }
}

// AdamW; a parameter without a token anywhere has a gradient of zero.
struct WithAdamW {
  explicit WithAdamW(const ShardOptions& options, int world)
      : mine(build_seeded(mixture_case(true))),
        sharded(fully_shard(mine.module, options)),
        adamw(sharded, {.lr = 0.01}),
        oracle(mixture_case(true), world, {}, test_device()),
        reference(oracle.plain().module->parameters(), torch::optim::AdamWOptions(0.01)) {}

  static RankWork work(int step) {
    return [step](Built& model, int rank) {
      auto loss = model.loss(moved(mixture_batch(step, rank), test_device()));
      loss.backward();
      return loss;
    };
  }
  void step_oracle(int step) {
    oracle.run(work(step));
    for (size_t i = 0; i < oracle.masters().size(); ++i) {
      auto& parameter = oracle.plain().parameters[i].second;
      parameter.mutable_grad() = oracle.gradient(i).to(parameter.options());
    }
    reference.step();
    oracle.zero_grad();
  }
  void step(int step) {
    mine.module->eval(), oracle.plain().module->eval();  // no dropout
    work(step)(mine, rank());
    adamw.step();
    adamw.zero_grad();
    step_oracle(step);
  }
  void expect_same() {
    for (const auto& [name, value] : oracle.plain().parameters)
      EXPECT_LE((sharded.full_tensor(name) - value).abs().max().item<double>(), 1e-6) << name;
  }

  Built mine;
  Sharded sharded;
  AdamW adamw;
  Oracle oracle;
  torch::optim::AdamW reference;
};

TEST_P(Uneven, WithAdamW) {
  auto shard_options = options();
  shard_options.wrap = mixture_case(true).wrap;
  WithAdamW both(shard_options, world_size());
  for (int step = 0; step < 4; ++step) {
    both.step(step);
    both.expect_same();
  }
}

// Saved by one number of ranks and loaded by another: mixture.sh runs these two.
TEST(MixtureCheckpoints, Save) {
  const char* folder = std::getenv("FSDP_MIXTURE");
  if (!folder) GTEST_SKIP();
  WithAdamW both({.wrap = mixture_case(true).wrap, .device = test_device()}, world_size());
  for (int step = 0; step < 3; ++step) both.step(step);
  both.expect_same();
  checkpoint::save(folder, both.sharded, &both.adamw);
}

TEST(MixtureCheckpoints, Load) {
  const char* folder = std::getenv("FSDP_MIXTURE");
  if (!folder) GTEST_SKIP();
  constexpr int kSavedBy = 3;
  WithAdamW both({.wrap = mixture_case(true).wrap, .device = test_device()}, kSavedBy);
  both.oracle.plain().module->eval();
  for (int step = 0; step < 3; ++step) both.step_oracle(step);
  checkpoint::load(folder, both.sharded, &both.adamw);
  both.expect_same();
}

// Without the option ranks that use different units are found, and the hint names it.
TEST(FaultsShared, UnitsThatSomeRanksUseWithoutTheOption) {
  SideBySide both(chain_case(/*exits=*/true, /*as_units=*/true), {.device = test_device()});
  std::string error = error_of([&] {
    for (int step = 0; step < 6; ++step) both.run_mine(both.work(step));
  });
  EXPECT_TRUE(contains(error, "uneven_use")) << error;
}
TEST(FaultsGathered, UnitsThatSomeRanksUseWithoutTheOption) {
  SideBySide both(chain_case(/*exits=*/true, /*as_units=*/true),
                  {.device = test_device(), .share_host_memory = false});
  std::string error = error_of([&] {
    for (int step = 0; step < 6; ++step) both.run_mine(both.work(step));
  });
  EXPECT_TRUE(contains(error, "uneven_use")) << error;
}

}  // namespace
}  // namespace fsdp::testing
