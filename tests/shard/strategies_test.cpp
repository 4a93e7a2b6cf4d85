// How a model is cut, wrapped, gathered and resharded changes no bit of the results: three clipped
// steps of the transformer on the same batches, under every option.
#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include "fsdp/optim.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

constexpr int kSteps = 3;
constexpr double kMaxNorm = 1.0;  // below the gradients' norm, so clipping has an effect

// Adam divides by a gradient's magnitude. The gradients of the keys' biases are zero except for
// rounding, and must not become steps.
constexpr double kEpsilon = 1e-3;

// Every result of training: losses and norms of each step, then the parameters.
struct Trace {
  std::vector<at::Tensor> values;
  std::vector<std::string> names;

  void add(std::string name, const at::Tensor& value) {
    names.push_back(std::move(name));
    values.push_back(value.detach().to(at::kCPU).clone());
  }
};

using MakeSharded = std::function<Sharded(Transformer& model)>;

struct AnyOptimizer {  // only step() is needed
  std::function<void()> step;
};
using MakeOptimizer = std::function<AnyOptimizer(const Sharded& sharded)>;

AnyOptimizer torch_sgd(const Sharded& sharded) {
  auto optimizer = std::make_shared<torch::optim::SGD>(
      sharded.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  return {[optimizer] { optimizer->step(); }};
}

AnyOptimizer torch_adamw(const Sharded& sharded) {
  auto optimizer = std::make_shared<torch::optim::AdamW>(
      sharded.parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(kEpsilon));
  return {[optimizer] { optimizer->step(); }};
}

AnyOptimizer our_adamw(const Sharded& sharded) {
  auto optimizer = std::make_shared<AdamW>(
      sharded, AdamWOptions{.lr = 1e-2, .eps = kEpsilon, .weight_decay = 0.1});
  return {[optimizer] { optimizer->step(); }};
}

AnyOptimizer our_sgd(const Sharded& sharded) {
  auto optimizer =
      std::make_shared<SGD>(sharded, SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01});
  return {[optimizer] { optimizer->step(); }};
}

Trace train(const MakeSharded& shard, const MakeOptimizer& make_optimizer = torch_sgd) {
  const auto& model_batches = model_case("transformer");
  torch::manual_seed(7);
  Transformer model;
  Sharded sharded = shard(model);
  auto optimizer = make_optimizer(sharded);
  Trace trace;
  for (int i = 0; i < kSteps; ++i) {
    auto batch = moved(model_batches.batch(i, rank()), test_device());
    auto loss = model->loss(batch.x, batch.y);
    loss.backward();
    trace.add("loss of step " + std::to_string(i), loss);
    trace.add("norm of step " + std::to_string(i), sharded.clip_grad_norm_(kMaxNorm));
    optimizer.step();
    sharded.zero_grad();
  }
  const StateDict full = sharded.full_state_dict();
  for (const auto& item : model->named_parameters())
    trace.add(item.key(), full.at(item.key()).full());
  return trace;
}

Trace train(const ShardOptions& options, const MakeOptimizer& make_optimizer = torch_sgd) {
  return train([&](Transformer& model) { return fully_shard(model, options); }, make_optimizer);
}

ShardOptions by_block() {
  return {.wrap = wrap::modules<Block>(), .device = test_device()};
}

void expect_same_bits(const Trace& trace, const Trace& reference) {
  ASSERT_EQ(trace.names, reference.names);
  for (size_t i = 0; i < trace.values.size(); ++i) {
    const auto &value = trace.values[i], &expected = reference.values[i];
    EXPECT_TRUE(at::equal(value, expected))
        << trace.names[i] << " differs by "
        << (value.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  }
}

const Trace& reference() {
  static const Trace trace = train(by_block());
  return trace;
}

TEST(Strategies, ClippingDoesSomethingInTheReference) {
  for (size_t i = 0; i < reference().names.size(); ++i) {
    if (!reference().names[i].starts_with("norm of")) continue;
    EXPECT_GT(reference().values[i].item<double>(), kMaxNorm);
  }
}

TEST(Strategies, TheSameRunTwiceGivesTheSameBits) {
  expect_same_bits(train(by_block()), reference());
}

TEST(Strategies, ShardGradOpGivesTheBitsOfFullShard) {
  auto options = by_block();
  options.strategy = ShardingStrategy::SHARD_GRAD_OP;
  expect_same_bits(train(options), reference());
}

TEST(Strategies, NoShardGivesTheBitsOfFullShard) {
  auto options = by_block();
  options.strategy = ShardingStrategy::NO_SHARD;
  expect_same_bits(train(options), reference());
}

TEST(Strategies, HybridShardIsWithinOneMillionth) {
  if (world_size() % 2) GTEST_SKIP() << "replicate = 2 needs an even number of ranks";
  auto options = by_block();
  options.strategy = ShardingStrategy::HYBRID_SHARD;
  options.mesh = hybrid_mesh();
  auto trace = train(options);
  ASSERT_EQ(trace.names, reference().names);
  for (size_t i = 0; i < trace.values.size(); ++i) {
    auto expected = reference().values[i];
    EXPECT_LE((trace.values[i] - expected).norm().item<double>(),
              3e-6 * expected.norm().item<double>())
        << trace.names[i];
  }
}

TEST(Strategies, HybridShardWithoutAMeshShardsInsideANode) {
  auto options = by_block();
  options.strategy = ShardingStrategy::HYBRID_SHARD;  // one node here: FULL_SHARD in effect
  expect_same_bits(train(options), reference());
}

TEST(Strategies, PrefetchDepthChangesNoBit) {
  for (int depth : {0, 1, 3}) {
    SCOPED_TRACE(depth);
    auto options = by_block();
    options.share_host_memory = false;  // else nothing is gathered
    options.forward_prefetch = options.backward_prefetch = depth;
    expect_same_bits(train(options), reference());
  }
}

TEST(Strategies, SharedHostMemoryChangesNoBit) {
  for (bool share : {true, false}) {
    for (auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP}) {
      SCOPED_TRACE(std::string(name(strategy)) + (share ? " shared" : " private"));
      auto options = by_block();
      options.strategy = strategy;
      options.share_host_memory = share;
      expect_same_bits(train(options), reference());
    }
  }
}

TEST(Strategies, ReshardAfterForwardChangesNoBit) {
  std::vector<ReshardAfterForward> choices = {{}, true, false};
  if (world_size() % 2 == 0) choices.push_back(2);
  for (bool share : {true, false}) {
    for (const auto& choice : choices) {
      SCOPED_TRACE(choice.keep_parts ? std::to_string(*choice.keep_parts) : "none");
      auto options = by_block();
      options.reshard_after_forward = choice;
      options.share_host_memory = share;
      expect_same_bits(train(options), reference());
    }
  }
}

TEST(Strategies, TheCutChangesNoBit) {
  for (auto cut : {Cut::AUTO, Cut::ROW, Cut::ELEMENT, Cut::TENSOR}) {
    SCOPED_TRACE(static_cast<int>(cut));
    auto options = by_block();
    options.cut = cut;
    expect_same_bits(train(options), reference());
  }
}

TEST(Strategies, UnlimitedGathersChangeNoBit) {
  auto options = by_block();
  options.limit_all_gathers = false;
  options.share_host_memory = false;
  expect_same_bits(train(options), reference());
}

TEST(Strategies, TheWrapPolicyChangesNoBit) {
  std::vector<std::pair<const char*, WrapPolicy>> policies = {
      {"type names", wrap::types({"Block"})},
      {"names", wrap::names({"blocks.*"})},
      {"deep names", wrap::names({"**.up", "**.down"})},
      {"size", wrap::min_params(1000)},
      {"always", wrap::always()},
      {"none", WrapPolicy()},
      {"bool lambda", [](const ModuleView& view) { return view.path == "blocks.1"; }},
      {"options lambda",
       [](const ModuleView& view) -> std::optional<UnitOptions> {
         if (view.type != "Block") return std::nullopt;
         return UnitOptions{.reshard_after_forward = ReshardAfterForward(view.path == "blocks.0")};
       }},
  };
  for (const auto& [what, policy] : policies) {
    SCOPED_TRACE(what);
    auto options = by_block();
    options.wrap = policy;
    expect_same_bits(train(options), reference());
  }
}

TEST(Strategies, BottomUpCallsGiveTheSameBits) {
  std::vector<Sharded> kept;
  auto trace = train([&](Transformer& model) -> Sharded {
    auto options = by_block();
    options.wrap = {};
    for (size_t i = 0; i < model->blocks->size(); ++i)
      kept.push_back(fully_shard(model->block(i), options));
    auto sharded = fully_shard(model, options);
    EXPECT_EQ(sharded.units().size(), model->blocks->size() + 1);
    return sharded;
  });
  expect_same_bits(trace, reference());
}

TEST(Strategies, HandlesOfBottomUpCallsMayBeDropped) {  // as FSDP2's are
  auto trace = train([](Transformer& model) -> Sharded {
    auto options = by_block();
    options.wrap = {};
    for (size_t i = 0; i < model->blocks->size(); ++i) fully_shard(model->block(i), options);
    return fully_shard(model, options);
  });
  expect_same_bits(trace, reference());
}

TEST(Strategies, OneUnitOfTwoModulesGivesTheSameBits) {
  Sharded kept;
  auto trace = train([&](Transformer& model) -> Sharded {
    auto options = by_block();
    options.wrap = {};
    kept = fully_shard({model->block(0), model->block(1)}, options);
    auto sharded = fully_shard(model, options);
    EXPECT_EQ(sharded.units().size(), 2u);
    EXPECT_TRUE(unit_of(model->block(0)) == unit_of(model->block(1)));
    return sharded;
  });
  expect_same_bits(trace, reference());
}

TEST(Strategies, UnitsOpenedByHandGiveTheSameBits) {
  const auto& model_batches = model_case("transformer");
  torch::manual_seed(7);
  Transformer model;
  auto options = by_block();
  options.share_host_memory = false;
  auto sharded = fully_shard(model, options);
  auto optimizer = torch_sgd(sharded);
  Trace trace;
  for (int i = 0; i < kSteps; ++i) {
    if (i == 1) sharded.unshard();
    if (i == 2) {
      auto opened = unit_of(model->block(2)).unshard(/*async_op=*/true);
      unit_of(model->block(0)).unshard();
      opened.wait();
      EXPECT_TRUE(unit_of(model->block(2)).is_unsharded());
    }
    auto batch = moved(model_batches.batch(i, rank()), test_device());
    auto loss = model->loss(batch.x, batch.y);
    loss.backward();
    sharded.reshard();
    EXPECT_FALSE(unit_of(model->block(0)).is_unsharded());
    trace.add("loss of step " + std::to_string(i), loss);
    trace.add("norm of step " + std::to_string(i), sharded.clip_grad_norm_(kMaxNorm));
    optimizer.step();
    sharded.zero_grad();
  }
  for (const auto& item : model->named_parameters())
    trace.add(item.key(), sharded.full_tensor(item.key()));
  expect_same_bits(trace, reference());
}

TEST(Strategies, ListsOfUnitsToPrefetchGiveTheSameBits) {
  auto trace = train([](Transformer& model) -> Sharded {
    auto options = by_block();
    options.share_host_memory = false;
    auto sharded = fully_shard(model, options);
    auto block = [&](size_t i) { return unit_of(model->block(i)); };
    block(0).set_modules_to_forward_prefetch({block(1), block(2)});
    block(2).set_modules_to_backward_prefetch({block(1), block(0)});
    return sharded;
  });
  expect_same_bits(trace, reference());
}

TEST(Strategies, EveryOptimizerGivesTheSameBitsUnderEveryStrategy) {
  std::vector<std::pair<const char*, MakeOptimizer>> optimizers = {
      {"torch AdamW", torch_adamw}, {"fsdp AdamW", our_adamw}, {"fsdp SGD", our_sgd}};
  for (const auto& [what, optimizer] : optimizers) {
    SCOPED_TRACE(what);
    auto expected = train(by_block(), optimizer);
    for (auto strategy : {ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::NO_SHARD}) {
      SCOPED_TRACE(name(strategy));
      auto options = by_block();
      options.strategy = strategy;
      expect_same_bits(train(options, optimizer), expected);
    }
    auto options = by_block();
    options.share_host_memory = false;
    options.wrap = wrap::always();
    expect_same_bits(train(options, optimizer), expected);
  }
}

TEST(Strategies, OurOptimizersDoWhatTorchsDo) {
  std::vector<std::pair<MakeOptimizer, MakeOptimizer>> pairs = {{our_sgd, torch_sgd},
                                                                {our_adamw, torch_adamw}};
  for (const auto& [ours, torchs] : pairs) {
    auto trace = train(by_block(), ours), expected = train(by_block(), torchs);
    for (size_t i = 0; i < trace.values.size(); ++i) {
      EXPECT_LE((trace.values[i] - expected.values[i]).norm().item<double>(),
                1e-5 * expected.values[i].norm().item<double>())
          << trace.names[i];
    }
  }
}

// --- units and their options ---

TEST(Units, AreThoseThatThePolicyTook) {
  Transformer model;
  auto sharded = fully_shard(model, by_block());
  ASSERT_EQ(sharded.units().size(), 4u);
  EXPECT_TRUE(sharded.units()[0] == sharded.unit("root")) << sharded.units()[0].name();
  EXPECT_TRUE(is_sharded(model));
  EXPECT_TRUE(is_sharded(model->block(1)));
  EXPECT_FALSE(is_sharded(model->block(1)->up));
  EXPECT_EQ(unit_of(model->block(1)).name(), "blocks.1");
  int64_t in_block = 0;
  for (const auto& parameter : model->block(1)->parameters()) in_block += parameter.numel();
  EXPECT_EQ(unit_of(model->block(1)).numel(), in_block);
}

TEST(Units, AModuleThatIsNoneIsAnErrorThatNamesThem) {
  Transformer model;
  auto sharded = fully_shard(model, by_block());
  expect_error([&] { unit_of(model->block(1)->up); }, {"blocks.1"});
}

Transformer seeded() {
  torch::manual_seed(7);
  return Transformer();
}

// Its address may be that of a module that was sharded and is gone.
TEST(Units, AModuleThatWasNeverShardedIsNotSharded) {
  for (int i = 0; i < 8; ++i) {
    Transformer model = seeded();
    EXPECT_FALSE(is_sharded(model));
    auto sharded = fully_shard(model, by_block());
    EXPECT_TRUE(is_sharded(model));
  }
}

TEST(Units, ReshardAfterForwardBelowOnePartIsAnError) {
  Transformer model = seeded();
  for (int parts : {0, -1, -4}) {
    const std::string what = "reshard_after_forward = " + std::to_string(parts);
    expect_error([&] { ReshardAfterForward choice(parts); }, {what, "pass true"});
  }
  auto options = by_block();
  options.reshard_after_forward.keep_parts = -2;
  expect_error([&] { fully_shard(model, options); }, {"reshard_after_forward = -2", "pass true"});
  EXPECT_FALSE(is_sharded(model));
  auto sharded = fully_shard(model, by_block());
  Unit unit = unit_of(model->block(0));
  expect_error([&] { unit.set_reshard_after_forward(0); }, {"reshard_after_forward = 0"});
  expect_error([&] { unit.set_reshard_after_forward(options.reshard_after_forward); },
               {"reshard_after_forward = -2"});
}

constexpr int kRefused = -1;

// The parts that blocks.0 keeps after `act`; kRefused if it throws that they must divide the ranks.
int parts_kept(const Sharded& sharded, const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.what(), "must divide")) << error.what();
    return kRefused;
  }
  for (const auto& unit : shard::lock(sharded)->units)
    if (unit->name == "blocks.0") return unit->keep_parts;
  return -2;
}

TEST(Units, TheOptionAndTheSetterOfReshardAfterForwardAgree) {
  const int ranks = world_size();
  const std::vector<ReshardAfterForward> choices = {{}, true,  false,     1,
                                                    2,  ranks, ranks + 1, 2 * ranks};
  for (auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP})
    for (bool share : {true, false}) {
      auto options = by_block();
      options.strategy = strategy;
      options.share_host_memory = share;
      Transformer set_later = seeded();
      auto later = fully_shard(set_later, options);
      for (const auto& choice : choices) {
        SCOPED_TRACE(choice.keep_parts ? std::to_string(*choice.keep_parts) : name(strategy));
        Transformer model = seeded();
        Sharded sharded;
        options.reshard_after_forward = choice;
        const int chosen = parts_kept(sharded, [&] { sharded = fully_shard(model, options); });
        const int set = parts_kept(
            later, [&] { unit_of(set_later->block(0)).set_reshard_after_forward(choice); });
        EXPECT_EQ(set, chosen);
        const int parts = choice.keep_parts.value_or(0);
        EXPECT_EQ(chosen == kRefused, parts > 1 && ranks % parts != 0);
      }
    }
}

TEST(Units, APolicySeesWhatIsLeftForAModule) {
  Transformer model;
  std::map<std::string, std::pair<int64_t, int64_t>> seen;
  auto options = by_block();
  options.wrap = [&](const ModuleView& view) {
    seen[view.path] = {view.numel, view.remaining};
    return view.path == "blocks.0.up";
  };
  auto sharded = fully_shard(model, options);
  auto up = model->block(0)->up;
  int64_t taken = up->weight.numel() + up->bias.numel();
  ASSERT_TRUE(seen.count("blocks.0"));
  EXPECT_EQ(seen["blocks.0"].first - seen["blocks.0"].second, taken);
  EXPECT_EQ(sharded.unit("blocks.0.up").numel(), taken);
}

}  // namespace
}  // namespace fsdp::testing
