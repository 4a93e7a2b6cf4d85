// A model of fsdp::nn layers, sharded and trained beside an unsharded copy: the gradients that
// layers write into the units' buffers equal those that autograd accumulates.
#include <torch/csrc/autograd/autograd.h>

#include <numeric>

#include "fsdp/nn.h"
#include "fsdp/optim.h"
#include "fsdp/recompute.h"
#include "fsdp/world.h"
#include "nn/products.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

namespace layers = fsdp::nn;

constexpr int64_t kDim = 16;

struct TwoHeadedImpl : torch::nn::Module {
  TwoHeadedImpl() {
    for (auto& p : fixed->parameters()) p.set_requires_grad(false);
  }

  // Packed linears after a norm, a weight used three times, a weight packed with itself, and a
  // frozen one.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& delta) {
    auto [both, sum] =
        layers::norm_linears(x, delta, norm->weight, norm->eps(), {left->weight, right->weight},
                             {left->bias, right->bias});
    at::Tensor h = layers::swiglu_linear(both, again->weight);
    h = again(again(h).tanh());
    h = fixed(centre(h)) +
        layers::gelu_linear(h, twisted, {}, "tanh", layers::WeightLayout::kInOut);
    at::Tensor two =
        layers::norm_linears(h, {}, norm->weight, norm->eps(), {both_of->weight, both_of->weight},
                             {both_of->bias, both_of->bias})
            .out;
    h = h + two.narrow(-1, 0, kDim) * two.narrow(-1, kDim, kDim).tanh();
    return {sum, h};
  }

  layers::RMSNorm norm = register_module("norm", layers::RMSNorm(kDim));
  layers::Linear left = register_module("left", layers::Linear(kDim, kDim));
  layers::Linear right = register_module("right", layers::Linear(kDim, kDim));
  layers::Linear again = register_module("again", layers::Linear(kDim, kDim));
  layers::Linear both_of = register_module("both_of", layers::Linear(kDim, kDim));
  layers::LayerNorm centre =
      register_module("centre", layers::LayerNorm(torch::nn::LayerNormOptions({kDim})));
  layers::Linear fixed = register_module("fixed", layers::Linear(kDim, kDim));
  at::Tensor twisted = register_parameter("twisted", 0.3 * at::randn({kDim, kDim}));
};
TORCH_MODULE(TwoHeaded);

// The embedding is also the head: two layers write the gradient of one weight.
struct OwnImpl : torch::nn::Module {
  OwnImpl() {
    for (int i = 0; i < 3; ++i) blocks->push_back(TwoHeaded());
  }

  at::Tensor forward(const at::Tensor& ids, const at::Tensor& targets) {
    at::Tensor x = table(ids), delta;
    for (const auto& block : *blocks)
      std::tie(x, delta) = block->as<TwoHeaded>()->forward(x, delta);
    at::Tensor hidden = layers::add_rms_norm(x, delta, norm->weight).out;
    at::Tensor loss = layers::linear_cross_entropy(hidden, table->weight, targets, {.chunk = 4});
    at::Tensor rows = layers::linear_cross_entropy(
        hidden, table->weight, targets, {.reduction = layers::Reduction::kNone, .chunk = 4});
    return loss + 0.1 * layers::cross_entropy(layers::linear(hidden, table->weight), targets) +
           0.1 * rows.square().mean();
  }

  layers::Embedding table = register_module("table", layers::Embedding(23, kDim));
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
  layers::RMSNorm norm = register_module("norm", layers::RMSNorm(kDim));
};
TORCH_MODULE(Own);

const ModelCase& own() {
  static const ModelCase model = [] {
    auto build = [] {
      Own own;
      return built(own.ptr(),
                   [own](const Batch& batch) mutable { return own->forward(batch.x, batch.y); });
    };
    auto batch = [](int step, int rank) {
      return Batch{step, random_integers(step, rank, 0, 23, {2, 5}),
                   random_integers(step, rank, 1, 23, {2, 5})};
    };
    // Adjacent weights are one product, which may sum in another order than several. In bf16 the
    // copy rounds each gradient of a weight, and their sums.
    return ModelCase{.name = "own",
                     .build = build,
                     .batch = batch,
                     .wrap = wrap::modules<TwoHeaded>(),
                     .tolerance = 4e-6,
                     .bf16_tolerance = 3 * kBf16Epsilon};
  }();
  return model;
}

struct Memory {
  const char* name;
  bool shared;
  bool bf16;
};

class ShardedLayers : public ::testing::TestWithParam<Memory> {
 protected:
  ShardOptions options() const {
    ShardOptions options{.device = test_device(), .share_host_memory = GetParam().shared};
    if (GetParam().bf16) options.mixed_precision = bf16_precision();
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Memory, ShardedLayers,
                         ::testing::Values(Memory{"shared", true, false},
                                           Memory{"gathered", false, false},
                                           Memory{"bf16", false, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(ShardedLayers, TrainAsTheUnshardedCopy) {
  SideBySide both(own(), options());
  both.train(4);
}

// Weights of one product in several units, some of which aren't gathered yet.
TEST_P(ShardedLayers, TrainWhereEachIsAUnit) {
  ShardOptions each = options();
  each.wrap = wrap::modules<layers::Linear>();
  SideBySide both(own(), each);
  both.train(3);
}

// Otherwise its reductions would all come at the end of the next backward.
TEST_P(ShardedLayers, ExpectNothingOfAForwardThatIsGone) {
  SideBySide both(own(), options());
  auto expected = [&] {
    int all = 0;
    for (const shard::Flat* flat : shard::lock(both.sharded())->flats())
      all = std::accumulate(flat->expected.begin(), flat->expected.end(), all);
    return all;
  };
  {
    at::Tensor loss = both.mine().loss(both.batch(7, rank()));
    EXPECT_GT(expected(), 0);
    both.train(1);  // ends the expectations
    EXPECT_EQ(expected(), 0);
  }
  EXPECT_EQ(expected(), 0);
  both.mine().loss(both.batch(8, rank()));
  EXPECT_EQ(expected(), 0);
  both.train(2);
}

TEST_P(ShardedLayers, AccumulateWithoutCommunication) {
  SideBySide both(own(), options());
  for (int step = 0; step < 2; ++step) {
    auto micro = [&](Built& model, int rank, int part) {
      at::Tensor loss = model.loss(both.batch(10 * step + part, rank)) / 3;
      loss.backward();
      return loss;
    };
    both.run(
        [&](Built& model, int rank) {
          {
            auto guard = both.sharded().no_sync();
            micro(model, rank, 0);
            micro(model, rank, 1);
          }
          return micro(model, rank, 2);
        },
        [&](Built& model, int rank) {
          micro(model, rank, 0);
          micro(model, rank, 1);
          return micro(model, rank, 2);
        });
    both.step();
    both.zero_grad();
  }
}

TEST_P(ShardedLayers, AccumulateOverBackwardsThatAreReduced) {
  SideBySide both(own(), options());
  for (int step = 0; step < 2; ++step) {
    both.run(both.work(2 * step));
    both.run(both.work(2 * step + 1));
    both.step();
    both.zero_grad();
  }
}

TEST_P(ShardedLayers, AForwardWhoseBackwardNeverComesHarmsNobody) {
  SideBySide both(own(), options());
  for (int step = 0; step < 3; ++step) {
    both.mine().loss(both.batch(step + 20, rank()));  // its graph is freed at once
    both.run(both.work(step));
    both.step();
    both.zero_grad();
  }
}

TEST_P(ShardedLayers, SeveralForwardsBeforeOneBackward) {
  SideBySide both(own(), options());
  for (int step = 0; step < 2; ++step) {
    both.run([&](Built& model, int rank) {
      at::Tensor loss =
          model.loss(both.batch(step, rank)) + 2 * model.loss(both.batch(step + 10, rank));
      loss.backward();
      return loss;
    });
    both.step();
    both.zero_grad();
  }
}

TEST_P(ShardedLayers, ARetainedGraphIsUsedTwice) {
  SideBySide both(own(), options());
  for (int step = 0; step < 2; ++step) {
    both.run([&](Built& model, int rank) {
      at::Tensor loss = model.loss(both.batch(step, rank));
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      return loss;
    });
    both.step();
    both.zero_grad();
  }
}

TEST_P(ShardedLayers, AutogradGradGivesThisRanksOwnGradientAndLeavesNone) {
  SideBySide both(own(), options());
  std::vector<std::string> names = {"table.weight", "blocks.1.left.weight", "blocks.0.norm.weight"};
  auto gradients_of = [&](Built& model) {
    std::vector<at::Tensor> parameters;
    for (const auto& name : names) parameters.push_back(model.parameter(name));
    return torch::autograd::grad({model.loss(both.batch(0, rank()))}, parameters);
  };
  auto mine = gradients_of(both.mine()), expected = gradients_of(both.oracle().plain());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_LE((mine[i] - expected[i]).norm().item<double>(),
              2e-2 * expected[i].norm().item<double>())
        << names[i];
    EXPECT_FALSE(both.sharded().full_grad(names[i]).defined()) << names[i];
  }
  both.train(2);
}

TEST_P(ShardedLayers, AHookOfTheUsersOwnSeesTheGradient) {
  SideBySide both(own(), options());
  int seen = 0;
  auto watch = [&](Built& model, int* count) {
    model.parameter("blocks.2.right.weight").register_hook([count](const at::Tensor& gradient) {
      if (count) ++*count;
      return 2 * gradient;
    });
  };
  watch(both.mine(), &seen);
  watch(both.oracle().plain(), nullptr);
  both.train(2);
  EXPECT_EQ(seen, 2);
}

// One matrix product for both: the purpose of the layout.
TEST_P(ShardedLayers, WeightsOfOneUnitLieSideBySideOnOneRank) {
  SideBySide both(own(), options());
  if (world_size() > 1) return;
  for (const char* kind : {"weight", "bias"}) {
    auto part = [&](const char* name) {
      return both.mine().parameter(std::string("blocks.1.") + name + "." + kind);
    };
    at::NoGradGuard no_grad;
    at::Tensor whole = layers::joined({part("left"), part("right")});
    ASSERT_TRUE(whole.defined()) << kind;
    EXPECT_TRUE(at::equal(whole, at::cat({part("left"), part("right")}))) << kind;
    EXPECT_FALSE(layers::joined({part("right"), part("left")}).defined()) << kind;
  }
}

// --- in fp8 ---

// Packed linears after a norm, the feed-forward's, one whose rows aren't a multiple of 16, and a
// weight that is used twice.
struct OneByteImpl : torch::nn::Module {
  explicit OneByteImpl(layers::Fp8 recipe) {
    layers::convert_to_fp8(*this, {.recipe = recipe, .least = 16});
  }

  at::Tensor forward(const at::Tensor& x) {
    auto [both, sum] =
        layers::norm_linears(x, {}, norm->weight, norm->eps(), {gate->weight, up->weight},
                             {gate->bias, up->bias}, gate->fp8);
    at::Tensor h = layers::swiglu_linear(both, down->weight, down->bias,
                                         layers::WeightLayout::kOutIn, down->fp8);
    return twice(twice(h + sum).tanh()).tanh() + odd(h.slice(0, 0, 3)).tanh().mean();
  }

  layers::RMSNorm norm = register_module("norm", layers::RMSNorm(32));
  layers::Linear gate = register_module("gate", layers::Linear(32, 48));
  layers::Linear up = register_module("up", layers::Linear(32, 48));
  layers::Linear down = register_module("down", layers::Linear(48, 32));
  layers::Linear twice = register_module("twice", layers::Linear(32, 32));
  layers::Linear odd = register_module("odd", layers::Linear(32, 16));
};
TORCH_MODULE(OneByte);

ModelCase in_fp8(layers::Fp8 recipe) {
  auto build = [recipe] {
    auto first = OneByte(recipe), second = OneByte(recipe);
    torch::nn::ModuleList both(first, second);
    return built(both.ptr(), [first, second](const Batch& batch) mutable {
      return mean_square(second(first(batch.x)), batch.y);
    });
  };
  auto batch = [](int step, int rank) {
    return Batch{step, random_normal(step, rank, 0, {32, 32}),
                 random_normal(step, rank, 1, {32, 32})};
  };
  // A number that is rounded to the other neighbour differs by a sixteenth.
  return {.name = "fp8",
          .build = build,
          .batch = batch,
          .wrap = wrap::modules<OneByte>(),
          .tolerance = 1e-2,
          .bf16_tolerance = 5e-2};
}

class ShardedFp8 : public ::testing::TestWithParam<layers::Fp8> {};

INSTANTIATE_TEST_SUITE_P(Recipes, ShardedFp8,
                         ::testing::Values(layers::Fp8::kTensorwise, layers::Fp8::kRowwise,
                                           layers::Fp8::kRowwiseBf16Grad));

TEST_P(ShardedFp8, TrainsAsTheUnshardedCopy) {
  const ModelCase model = in_fp8(GetParam());
  for (bool bf16 : {false, true}) {
    ShardOptions options{.device = test_device()};
    if (bf16) options.mixed_precision = bf16_precision();
    SideBySide both(model, options);
    both.train(3);
  }
}

TEST_P(ShardedFp8, EveryStrategyGivesTheSameBits) {
  const ModelCase model = in_fp8(GetParam());
  std::vector<at::Tensor> first;
  for (auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP,
                        ShardingStrategy::NO_SHARD}) {
    SideBySide both(model, {.strategy = strategy, .device = test_device()});
    both.train(2);
    std::vector<at::Tensor> now;
    for (const char* name : {"0.gate.weight", "0.down.weight", "1.twice.weight", "1.norm.weight"})
      now.push_back(both.sharded().full_tensor(name));
    if (first.empty()) first = now;
    for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], first[i])) << i;
  }
}

TEST_P(ShardedFp8, RecomputationGivesTheSameBits) {
  const ModelCase model = in_fp8(GetParam());
  std::vector<at::Tensor> first;
  for (auto mode : {std::optional<Recompute>(), std::optional(Recompute::FULL),
                    std::optional(Recompute::SELECTIVE)}) {
    SideBySide both(model, {.device = test_device()});
    if (mode)
      apply_activation_checkpointing(both.sharded(), RecomputePolicy(model.wrap, {.mode = *mode}));
    both.train(2);
    std::vector<at::Tensor> now;
    for (const char* name : {"0.gate.weight", "0.down.weight", "1.twice.weight", "1.norm.weight"})
      now.push_back(both.sharded().full_tensor(name));
    if (first.empty()) first = now;
    for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], first[i])) << i;
  }
}

struct Fp8Run {
  layers::Fp8 recipe;
  MixedPrecision precision;
  bool recompute;
};

// Two linears and an activation; forward() is torch's own where the linears are.
template <typename Linear>
struct TwoLinears : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return down(up(x).tanh()).tanh(); }

  Linear up = register_module("up", Linear(32, 48)), down = register_module("down", Linear(48, 32));
};

// The weights after two steps.
template <typename Linear>
std::vector<at::Tensor> trained_in_fp8(const Fp8Run& run) {
  torch::manual_seed(5);
  const auto model = std::make_shared<TwoLinears<Linear>>();
  auto sharded = fully_shard(model, {.mixed_precision = run.precision, .device = test_device()});
  for (const auto& linear : layers::convert_to_fp8(*model, {.recipe = run.recipe, .least = 16}))
    EXPECT_EQ(linear.why_not, "") << linear.name;
  if (run.recompute)
    apply_activation_checkpointing(sharded, RecomputePolicy(wrap::modules<Linear>()));
  AdamW adamw(sharded, {.lr = 1e-2});
  for (int step = 0; step < 2; ++step) {
    const at::Tensor x =
        random_normal(step, World::current().rank(), 0, {32, 32}).to(test_device());
    model->forward(x).square().mean().backward();
    adamw.step();
    sharded.zero_grad();
  }
  return {sharded.full_tensor("up.weight"), sharded.full_tensor("down.bias")};
}

TEST_P(ShardedFp8, ATorchLinearComputesAsOurs) {
  for (bool bf16 : {false, true}) {
    for (bool recompute : {false, true}) {
      const Fp8Run run{GetParam(), bf16 ? bf16_precision() : MixedPrecision(), recompute};
      const auto ours = trained_in_fp8<layers::Linear>(run);
      const auto theirs = trained_in_fp8<torch::nn::Linear>(run);
      for (size_t i = 0; i < ours.size(); ++i)
        EXPECT_TRUE(at::equal(theirs[i], ours[i])) << i << bf16 << recompute;
    }
  }
}

// Six of seven parameters are frozen.
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl() {
    layers::add_lora(*this, {.rank = 4, .alpha = 8});
    torch::NoGradGuard no_grad;
    for (const auto& item : named_parameters())
      if (item.key().ends_with("lora_B.weight")) item.value().normal_(0, 0.1);
  }
  at::Tensor forward(const at::Tensor& x) { return down(up(x).tanh()); }

  layers::Linear up = register_module("up", layers::Linear(48, 96));
  layers::Linear down = register_module("down", layers::Linear(96, 48));
};
TORCH_MODULE(Adapted);

TEST(ShardedAdapters, AFrozenBaseHasNoGradientsStatesOrMasters) {
  const MixedPrecision half{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  int64_t held[2] = {0, 0};
  for (bool masters : {true, false}) {
    torch::manual_seed(4);
    Adapted model;
    int64_t all = 0, trained = 0;
    for (const auto& parameter : model->parameters())
      (parameter.requires_grad() ? trained : all) += parameter.numel();
    MixedPrecision precision = half;
    precision.frozen_masters = masters;
    auto sharded = fully_shard(model, {.mixed_precision = precision});
    AdamW optimizer(sharded, {.lr = 1e-2, .weight_decay = 0});
    const at::Tensor frozen = sharded.full_tensor("up.weight").clone();
    for (int step = 0; step < 2; ++step) {
      model->forward(at::ones({2, 48}, model->up->weight.options().dtype(at::kFloat)))
          .sum()
          .backward();
      optimizer.step();
      if (step == 0) optimizer.zero_grad();
    }
    const MemoryReport memory = sharded.memory();
    const auto share = static_cast<double>(World::current().size());
    const auto bytes = [&](int64_t of) { return static_cast<double>(of) * share; };
    held[masters] = memory.parameters + memory.gathered_from;
    EXPECT_LT(bytes(memory.gradients), 4.5 * double(trained));
    EXPECT_LT(bytes(memory.optimizer), 9.0 * double(trained));
    if (!masters) {
      EXPECT_LT(bytes(held[masters]), 2.1 * double(all) + 4.5 * double(trained));
    }
    EXPECT_TRUE(at::equal(sharded.full_tensor("up.weight"), frozen));
  }
  EXPECT_LT(held[false], held[true]);
}

// --- with quantised linears ---

// A decoder's block in small: linears that read one norm's output, and one whose result is added.
struct FewBitsImpl : torch::nn::Module {
  explicit FewBitsImpl(layers::Quant quant) {
    layers::add_lora(*this,
                     {.rank = 4, .alpha = 8, .where = layers::named_linears({"up", "down"})});
    torch::NoGradGuard no_grad;
    for (const auto& item : named_parameters())
      if (item.key().ends_with("lora_B.weight")) item.value().normal_(0, 0.1);
    layers::quantise_linears(*this, {.quant = quant});
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = layers::rms_norm(x, norm->weight);
    const at::Tensor both = layers::quantised_linears(h, {gate->weight, up->weight},
                                                      {gate->bias, up->bias}, gate->quant());
    return x + down(layers::swiglu(layers::add_adapters(both, h, {gate, up})));
  }

  layers::RMSNorm norm = register_module("norm", layers::RMSNorm(64));
  layers::Linear gate = register_module("gate", layers::Linear(64, 128));
  layers::Linear up = register_module("up", layers::Linear(64, 128));
  layers::Linear down = register_module("down", layers::Linear(128, 64));
};
TORCH_MODULE(FewBits);

ModelCase in_few_bits(layers::Quant quant) {
  auto build = [quant] {
    auto first = FewBits(quant), second = FewBits(quant);
    torch::nn::ModuleList both(first, second);
    return built(both.ptr(), [first, second](const Batch& batch) mutable {
      return mean_square(second(first(batch.x)), batch.y);
    });
  };
  auto batch = [](int step, int rank) {
    return Batch{step, random_normal(step, rank, 0, {8, 64}),
                 random_normal(step, rank, 1, {8, 64})};
  };
  return {.name = "few bits",
          .build = build,
          .batch = batch,
          .wrap = wrap::modules<FewBits>(),
          .bf16_tolerance = 4 * kBf16Epsilon};  // restored weights are rounded to bf16, too
}

class ShardedQuantised : public ::testing::TestWithParam<layers::Quant> {};

INSTANTIATE_TEST_SUITE_P(Formats, ShardedQuantised,
                         ::testing::Values(layers::Quant::kNf4, layers::Quant::kNf4Double,
                                           layers::Quant::kInt8));

TEST_P(ShardedQuantised, TrainsAsTheUnshardedCopy) {
  const ModelCase model = in_few_bits(GetParam());
  for (bool bf16 : {false, true}) {
    ShardOptions options{.device = test_device()};
    if (bf16) options.mixed_precision = bf16_precision();
    SideBySide both(model, options);
    both.train(3);
  }
}

TEST_P(ShardedQuantised, StrategiesAndRecomputationGiveTheSameBits) {
  const ModelCase model = in_few_bits(GetParam());
  std::vector<at::Tensor> first;
  for (auto strategy :
       {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::NO_SHARD})
    for (bool again : {false, true})
      for (bool shared : {false, true}) {
        SideBySide both(
            model, {.strategy = strategy, .device = test_device(), .share_host_memory = shared});
        if (again) apply_activation_checkpointing(both.sharded(), RecomputePolicy(model.wrap));
        both.train(2);
        std::vector<at::Tensor> now;
        for (const char* name : {"0.up.lora_A.weight", "1.down.lora_B.weight", "0.gate.weight"})
          now.push_back(both.sharded().full_tensor(name));
        if (first.empty()) first = now;
        for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], first[i])) << i;
      }
}

TEST_P(ShardedQuantised, EachRankHoldsItsShareOfTheBytes) {
  torch::manual_seed(4);
  FewBits model(GetParam());
  int64_t bytes = 0, others = 0;
  for (const at::Tensor& parameter : model->parameters())
    (parameter.scalar_type() == at::kByte ? bytes : others) += parameter.numel();
  auto sharded = fully_shard(
      model, {.mixed_precision = {.param_dtype = at::kBFloat16, .frozen_masters = false},
              .device = test_device()});
  const MemoryReport memory = sharded.memory();
  const int64_t held = (memory.parameters + memory.gathered_from) * World::current().size();
  EXPECT_GE(held, bytes);
  EXPECT_LT(held, bytes + 4 * others + 4096 * World::current().size());
}

}  // namespace
}  // namespace fsdp::testing
