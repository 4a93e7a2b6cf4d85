// Parameters and gradients that travel in fewer bits: which values every rank computes with, which
// gradients it gets, how many bytes that takes, and that no option of sharding changes a bit.
#include <ATen/ATen.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>

#include "fsdp/optim.h"
#include "fsdp/recompute.h"
#include "kernels/wire.h"
#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kWireDim = 48;  // rows that aren't whole blocks
const Wire kWires[] = {Wire::FP8, Wire::INT8};

struct WireModel {
  explicit WireModel(const ShardOptions& options) : model(seeded()) {
    sharded = fully_shard(model, options);
  }
  static Transformer seeded() {
    torch::manual_seed(kSeed);
    return Transformer(kWireDim, 2, 3);
  }

  at::Tensor loss(int step) const {
    const Batch batch = moved(model_case("transformer").batch(step, rank()), test_device());
    return Transformer(model)->loss(batch.x, batch.y);
  }

  Transformer model;
  Sharded sharded;
};

ShardOptions wire_options(Wire gather, Wire reduce = Wire::PLAIN,
                          std::optional<at::ScalarType> type = {}) {
  MixedPrecision precision{.param_dtype = type, .gather = gather, .reduce = reduce};
  if (type) precision.reduce_dtype = at::kFloat;
  precision.split_master = false;  // its bfloat16 half isn't quite the rounded master
  return {.wrap = wrap::modules<Block>(), .mixed_precision = precision, .device = test_device()};
}

// What every rank shall compute with: matrices in whole blocks from their first element on.
at::Tensor as_received(const at::Tensor& exact, Wire wire) {
  if (exact.dim() < 2 || wire == Wire::PLAIN) return exact;
  const int64_t numel = (exact.numel() + 255) / 256 * 256;
  at::Tensor padded = at::zeros({numel}, exact.options()), back = at::empty_like(padded);
  padded.narrow(0, 0, exact.numel()).copy_(exact.reshape({-1}));
  at::Tensor bytes =
      at::empty({kernels::wire_bytes(numel, wire)}, exact.options().dtype(at::kByte));
  kernels::encode_wire(padded, bytes, 1, wire);
  kernels::decode_wire(bytes, back, 1, wire);
  return back.narrow(0, 0, exact.numel()).view(exact.sizes());
}

void expect_received(const WireModel& subject, Wire wire, std::optional<at::ScalarType> type) {
  subject.sharded.unshard();
  for (const auto& item : subject.model->named_parameters()) {
    if (item.key() == "head.weight") continue;  // the embedding's
    at::Tensor exact = subject.sharded.full_tensor(item.key()).detach();
    if (type) exact = exact.to(*type);
    EXPECT_TRUE(at::equal(item.value().detach(), as_received(exact, wire))) << item.key();
  }
  subject.sharded.reshard();
}

void wire_step(const WireModel& subject, Optimizer& optimizer, int step) {
  subject.loss(step).backward();
  subject.sharded.clip_grad_norm_(1.0);
  optimizer.step();
  subject.sharded.zero_grad();
}

// Losses and masters after three steps.
std::vector<at::Tensor> wire_training(const ShardOptions& options, bool recompute = false) {
  WireModel subject(options);
  if (recompute)
    apply_activation_checkpointing(subject.sharded, RecomputePolicy(wrap::modules<Block>(), {}));
  AdamW optimizer(subject.sharded, {.lr = 1e-2, .eps = 1e-3});
  std::vector<at::Tensor> values;
  for (int step = 0; step < 3; ++step) {
    values.push_back(subject.loss(step).detach());
    wire_step(subject, optimizer, step);
  }
  for (const auto& item : subject.model->named_parameters())
    values.push_back(subject.sharded.full_tensor(item.key()).clone());
  return values;
}

void expect_equal_bits(const std::vector<at::Tensor>& values,
                       const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i)
    EXPECT_TRUE(at::equal(values[i], expected[i])) << "value " << i;
}

// --- gathers ---

TEST(Wires, EveryRankComputesWithTheRoundedWhole) {
  for (Wire wire : kWires)
    for (std::optional<at::ScalarType> type : {std::optional<at::ScalarType>(), {at::kBFloat16}}) {
      SCOPED_TRACE(name(wire));
      WireModel subject(wire_options(wire, Wire::PLAIN, type));
      expect_received(subject, wire, type);
      AdamW optimizer(subject.sharded, {.lr = 1e-2});
      for (int step = 0; step < 2; ++step) wire_step(subject, optimizer, step);
      expect_received(subject, wire, type);
    }
}

TEST(Wires, CutsDontChangeWhatIsReceived) {
  for (Cut cut : {Cut::ROW, Cut::ELEMENT, Cut::TENSOR}) {
    SCOPED_TRACE(static_cast<int>(cut));
    auto options = wire_options(Wire::INT8, Wire::PLAIN, at::kBFloat16);
    options.cut = cut;
    expect_received(WireModel(options), Wire::INT8, at::kBFloat16);
  }
}

TEST(Wires, NoOptionChangesABitOfTheTraining) {
  for (Wire wire : kWires) {
    SCOPED_TRACE(name(wire));
    const auto plain = wire_options(wire, wire, at::kBFloat16);
    const auto expected = wire_training(plain);
    const auto expect_same = [&](const auto& change) {
      auto options = plain;
      change(options);
      expect_equal_bits(wire_training(options), expected);
    };
    expect_same([](ShardOptions&) {});
    expect_same([](ShardOptions& o) { o.strategy = ShardingStrategy::SHARD_GRAD_OP; });
    expect_same([](ShardOptions& o) { o.forward_prefetch = o.backward_prefetch = 0; });
    expect_same([](ShardOptions& o) { o.forward_prefetch = o.backward_prefetch = 3; });
    expect_same([](ShardOptions& o) { o.limit_all_gathers = false; });
    expect_same([](ShardOptions& o) { o.share_host_memory = false; });
    expect_same([](ShardOptions& o) { o.reshard_after_forward = true; });
    if (world_size() % 2 == 0) expect_same([](ShardOptions& o) { o.reshard_after_forward = 2; });
    expect_equal_bits(wire_training(plain, /*recompute=*/true), expected);
  }
}

// Any optimizer may write to the masters of what neighbours keep.
TEST(Wires, WhatNeighboursKeepFollowsTheMasters) {
  if (world_size() % 2 || world_size() < 4) GTEST_SKIP() << "needs two groups of neighbours";
  for (Wire wire : {Wire::PLAIN, Wire::FP8}) {
    SCOPED_TRACE(name(wire));
    auto options = wire_options(wire);
    options.share_host_memory = false;
    options.reshard_after_forward = 2;
    options.forward_prefetch = options.backward_prefetch = 0;
    WireModel subject(options);
    torch::optim::SGD optimizer(subject.sharded.parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 2; ++step) {
      subject.loss(step).backward();
      optimizer.step();
      subject.sharded.zero_grad();
    }
    expect_received(subject, wire, {});
  }
}

TEST(Wires, OffloadChangesNoBitOfTheTraining) {
  auto options = wire_options(Wire::FP8, Wire::INT8, at::kBFloat16);
  const auto expected = wire_training(options);
  options.offload.parameters = options.offload.gradients = true;
  expect_equal_bits(wire_training(options), expected);
}

TEST(Wires, CopiesOfTheModelStayEqual) {
  if (world_size() % 2) GTEST_SKIP() << "replicate = 2 needs an even number of ranks";
  auto options = wire_options(Wire::FP8, Wire::INT8);
  options.strategy = ShardingStrategy::HYBRID_SHARD;
  options.mesh = hybrid_mesh();
  WireModel subject(options);
  AdamW optimizer(subject.sharded, {.lr = 1e-2});
  for (int step = 0; step < 2; ++step) wire_step(subject, optimizer, step);
  expect_received(subject, Wire::FP8, {});
  for (const auto& item : subject.model->named_parameters()) {
    at::Tensor mine = subject.sharded.full_tensor(item.key()).clone(), first = mine.clone();
    test_world().comm().broadcast(first, 0);
    EXPECT_TRUE(at::equal(mine, first)) << item.key();
  }
}

TEST(Wires, StateIsExact) {
  WireModel subject(wire_options(Wire::FP8));
  const Transformer plain = WireModel::seeded();
  for (const auto& item : plain->named_parameters())
    EXPECT_TRUE(at::equal(subject.sharded.full_tensor(item.key()).cpu(), item.value()));
  const auto summoned = subject.sharded.summon_full_params();
  for (const auto& item : plain->named_parameters())
    EXPECT_TRUE(at::equal(summoned.values().at(item.key()).cpu(), item.value()));
}

TEST(Wires, WritesToSummonedParametersAreKept) {
  WireModel subject(wire_options(Wire::INT8));
  const at::Tensor before = subject.sharded.full_tensor("norm.weight").clone();
  {
    const auto summoned = subject.sharded.summon_full_params();
    at::NoGradGuard no_grad;
    subject.model->block(1)->up->weight.add_(1);
  }
  const Transformer plain = WireModel::seeded();
  EXPECT_TRUE(at::equal(subject.sharded.full_tensor("blocks.1.up.weight").cpu(),
                        plain->block(1)->up->weight + 1));
  EXPECT_TRUE(at::equal(subject.sharded.full_tensor("norm.weight"), before));
  expect_received(subject, Wire::INT8, {});
}

TEST(Wires, SummoningLeavesWhatNeighboursKeepAlone) {
  if (world_size() % 2 || world_size() < 4) GTEST_SKIP() << "needs two groups of neighbours";
  for (Wire wire : {Wire::PLAIN, Wire::FP8}) {
    auto options = wire_options(wire);
    options.share_host_memory = false;
    options.reshard_after_forward = 2;
    options.forward_prefetch = options.backward_prefetch = 0;
    WireModel subject(options);
    subject.loss(0).backward();
    {
      const auto summoned = subject.sharded.summon_full_params({.writeback = false});
      at::NoGradGuard no_grad;
      subject.model->block(0)->up->weight.add_(1);
    }
    expect_received(subject, wire, {});
  }
}

TEST(Wires, FrozenParametersAreGatheredInBytesToo) {
  WireModel frozen(wire_options(Wire::FP8));
  for (auto& parameter : frozen.model->block(0)->parameters()) parameter.set_requires_grad(false);
  frozen.loss(0).backward();
  expect_received(frozen, Wire::FP8, {});
}

// --- reductions ---

// Each rank's gradients in double, from a plain copy.
std::vector<std::vector<at::Tensor>> gradients_of_ranks() {
  std::vector<std::vector<at::Tensor>> all;
  for (int r = 0; r < world_size(); ++r) {
    Transformer plain = WireModel::seeded();
    plain->to(test_device());
    const Batch batch = moved(model_case("transformer").batch(0, r), test_device());
    plain->loss(batch.x, batch.y).backward();
    auto& mine = all.emplace_back();
    for (const auto& parameter : plain->parameters())
      mine.push_back(parameter.grad().to(at::kDouble));
  }
  return all;
}

// How far the average may be off, if a block's largest magnitude is at most `largest`.
at::Tensor allowed(const at::Tensor& gradient, double largest, Wire wire) {
  if (wire == Wire::INT8) return at::full_like(gradient, largest / 254);
  if (wire == Wire::BF16) return gradient.abs() / 256;
  return at::maximum(gradient.abs() / 16, at::full_like(gradient, largest / 131072));
}

TEST(Wires, ReducedGradientsAreWithinTheirBounds) {
  const auto ranks = gradients_of_ranks();
  for (Wire wire : {Wire::BF16, Wire::FP8, Wire::INT8}) {
    SCOPED_TRACE(name(wire));
    WireModel subject(wire_options(Wire::PLAIN, wire));
    subject.loss(0).backward();
    const auto parameters = subject.model->named_parameters();
    bool rounded = false;
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor mean = at::zeros_like(ranks[0][i]), bound = at::zeros_like(mean);
      const bool travels = mean.dim() >= 2 || wire == Wire::BF16;
      for (const auto& gradients : ranks) {
        double largest = 0;
        for (const auto& gradient : gradients)
          largest = std::max(largest, gradient.abs().max().item<double>());
        mean += gradients[i] / static_cast<double>(ranks.size());
        bound += 1e-6 * largest;
        if (travels && world_size() > 1)
          bound += allowed(gradients[i], largest, wire) / static_cast<double>(ranks.size());
      }
      const at::Tensor off =
          (subject.sharded.full_grad(parameters[i].key()).to(at::kDouble) - mean).abs();
      EXPECT_TRUE((off <= bound).all().item<bool>())
          << parameters[i].key() << ": " << (off - bound).max().item<double>();
      rounded |= (off > 1e-5 * mean.abs().max()).any().item<bool>();
    }
    EXPECT_EQ(rounded, world_size() > 1);
  }
}

TEST(Wires, ReductionsHaveTheSameBitsEachTime) {
  const auto options = wire_options(Wire::PLAIN, Wire::INT8);
  expect_equal_bits(wire_training(options), wire_training(options));
}

TEST(Wires, AccumulatedGradientsAreRoundedOnce) {
  for (Wire wire : {Wire::BF16, Wire::INT8}) {
    WireModel exact(wire_options(Wire::PLAIN)), subject(wire_options(Wire::PLAIN, wire));
    for (const WireModel* each : {&exact, &subject}) {
      for (int i = 0; i < 3; ++i) {
        const auto guard = each->sharded.no_sync();
        each->loss(i).backward();
      }
      each->loss(3).backward();
    }
    const char* parameter = "blocks.1.up.weight";
    const at::Tensor expected = exact.sharded.full_grad(parameter).to(at::kDouble);
    const at::Tensor off = (subject.sharded.full_grad(parameter).to(at::kDouble) - expected).abs();
    // Of each rank's sum, not of each micro-batch's.
    EXPECT_LE(off.max().item<double>(), 4 * expected.abs().max().item<double>() / 254);
    subject.loss(4).backward();  // is added to the reduced gradient
    exact.loss(4).backward();
    EXPECT_LE((subject.sharded.full_grad(parameter) - exact.sharded.full_grad(parameter))
                  .abs()
                  .max()
                  .item<double>(),
              8 * expected.abs().max().item<double>() / 254);
  }
}

TEST(Wires, AStepWithAGradientThatIsNotFiniteIsSkipped) {
  for (Wire wire : {Wire::BF16, Wire::FP8, Wire::INT8}) {
    WireModel subject(wire_options(wire == Wire::BF16 ? Wire::PLAIN : wire, wire));
    AdamW optimizer(subject.sharded, {.lr = 1e-2});
    const at::Tensor before = subject.sharded.full_tensor("blocks.2.down.weight").clone();
    const double factor = rank() == 0 ? std::numeric_limits<double>::infinity() : 1;
    (subject.loss(0) * factor).backward();
    EXPECT_FALSE(std::isfinite(subject.sharded.clip_grad_norm_(1.0).item<double>()));
    optimizer.step();
    EXPECT_TRUE(at::equal(subject.sharded.full_tensor("blocks.2.down.weight"), before));
    subject.sharded.zero_grad();
    wire_step(subject, optimizer, 1);
    EXPECT_FALSE(at::equal(subject.sharded.full_tensor("blocks.2.down.weight"), before));
  }
}

TEST(Wires, UnitsThatOnlySomeRanksUse) {
  auto options = wire_options(Wire::FP8, Wire::INT8);
  options.wrap = [](const ModuleView& module) -> WrapPolicy::Decision {
    if (module.path == "layers.1") return UnitOptions{.uneven_use = true};
    if (module.path == "layers.2" || module.path == "layers.3") return UnitOptions{};
    return {};  // layers.0 stays in the root
  };
  torch::manual_seed(kSeed);
  Mlp model(kWireDim, 4);
  auto sharded = fully_shard(model, options);
  at::Tensor x = random_normal(0, rank(), 0, {4, kWireDim}).to(test_device());
  for (size_t i = 0; i < 4; ++i)
    if (i != 1 || rank() == 0) x = model->layer(i)->forward(x).tanh();
  x.square().mean().backward();
  const at::Tensor only = sharded.full_grad("layers.1.weight"),
                   all = sharded.full_grad("layers.2.weight");
  EXPECT_GT(only.abs().max().item<double>(), 0);
  EXPECT_TRUE(only.isfinite().all().item<bool>() && all.isfinite().all().item<bool>());
}

// --- bytes ---

constexpr int64_t kWide = 768;  // whole blocks on up to four ranks

Traffic traffic_of(Wire gather, Wire reduce, int keep_parts = 0) {
  torch::manual_seed(kSeed);
  Mlp model(kWide, 3);
  ShardOptions options = wire_options(gather, reduce, at::kBFloat16);
  options.mixed_precision.reduce_dtype = at::kBFloat16;
  options.wrap = wrap::modules<nn::Linear>();
  options.share_host_memory = false;
  options.forward_prefetch = options.backward_prefetch = 0;
  if (keep_parts > 0) options.reshard_after_forward = keep_parts;
  auto sharded = fully_shard(model, options);
  const auto step = [&] {
    model->forward(at::ones({2, kWide}, test_device())).square().mean().backward();
    sharded.zero_grad();
  };
  step();
  sharded.reset_traffic();
  step();
  return sharded.traffic();
}

TEST(Wires, HalveTheBytes) {
  const Traffic bf16 = traffic_of(Wire::PLAIN, Wire::PLAIN);
  for (Wire wire : kWires) {
    const Traffic bytes = traffic_of(wire, wire);
    EXPECT_LE(bytes.all_gather, 0.51 * static_cast<double>(bf16.all_gather));
    EXPECT_LE(bytes.reduce_scatter, 0.52 * static_cast<double>(bf16.reduce_scatter));
    EXPECT_EQ(bytes.all_gather > 0, world_size() > 1);
  }
  EXPECT_EQ(traffic_of(Wire::PLAIN, Wire::BF16).reduce_scatter, bf16.reduce_scatter);
}

TEST(Wires, WhatNeighboursKeepIsInBytesToo) {
  if (world_size() % 2 || world_size() < 4) GTEST_SKIP() << "needs two groups of neighbours";
  const auto kept = [](Wire wire) {
    auto options = wire_options(wire, Wire::PLAIN, at::kBFloat16);
    options.share_host_memory = false;
    options.reshard_after_forward = 2;
    options.forward_prefetch = options.backward_prefetch = 0;
    WireModel subject(options);
    subject.loss(0).backward();
    return static_cast<double>(subject.sharded.memory().secondary);
  };
  // Vectors stay as they are. Bytes are kept as they arrive, also of the last of the three blocks,
  // which is still gathered when backward begins.
  EXPECT_LE(kept(Wire::FP8), 0.56 * 3 / 2 * kept(Wire::PLAIN));
  EXPECT_LE(traffic_of(Wire::INT8, Wire::PLAIN, 2).all_gather,
            0.51 * static_cast<double>(traffic_of(Wire::PLAIN, Wire::PLAIN, 2).all_gather));
}

// --- what makes no sense ---

TEST(Wires, AreRefusedWhereNothingTravelsThatWay) {
  for (Wire wire : kWires)
    for (bool gather : {true, false}) {
      auto options = gather ? wire_options(wire) : wire_options(Wire::PLAIN, wire);
      options.strategy = ShardingStrategy::NO_SHARD;
      expect_error([&] { WireModel subject(options); },
                   {"NO_SHARD", gather ? "gather" : "reduce", name(wire), "another strategy"});
    }
  expect_error([] { WireModel subject(wire_options(Wire::BF16)); }, {"BF16", "param_dtype"});
}

TEST(Wires, AreRefusedForFloat64) {
  for (bool gather : {true, false}) {
    auto options = gather ? wire_options(Wire::INT8) : wire_options(Wire::PLAIN, Wire::INT8);
    expect_error(
        [&] {
          auto model = WireModel::seeded();
          model->to(at::kDouble);
          fully_shard(model, options);
        },
        {"Double", "blocks.0", gather ? "gather" : "reduce"}, {"Wire::PLAIN"});
  }
}

TEST(Wires, LeaveParametersAloneThatAreKeptInFloat32) {
  auto options = wire_options(Wire::FP8, Wire::FP8, at::kBFloat16);
  options.mixed_precision.keep_fp32 = [](const std::string& name, const at::Tensor&) {
    return name == "blocks.1.up.weight";
  };
  WireModel subject(options);
  subject.sharded.unshard();
  EXPECT_TRUE(at::equal(subject.model->block(1)->up->weight.cpu(),
                        WireModel::seeded()->block(1)->up->weight));
}

}  // namespace
}  // namespace fsdp::testing
