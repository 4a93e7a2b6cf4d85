// init_parameters: every parameter starts with the same bits however the model is sharded, and on
// any number of ranks.
#include "fsdp/init_parameters.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/utils.h>

#include <filesystem>

#include "fsdp/deferred_init.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "shard/models.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

constexpr uint64_t kInitSeed = 17;

Distribution start_of(const std::string& name, at::IntArrayRef sizes) {
  if (sizes.size() > 1)
    return name.find("up") != std::string::npos ? Distribution::uniform(-0.5, 1)
                                                : Distribution::normal(0.25, 0.5);
  return Distribution::constant(name.ends_with("bias") ? 0.125 : 1);
}

Transformer unfilled() {
  return deferred_init([] { return Transformer(); }, {.random = false});
}

NamedTensors values_of(const nn::Module& module, const Sharded& sharded) {
  NamedTensors values;
  for (const auto& item : module.named_parameters())
    values.emplace_back(item.key(), sharded.full_tensor(item.key()).cpu());
  return values;
}

NamedTensors started(ShardOptions options, const Transformer& net = unfilled()) {
  options.device = test_device();
  options.initialize = false;
  Sharded sharded = fully_shard(net, options);
  init_parameters(sharded, kInitSeed, start_of);
  return values_of(*net, sharded);
}

void expect_equal(const NamedTensors& actual, const NamedTensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(at::equal(actual[i].second, expected[i].second)) << expected[i].first;
}

// Of the bits of all values.
int64_t sum_of(const NamedTensors& values) {
  int64_t sum = 0;
  for (const auto& [name, value] : values)
    sum += value.contiguous().view({-1}).view(at::kInt).sum(at::kLong).item<int64_t>();
  return sum;
}

// One number for all ranks, devices and machines: what a seed means must not change.
TEST(InitParameters, GiveTheSameBitsOnAnyNumberOfRanks) {
  EXPECT_EQ(sum_of(started({.wrap = wrap::modules<Block>()})), 4'540'781'942'016);
}

TEST(InitParameters, AreWhatTheRuleSays) {
  for (const auto& [name, value] : started({.wrap = wrap::modules<Block>()})) {
    const Distribution start = start_of(name, value.sizes());
    if (start.kind == Distribution::Kind::kConstant) {
      EXPECT_TRUE(value.eq(start.a).all().item<bool>()) << name;
      continue;
    }
    const bool normal = start.kind == Distribution::Kind::kNormal;
    const double mean = normal ? start.a : (start.a + start.b) / 2;
    const double std = normal ? start.b : (start.b - start.a) / std::sqrt(12.0);
    const auto count = static_cast<double>(value.numel());
    EXPECT_NEAR((value.mean().item<double>() - mean) / std, 0, 5 / std::sqrt(count)) << name;
    EXPECT_NEAR(value.std().item<double>() / std, 1, 5 / std::sqrt(count)) << name;
  }
}

TEST(InitParameters, DontDependOnHowTheModelIsSharded) {
  const NamedTensors expected = started({});
  const auto blocks = wrap::modules<Block>();
  expect_equal(started({.wrap = wrap::always()}), expected);
  for (auto strategy :
       {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::NO_SHARD})
    expect_equal(started({.wrap = blocks, .strategy = strategy}), expected);
  for (Cut cut : {Cut::ROW, Cut::ELEMENT, Cut::TENSOR})
    expect_equal(started({.wrap = blocks, .cut = cut}), expected);
  if (world_size() % 2 == 0)
    expect_equal(
        started(
            {.wrap = blocks, .strategy = ShardingStrategy::HYBRID_SHARD, .mesh = hybrid_mesh()}),
        expected);
  expect_equal(started({.wrap = blocks, .share_host_memory = false}), expected);
  const std::string directory = std::filesystem::temp_directory_path().string();
  for (const Offload& offload : {Offload{.optimizer = true}, Offload{.parameters = true},
                                 Offload{.parameters = true, .optimizer = true},
                                 Offload{.optimizer = true, .directory = directory}})
    expect_equal(started({.wrap = blocks, .offload = offload}), expected);
  torch::manual_seed(kInitSeed);
  expect_equal(started({.wrap = blocks}, Transformer()), expected);  // overwrites what is there
}

TEST(InitParameters, FillTheMastersOfMixedPrecision) {
  const auto blocks = wrap::modules<Block>();
  const NamedTensors expected = started({.wrap = blocks});
  for (bool split : {false, true})
    for (auto type : {at::kBFloat16, at::kHalf}) {
      MixedPrecision precision{.param_dtype = type};
      precision.split_master = split;
      expect_equal(started({.wrap = blocks, .mixed_precision = precision}), expected);
    }
  Transformer net = unfilled();
  Sharded sharded =
      fully_shard(net, {.wrap = blocks,
                        .mixed_precision = {.param_dtype = at::kBFloat16, .split_master = false},
                        .device = test_device(),
                        .initialize = false});
  init_parameters(sharded, kInitSeed, start_of);
  auto full = sharded.summon_full_params({.writeback = false});
  for (const auto& [name, value] : expected)
    EXPECT_TRUE(at::equal(full.values().at(name).cpu(), value.to(at::kBFloat16))) << name;
}

TEST(InitParameters, DependOnTheSeedAndTheName) {
  Transformer net = unfilled();
  Sharded sharded = fully_shard(net, {.device = test_device(), .initialize = false});
  const auto normal = [](const std::string&, at::IntArrayRef) {
    return Distribution::normal(0, 1);
  };
  init_parameters(sharded, 1, normal);
  const NamedTensors one = values_of(*net, sharded);
  init_parameters(sharded, 2, normal);
  const NamedTensors two = values_of(*net, sharded);
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_FALSE(at::equal(one[i].second, two[i].second)) << one[i].first;
    for (size_t j = 0; j < i; ++j)
      if (one[i].second.sizes() == one[j].second.sizes() &&
          !net->named_parameters()[one[i].first].is_same(net->named_parameters()[one[j].first])) {
        EXPECT_FALSE(at::equal(one[i].second, one[j].second)) << one[i].first;
      }
  }
}

TEST(InitParameters, LeaveBuffersAlone) {
  auto build = [] {
    return nn::Sequential(nn::Conv2d(3, 8, 3), nn::BatchNorm2d(8), nn::Linear(7, 13));
  };
  nn::Sequential net = deferred_init(build);
  Sharded sharded = fully_shard(net, {.device = test_device(), .initialize = false});
  init_parameters(sharded, kInitSeed, start_of);
  for (const auto& buffer : net->named_buffers())
    EXPECT_TRUE(at::equal(buffer.value().cpu(), build()->named_buffers()[buffer.key()]));
}

TEST(InitParameters, LetTheModelTrain) {
  std::vector<double> losses;
  for (bool sharded_by_block : {false, true}) {
    const ModelCase& model = model_case("transformer");
    Transformer net = unfilled();
    Sharded sharded =
        fully_shard(net, {.wrap = sharded_by_block ? wrap::modules<Block>() : WrapPolicy(),
                          .device = test_device(),
                          .initialize = false});
    const auto batch = moved(model.batch(0, 0), test_device());
    EXPECT_THROW(net->loss(batch.x, batch.y), Error) << "it has no values yet";
    init_parameters(sharded, kInitSeed, start_of);
    AdamW optimizer(sharded, {.lr = 1e-2});
    for (int step = 0; step < 2; ++step) {
      at::Tensor loss = net->loss(batch.x, batch.y);
      losses.push_back(loss.item<double>());
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    init_parameters(sharded, kInitSeed, start_of);  // again, with states and after gathers
    EXPECT_EQ(net->loss(batch.x, batch.y).item<double>(), losses.end()[-2]);
  }
  EXPECT_NEAR(losses[0], losses[2], 1e-6);
  EXPECT_NEAR(losses[1], losses[3], 1e-6);
}

TEST(InitParameters, RefuseWhatARuleCantMean) {
  torch::manual_seed(3);
  nn::Linear net(4, 3);
  Sharded sharded = fully_shard(net, {.device = test_device()});
  const auto refuse = [&](const Distribution& start, const std::string& word) {
    expect_error(
        [&] {
          init_parameters(sharded, 1, [&](const std::string&, at::IntArrayRef) { return start; });
        },
        {"init_parameters", word});
  };
  refuse(Distribution::normal(0, -1), "\"weight\"");
  refuse(Distribution::uniform(1, 0), "\"weight\"");
  refuse(Distribution::constant(std::nan("")), "\"weight\"");
  expect_error([&] { init_parameters(sharded, 1, {}); }, {"no rule"});
}

}  // namespace
}  // namespace fsdp::testing
