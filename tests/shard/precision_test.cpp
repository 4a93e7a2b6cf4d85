// Mixed precision beyond the table of models: the dtype of each parameter, what is cast, and the
// dtype in which gradients are summed.
#include <ATen/ATen.h>
#include <torch/utils.h>

#include "fsdp/grad_scaler.h"
#include "fsdp/optim.h"
#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

ShardOptions options(MixedPrecision precision) {
  return {.wrap = wrap::modules<Block, nn::Linear>(),
          .mixed_precision = std::move(precision),
          .device = test_device()};
}

at::Tensor input(int64_t width = 16) {
  return random_normal(0, rank(), 0, {4, width}).to(test_device());
}

double relative(const at::Tensor& value, const at::Tensor& expected) {
  auto reference = expected.detach().to(at::kDouble);
  return ((value.detach().to(at::kDouble) - reference).norm() / reference.norm()).item<double>();
}

TEST(Precision, TheOutputOfForwardIsCast) {
  torch::manual_seed(7);
  Mlp model;
  auto precision = bf16_precision();
  precision.output_dtype = at::kFloat;
  auto sharded = fully_shard(model, options(precision));
  EXPECT_EQ(model->forward(input()).scalar_type(), at::kBFloat16);
  EXPECT_EQ(sharded.forward(input()).scalar_type(), at::kFloat);
}

TEST(Precision, ParametersHaveTheParamTypeAndMastersTheirOwn) {
  Mlp model;
  auto sharded = fully_shard(model, options(bf16_precision()));
  EXPECT_EQ(model->layer(0)->weight.scalar_type(), at::kBFloat16);
  EXPECT_EQ(sharded.full_tensor("layers.0.weight").scalar_type(), at::kFloat);
  for (const auto& shard : sharded.parameters()) EXPECT_EQ(shard.scalar_type(), at::kFloat);
}

TEST(Precision, NormsAndChosenParametersStayInFloat32) {
  torch::manual_seed(7);
  Transformer model, plain;
  auto precision = bf16_precision();
  precision.norms_in_fp32 = true;
  precision.keep_fp32 = [](const std::string& name, const at::Tensor&) {
    return name == "position";
  };
  torch::manual_seed(7);
  model = Transformer();
  torch::manual_seed(7);
  plain = Transformer();
  plain->to(test_device());
  auto shard_options = options(precision);
  shard_options.wrap = wrap::modules<Block>();
  auto sharded = fully_shard(model, shard_options);
  EXPECT_EQ(model->norm->weight.scalar_type(), at::kFloat);
  EXPECT_EQ(model->block(0)->attention_norm->bias.scalar_type(), at::kFloat);
  EXPECT_EQ(model->position.scalar_type(), at::kFloat);
  EXPECT_EQ(model->block(0)->up->weight.scalar_type(), at::kBFloat16);
  auto batch = moved(model_case("transformer").batch(0, 0), test_device());  // every rank the same
  auto loss = model->loss(batch.x, batch.y), expected = plain->loss(batch.x, batch.y);
  loss.backward();
  expected.backward();
  EXPECT_LE(relative(loss, expected), 4 * kBf16Epsilon);
  EXPECT_LE(relative(sharded.full_grad("blocks.1.up.weight"), plain->block(1)->up->weight.grad()),
            16 * kBf16Epsilon);
}

TEST(Precision, UnitsMayHavePoliciesOfTheirOwn) {
  torch::manual_seed(7);
  Mlp model;
  ShardOptions shard_options{.wrap = [](const ModuleView& view) -> std::optional<UnitOptions> {
                               if (view.type != "Linear") return std::nullopt;
                               if (view.path == "layers.3")
                                 return UnitOptions{.mixed_precision = MixedPrecision{}};
                               return UnitOptions{};
                             },
                             .mixed_precision = bf16_precision(),
                             .device = test_device()};
  auto sharded = fully_shard(model, shard_options);
  EXPECT_EQ(model->layer(2)->weight.scalar_type(), at::kBFloat16);
  EXPECT_EQ(model->layer(3)->weight.scalar_type(), at::kFloat);
  // A unit without a policy casts nothing: its input must have its parameters' dtype.
  auto h = model->layer(2)->forward(input());
  EXPECT_EQ(h.scalar_type(), at::kBFloat16);
  EXPECT_EQ(model->layer(3)->forward(h.to(at::kFloat)).scalar_type(), at::kFloat);
  EXPECT_EQ(model->layer(4)->forward(h.to(at::kFloat)).scalar_type(), at::kBFloat16);
}

TEST(Precision, InputsAreLeftAloneWhenThatIsAsked) {
  Mlp model;
  auto precision = bf16_precision();
  precision.cast_forward_inputs = false;
  auto sharded = fully_shard(model, options(precision));
  EXPECT_THROW(model->forward(input()), std::exception);
  EXPECT_EQ(model->forward(input().to(at::kBFloat16)).scalar_type(), at::kBFloat16);
}

struct WithBufferImpl : nn::Module {
  nn::Linear linear = register_module("linear", nn::Linear(16, 16));
  at::Tensor scale = register_buffer("scale", at::ones({16}));
  at::Tensor count = register_buffer("count", at::zeros({1}, at::kLong));
  at::Tensor forward(at::Tensor x) { return linear(x) * scale; }
};
TORCH_MODULE(WithBuffer);

TEST(Precision, BuffersAreCastWhenThatIsAsked) {
  WithBuffer cast, left;
  auto precision = bf16_precision();
  auto left_sharded = fully_shard(left, options(precision));
  precision.buffer_dtype = at::kBFloat16;
  auto cast_sharded = fully_shard(cast, options(precision));
  EXPECT_EQ(left->scale.scalar_type(), at::kFloat);
  EXPECT_EQ(cast->scale.scalar_type(), at::kBFloat16);
  EXPECT_EQ(cast->count.scalar_type(), at::kLong);
  EXPECT_EQ(cast->forward(input()).scalar_type(), at::kBFloat16);
}

TEST(Precision, AModelBuiltInBf16KeepsBf16MastersUnlessToldOtherwise) {
  Mlp low, high;
  low->to(at::kBFloat16);
  high->to(at::kBFloat16);
  auto low_sharded = fully_shard(low, options({}));
  auto high_sharded = fully_shard(high, options({.master_dtype = at::kFloat}));
  EXPECT_EQ(low_sharded.full_tensor("layers.0.weight").scalar_type(), at::kBFloat16);
  EXPECT_EQ(high_sharded.full_tensor("layers.0.weight").scalar_type(), at::kFloat);
  EXPECT_EQ(high->layer(0)->weight.scalar_type(), at::kBFloat16);
}

TEST(Precision, SmallUpdatesAreNotLostInAFloat32Master) {
  Mlp model;
  auto sharded = fully_shard(model, options(bf16_precision()));
  auto before = sharded.full_tensor("layers.7.bias").clone();
  SGD optimizer(sharded, {.lr = 1e-6});
  double step = 0;
  for (int i = 0; i < 20; ++i) {
    model->forward(input()).sum().backward();  // the bias' gradient is 4 everywhere
    optimizer.step();
    optimizer.zero_grad();
    step += 4e-6;
  }
  auto moved = before - sharded.full_tensor("layers.7.bias");
  EXPECT_LE((moved - step).abs().max().item<double>(), 0.02 * step);
}

TEST(Precision, GradientsThatAreKeptUnshardedAreSummedInTheReduceType) {
  constexpr int kTimes = 65;
  SideBySide both(model_case("mlp"), {.mixed_precision = bf16_precision()});
  both.run(both.work(0));
  auto once = both.sharded().full_grad("layers.5.weight").clone();
  both.zero_grad();
  {
    auto guard = both.sharded().no_sync();
    for (int i = 1; i < kTimes; ++i) both.run_mine(both.work(0));
  }
  both.run_mine(both.work(0));
  EXPECT_LE(relative(both.sharded().full_grad("layers.5.weight"), kTimes * once), 1e-5);
}

TEST(Precision, Float16WithAScalerSkipsAStepThatOverflowedOnAnyRank) {
  torch::manual_seed(7);
  Mlp model;
  MixedPrecision precision{.param_dtype = at::kHalf, .reduce_dtype = at::kFloat};
  auto sharded = fully_shard(model, options(precision));
  AdamW optimizer(sharded, {.lr = 1e-3});
  GradScaler scaler({.init_scale = 128});
  auto step = [&](double factor) {
    auto x = input();
    scaler.scale(model->forward(x).to(at::kFloat).square().mean() * factor).backward();
    bool stepped = scaler.step(optimizer);
    scaler.update();
    optimizer.zero_grad();
    return stepped;
  };
  auto before = sharded.full_tensor("layers.0.weight").clone();
  EXPECT_FALSE(step(rank() == 0 ? INFINITY : 1.0));
  EXPECT_TRUE(at::equal(sharded.full_tensor("layers.0.weight"), before));
  EXPECT_EQ(scaler.scale(), 64);
  EXPECT_TRUE(step(1.0));
  EXPECT_FALSE(at::equal(sharded.full_tensor("layers.0.weight"), before));
}

// --- storage of masters and gradients ---

TEST(Precision, ASplitMasterKeepsEveryBitInFourBytes) {
  torch::manual_seed(7);
  Mlp model, plain;
  torch::manual_seed(7);
  model = Mlp();
  torch::manual_seed(7);
  plain = Mlp();
  auto sharded = fully_shard(model, options(bf16_precision()));
  for (const auto& item : plain->named_parameters())
    EXPECT_TRUE(at::equal(sharded.full_tensor(item.key()), item.value().to(test_device())));
  auto memory = sharded.memory();
  EXPECT_EQ(memory.parameters, memory.gathered_from);  // 16 bits each
  for (const auto& [name, value] : sharded.full_state_dict(false, true))
    EXPECT_TRUE(at::equal(value, plain->named_parameters()[name].cpu())) << name;
}

// Differs from rounding to even only in exact ties, which a step may or may not produce.
TEST(Precision, ASplitMasterTrainsAsAWholeOne) {
  auto train = [&](bool split) {
    torch::manual_seed(7);
    Mlp model;
    auto precision = bf16_precision();
    precision.split_master = split;
    auto sharded = fully_shard(model, options(precision));
    AdamW optimizer(sharded, {.lr = 1e-2});
    for (int step = 0; step < 5; ++step) {
      sharded.forward(input()).square().mean().backward();
      sharded.clip_grad_norm_(1.0);
      optimizer.step();
      optimizer.zero_grad();
    }
    return sharded.full_tensor("layers.3.weight");
  };
  EXPECT_LE(relative(train(true), train(false)), 1e-3);
}

TEST(Precision, ASplitMasterIsLoadedWrittenAndHandedOut) {
  torch::manual_seed(7);
  Mlp model, other;
  auto sharded = fully_shard(model, options(bf16_precision()));
  StateDict state;
  for (const auto& item : other->named_parameters())
    state.emplace(item.key(), item.value().detach().to(test_device()));
  sharded.load_full_state_dict(state);
  EXPECT_TRUE(at::equal(sharded.full_tensor("layers.2.bias").cpu(), other->layer(2)->bias));
  {
    auto full = sharded.summon_full_params();
    at::NoGradGuard no_grad;
    model->layer(2)->bias.fill_(3.0);
  }
  EXPECT_TRUE(at::equal(sharded.full_tensor("layers.2.bias").cpu(), at::full({16}, 3.0)));
  // Parameters that were only read keep their bits.
  EXPECT_TRUE(at::equal(sharded.full_tensor("layers.2.weight").cpu(), other->layer(2)->weight));
  torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.5));
  sharded.forward(input()).sum().backward();
  at::Tensor before = sharded.full_tensor("layers.1.weight"),
             gradient = sharded.full_grad("layers.1.weight");
  optimizer.step();
  EXPECT_LE(relative(sharded.full_tensor("layers.1.weight"), before - 0.5 * gradient), 1e-6);
}

TEST(Precision, GradientsMayBeKeptInBf16) {
  torch::manual_seed(7);
  Mlp model, plain;
  torch::manual_seed(7);
  model = Mlp();
  torch::manual_seed(7);
  plain = Mlp();
  auto precision = bf16_precision();
  auto reference = fully_shard(plain, options(precision));
  precision.grad_dtype = at::kBFloat16;
  auto sharded = fully_shard(model, options(precision));
  for (int micro = 0; micro < 2; ++micro) {
    model->forward(input()).square().mean().backward();
    plain->forward(input()).square().mean().backward();
  }
  at::Tensor gradient = sharded.full_grad("layers.4.weight");
  EXPECT_EQ(gradient.scalar_type(), at::kBFloat16);
  EXPECT_LE(relative(gradient, reference.full_grad("layers.4.weight")), 2 * kBf16Epsilon);
  EXPECT_EQ(2 * sharded.memory().gradients, reference.memory().gradients);
  AdamW optimizer(sharded, {}), other(reference, {});
  EXPECT_LE(relative(sharded.clip_grad_norm_(1.0), reference.clip_grad_norm_(1.0)), kBf16Epsilon);
  optimizer.step();
  other.step();
  EXPECT_LE(
      relative(sharded.full_tensor("layers.4.weight"), reference.full_tensor("layers.4.weight")),
      1e-3);
}

TEST(Precision, ActivationsAreCountedOnceEach) {
  Mlp model;
  auto sharded = fully_shard(model, {.wrap = wrap::modules<nn::Linear>(), .device = test_device()});
  sharded.count_activations(true);
  EXPECT_EQ(sharded.memory().activations, 0);
  // Of 8 linears with ReLU between them: the input of each, 4 x 16 float32; the last output is
  // squared.
  auto loss = model->forward(input().clone()).square().sum();
  int64_t kept = sharded.memory().activations;
  EXPECT_GE(kept, 8 * 4 * 16 * 4);
  EXPECT_LE(kept, 17 * 4 * 16 * 4);
  loss.backward();
  EXPECT_EQ(sharded.memory().activations, kept);  // the peak
  sharded.count_activations(false);
}

}  // namespace
}  // namespace fsdp::testing
