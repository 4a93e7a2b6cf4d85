// Policies on whole modules, and how much is kept.
#include "fsdp/recompute.h"

#include <ATen/ATen.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adamw.h>

#include "memory/side_by_side.h"
#include "shard/models.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kBatch = 32;  // so that activations outweigh weights

// The transformer of the sharding tests, wider and with a larger batch.
Make transformer(WrapPolicy which = wrap::modules<Block>(), int every = 1, int64_t depth = 4,
                 int keep_last = 0) {
  return [=](Recompute mode) {
    Transformer model(32, 4, depth);
    at::Tensor ids =
        random_integers(0, 0, 0, TransformerImpl::kVocabulary, {kBatch, TransformerImpl::kTokens});
    auto loss = [model, ids]() mutable { return model->loss(ids, ids.roll(1, 1)); };
    return Subject{model.ptr(), loss,
                   RecomputePolicy(which, {.mode = mode, .every = every, .keep_last = keep_last})};
  };
}

Make of_module(std::function<std::shared_ptr<nn::Module>()> build,
               std::function<at::Tensor(nn::Module&)> loss, WrapPolicy which) {
  return [=](Recompute mode) {
    std::shared_ptr<nn::Module> module = build();
    return Subject{module, [module, loss] { return loss(*module); },
                   RecomputePolicy(which, {.mode = mode})};
  };
}

// --- models ---

TEST(Recompute, AnMlpIsTheSame) {
  expect_same(
      [](Recompute mode) {
        Mlp model(16, 8);
        at::Tensor x = at::randn({256, 16});
        return Subject{model.ptr(), [=]() mutable { return model->forward(x).square().mean(); },
                       RecomputePolicy(wrap::modules<nn::Linear>(), {.mode = mode})};
      },
      {.less = false});  // each layer's one activation is the next one's input: nothing to save
}

TEST(Recompute, ATransformerIsTheSame) {
  expect_same(transformer());
}

TEST(Recompute, EveryModelOfTheShardingTestsIsTheSame) {
  for (const ModelCase& known : model_cases()) {
    SCOPED_TRACE(known.name);
    Built made = known.build();
    if (!made.module || !known.wrap) continue;
    expect_same(
        [&](Recompute mode) {
          Built built = known.build();
          Batch batch = known.batch(0, 0);
          return Subject{built.module, [loss = built.loss, batch] { return loss(batch); },
                         RecomputePolicy(known.wrap, {.mode = mode})};
        },
        {.less = false});  // tiny: weights outweigh activations
  }
}

struct ConvBlockImpl : nn::Module {
  ConvBlockImpl(int64_t in, int64_t out, bool norm)
      : conv(register_module("conv", nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)))),
        norm(norm ? register_module("norm", nn::BatchNorm2d(out)) : nn::BatchNorm2d(nullptr)) {}
  at::Tensor forward(at::Tensor x) {
    x = conv(x);
    if (norm) x = norm(x);
    return at::max_pool2d(at::relu_(x), 2).tanh();
  }
  nn::Conv2d conv;
  nn::BatchNorm2d norm;
};
TORCH_MODULE(ConvBlock);

Make conv_net(bool norm) {
  return of_module(
      [=] {
        nn::Sequential net(ConvBlock(3, 8, norm), ConvBlock(8, 8, norm), ConvBlock(8, 4, norm));
        return net.ptr();
      },
      [](nn::Module& module) {
        at::Tensor x = at::randn({8, 3, 16, 16});
        return module.as<nn::Sequential>()->forward(x).square().mean();
      },
      wrap::modules<ConvBlock>());
}

TEST(Recompute, AConvolutionalNetIsTheSame) {
  expect_same(conv_net(false));
}

TEST(Recompute, RunningStatisticsOfBatchNormAreUpdatedOnce) {
  expect_same(conv_net(true));
  expect_same(conv_net(true), {.forwards = 3});
}

TEST(Recompute, AnLstmIsTheSame) {
  expect_same(of_module(
                  [] {
                    nn::ModuleList list;
                    list->push_back(nn::LSTM(nn::LSTMOptions(8, 8).num_layers(2).dropout(0.2)));
                    list->push_back(nn::GRU(8, 8));
                    list->push_back(nn::Linear(8, 1));
                    return list.ptr();
                  },
                  [](nn::Module& module) {
                    auto& list = *module.as<nn::ModuleList>();
                    at::Tensor x = at::randn({12, 16, 8});
                    x = std::get<0>(list[0]->as<nn::LSTM>()->forward(x)).exp();
                    x = std::get<0>(list[1]->as<nn::GRU>()->forward(x)).tanh();
                    return list[2]->as<nn::Linear>()->forward(x).square().mean();
                  },
                  wrap::modules<nn::LSTM, nn::GRU>()),
              {.less = false});
}

struct RepeatedImpl : nn::Module {  // one block, four times
  at::Tensor forward(at::Tensor x) {
    for (int i = 0; i < 4; ++i) x = block(at::dropout(x, 0.1, true));
    return x;
  }
  Block block = register_module("block", Block(32, 4));
  nn::Linear head = register_module("head", nn::Linear(32, 1));
};
TORCH_MODULE(Repeated);

TEST(Recompute, ABlockThatRunsSeveralTimesIsARegionEachTime) {
  auto make = of_module([] { return Repeated().ptr(); },
                        [](nn::Module& module) {
                          auto& model = *module.as<Repeated>();
                          return model.head(model.forward(at::randn({kBatch, 6, 32}))).mean();
                        },
                        wrap::modules<Block>());
  expect_same(make);
  Outcome plain = run(make, {.recompute = false}), full = run(make, {});
  EXPECT_LT(3 * full.kept, plain.kept);
}

// --- which modules ---

TEST(Policies, MatchByTypeNameEveryKthAndFunction) {
  int64_t all = run(transformer(), {}).kept, none = run(transformer(), {.recompute = false}).kept;
  EXPECT_LT(2 * all, none);
  EXPECT_EQ(run(transformer(wrap::types({"Block"})), {}).kept, all);
  EXPECT_EQ(run(transformer(wrap::names({"blocks.*"})), {}).kept, all);
  auto function = [](const ModuleView& view) { return view.path.starts_with("blocks."); };
  EXPECT_EQ(run(transformer(function), {}).kept, all);
  // Half of the blocks: about halfway between, apart from what is kept in either case.
  int64_t half = run(transformer(wrap::modules<Block>(), 2), {}).kept;
  EXPECT_GT(half, all + (none - all) / 4);
  EXPECT_LT(half, all + 3 * (none - all) / 4);
  expect_same(transformer(wrap::modules<Block>(), 2));
  expect_same(transformer(wrap::names({"blocks.1", "blocks.3"})));
}

TEST(Policies, AFunctionCanGiveEachModuleItsMode) {
  auto make = [](Recompute) {
    Subject subject = transformer()(Recompute::FULL);
    subject.policy = RecomputePolicy([](const ModuleView& view) -> std::optional<Recompute> {
      if (view.type != "Block") return std::nullopt;
      return view.path == "blocks.0" ? Recompute::FULL : Recompute::SELECTIVE;
    });
    return subject;
  };
  Outcome plain = run(transformer(), {.recompute = false});
  Outcome mixed = run(make, {});
  expect_equal(plain, mixed);
  int64_t full = run(transformer(), {}).kept;
  int64_t selective = run(transformer(), {.mode = Recompute::SELECTIVE}).kept;
  EXPECT_GT(mixed.kept, full);
  EXPECT_LT(mixed.kept, selective);
}

TEST(Policies, OfNestedModulesTheOuterOneIsTheRegion) {
  auto nested = wrap::names({"blocks.*", "blocks.*.**"});
  EXPECT_EQ(run(transformer(nested), {}).kept, run(transformer(), {}).kept);
}

TEST(Policies, TheModelItselfIsTheRegionIfNoModuleInItIs) {
  auto root = [](const ModuleView& view) { return view.path.empty(); };
  expect_same(transformer(root));
  EXPECT_LT(run(transformer(root), {}).kept, run(transformer(), {}).kept);
}

TEST(Policies, KeepLastDoesNotRecomputeTheLastBlocks) {
  Make but_one = transformer(wrap::modules<Block>(), 1, 4, /*keep_last=*/1);
  expect_same(but_one);
  EXPECT_GT(run(but_one, {}).kept, run(transformer(), {}).kept);
  EXPECT_LT(run(but_one, {}).kept, run(transformer(), {.recompute = false}).kept);
}

TEST(Policies, APolicyThatMatchesNothingIsAnError) {
  Transformer model;
  EXPECT_THROW(apply_activation_checkpointing(model, wrap::names({"nobody"})), Error);
  EXPECT_THROW(RecomputePolicy(wrap::always(), {.every = 0}), Error);
  EXPECT_THROW(RecomputePolicy(wrap::always(), {.keep_last = -1}), Error);
  RecomputePolicy none_left(wrap::names({"blocks.*"}), {.keep_last = 99});
  EXPECT_THROW(apply_activation_checkpointing(model, none_left), Error);
}

TEST(Policies, ASecondPolicyReplacesTheFirstAndRemoveEndsIt) {
  auto second = [](Subject& subject) {
    apply_activation_checkpointing(subject.module, wrap::names({"blocks.0"}));
  };
  Outcome all = run(transformer(), {.prepare = second});
  EXPECT_EQ(all.kept, run(transformer(), {}).kept);
  auto removed = [](Subject& subject) {
    apply_activation_checkpointing(subject.module, wrap::modules<Block>());
    remove_activation_checkpointing(subject.module);
  };
  Outcome none = run(transformer(), {.recompute = false, .prepare = removed});
  EXPECT_EQ(none.kept, run(transformer(), {.recompute = false}).kept);
}

TEST(Policies, TrainingGivesTheSameParameters) {
  std::vector<std::vector<at::Tensor>> trained;
  for (bool recomputed : {false, true}) {
    torch::manual_seed(3);
    Subject subject = transformer()(Recompute::FULL);
    if (recomputed) apply_activation_checkpointing(subject.module, subject.policy);
    torch::optim::AdamW optimizer(subject.module->parameters(), 1e-2);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      subject.loss().backward();
      optimizer.step();
      torch::NoGradGuard no_grad;
      subject.loss();
    }
    trained.push_back(subject.module->parameters());
  }
  for (size_t i = 0; i < trained[0].size(); ++i)
    EXPECT_TRUE(at::equal(trained[0][i], trained[1][i])) << i;
}

// --- how much is kept ---

// One block with rows = batch * tokens and d = 32, in elements per row. A plain run keeps: the
// input; a norm and its two statistics, twice; q, k, v; attention's result and one statistic per
// head; the sum; 4 d before and after the activation.
TEST(Kept, FullIsTheInputsAndSelectiveTheProductsToo) {
  constexpr int64_t kDepth = 12;
  int64_t rows = kBatch * TransformerImpl::kTokens, d = 32;
  auto per_block = [&](RunOptions options) {
    int64_t deep = run(transformer(wrap::modules<Block>(), 1, kDepth), options).kept;
    int64_t shallow = run(transformer(wrap::modules<Block>(), 1, kDepth / 2), options).kept;
    return static_cast<double>(deep - shallow) / (kDepth / 2) / 4;  // elements
  };
  double weights = 12.0 * d * d + 13 * d;
  double full = per_block({}) - weights;
  double selective = per_block({.mode = Recompute::SELECTIVE}) - weights;
  double plain = per_block({.recompute = false}) - weights;
  double unit = static_cast<double>(rows * d);
  EXPECT_NEAR(full / unit, 1, 0.1);  // the input
  // Plus q, k, v (3), attention (1), its projection (1, for the sum before the second norm) and up
  // (4); not down, which backward doesn't need.
  EXPECT_NEAR(selective / unit, 10, 0.5);
  EXPECT_GT(plain / unit, 14);
}

}  // namespace
}  // namespace fsdp::testing
