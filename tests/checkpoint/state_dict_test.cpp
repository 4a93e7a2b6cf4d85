// State dicts of both types, with ranks as processes. The tests compare full tensors gathered by
// the engine.
#include "fsdp/state_dict.h"

#include <ATen/ATen.h>

#include <cmath>

#include "checkpoint/trained.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/oracle.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

using checkpoint::StateDictOptions;

constexpr auto kSharded = StateDictType::SHARDED_STATE_DICT;

// Tied weights, sizes that don't divide evenly, frozen parameters, units of two dtypes, units that
// some steps skip, buffers.
const std::vector<std::string> kSavedModels = {"transformer", "odd",      "lora",
                                          "mixed_types", "branches", "resnet"};

std::vector<ShardOptions> ways() {
  std::vector<ShardOptions> all = {{},
                                   {.strategy = ShardingStrategy::NO_SHARD},
                                   {.wrap = wrap::names({})},
                                   {.cut = Cut::ELEMENT},
                                   {.cut = Cut::TENSOR},
                                   {.share_host_memory = false}};
  if (world_size() % 2 == 0)
    all.push_back({.strategy = ShardingStrategy::HYBRID_SHARD, .mesh = hybrid_mesh()});
  return all;
}

// A full state dict with the names of a snapshot.
Snapshot as_snapshot(const StateDict& state) {
  Snapshot whole;
  for (const auto& [name, tensor] : state) {
    EXPECT_EQ(tensor.shards.size(), 1u) << name;
    const auto& [rectangle, values] = tensor.shards.at(0);
    EXPECT_EQ(rectangle.sizes, tensor.sizes) << name;
    EXPECT_EQ(values.scalar_type(), tensor.dtype) << name;
    std::string key = name;
    at::Tensor value = values;
    const std::string prefix = "optim.", step = ".step";
    if (name.starts_with(prefix)) key = name.substr(prefix.size());
    if (name.starts_with(prefix) && name.ends_with(step)) {
      key = "steps." + name.substr(12, name.size() - 12 - step.size());
      value = value.to(at::kLong);
    }
    whole[key] = value;
  }
  return whole;
}

// Assembles every tensor from all ranks' shards. Elements that several ranks hold must be equal.
Snapshot put_together(const StateDict& state) {
  Snapshot whole;
  for (const auto& [name, tensor] : state) {
    // Elements that no rank holds stay infinite.
    const auto over_ranks = [&, &tensor = tensor](double nothing, ReduceOp op) {
      at::Tensor all = at::full(tensor.sizes, nothing, at::kDouble);
      for (const auto& [rectangle, values] : tensor.shards) {
        at::Tensor into = all;
        for (int64_t d = 0; d < into.dim(); ++d)
          into = into.narrow(d, rectangle.offsets[d], rectangle.sizes[d]);
        into.copy_(values);
      }
      all = all.view({-1}).to(test_device());
      if (all.numel() > 0) test_world().comm().all_reduce(all, op);
      return all.cpu().view(tensor.sizes);
    };
    const at::Tensor largest = over_ranks(-INFINITY, ReduceOp::MAX);
    EXPECT_TRUE(at::equal(largest, over_ranks(INFINITY, ReduceOp::MIN))) << name;
    EXPECT_TRUE(largest.isfinite().all().item<bool>()) << name << " has gaps";
    whole[name] = largest.to(tensor.dtype);
  }
  return whole;
}

TEST(StateDicts, AFullOneHoldsAllTensorsCompletely) {
  for (const auto& name : kSavedModels) {
    SCOPED_TRACE(name);
    auto trained = make_trained(name, {});
    trained.train(2);
    const auto expected = snapshot(trained);
    expect_equal(as_snapshot(checkpoint::state_dict(trained.sharded, trained.optimizer.get())),
                 expected);
    // Further training doesn't change it.
    const auto state = checkpoint::state_dict(trained.sharded, trained.optimizer.get());
    trained.train(1);
    expect_equal(as_snapshot(state), expected);
    // The model alone.
    for (const auto& [key, tensor] : checkpoint::state_dict(trained.sharded))
      EXPECT_TRUE(key.starts_with("model.")) << key;
  }
}

TEST(StateDicts, WithRank0OnlyOtherRanksGetNothing) {
  auto trained = make_trained("transformer", {});
  trained.train(1);
  const auto state =
      checkpoint::state_dict(trained.sharded, trained.optimizer.get(), {.rank0_only = true});
  const auto expected = snapshot(trained);
  if (rank() == 0)
    expect_equal(as_snapshot(state), expected);
  else
    EXPECT_TRUE(state.empty());
}

TEST(StateDicts, ShardsCoverEveryTensor) {
  for (const auto& name : {"transformer", "odd", "mixed_types", "lora"})
    for (const auto& way : ways()) {
      auto trained = make_trained(name, way);
      trained.train(1);
      const auto full = checkpoint::state_dict(trained.sharded, trained.optimizer.get());
      const auto mine =
          checkpoint::state_dict(trained.sharded, trained.optimizer.get(), {.type = kSharded});
      Snapshot expected;
      for (const auto& [key, tensor] : full) expected[key] = tensor.shards[0].values;
      expect_equal(put_together(mine), expected);
    }
}

TEST(StateDicts, ShardsAreCopiesUnlessCopyIsFalse) {
  auto trained = make_trained("mlp", {});
  const auto copied = checkpoint::state_dict(trained.sharded, nullptr, {.type = kSharded});
  const auto shared = checkpoint::state_dict(
      trained.sharded, nullptr, {.type = kSharded, .offload_to_cpu = false, .copy = false});
  const auto before = put_together(copied);
  trained.train(1);
  expect_equal(put_together(copied), before);
  expect_equal(put_together(shared),
               put_together(checkpoint::state_dict(trained.sharded, nullptr, {.type = kSharded})));
}

TEST(StateDicts, AFullOneLoadsIntoAnySharding) {
  for (const std::string name : {"transformer", "odd"})
    for (size_t from : {size_t{0}, size_t{3}}) {
      auto saved = make_trained(name, ways()[from]);
      saved.train(2);
      const auto state = checkpoint::state_dict(saved.sharded, saved.optimizer.get());
      for (size_t to = 0; to < ways().size(); ++to) {
        SCOPED_TRACE(name + " from way " + std::to_string(from) + " to " + std::to_string(to));
        auto loaded = make_trained(name, ways()[to], Rule::kAdamW, 8);
        loaded.train(1);  // existing states must be replaced
        const auto skipped =
            checkpoint::load_state_dict(state, loaded.sharded, loaded.optimizer.get());
        EXPECT_TRUE(skipped.empty());
        expect_equal(snapshot(loaded), snapshot(saved));
      }
    }
}

TEST(StateDicts, EveryModelLoadsItsOwnOfBothTypes) {
  for (const auto& name : kSavedModels)
    for (const auto type : {StateDictType::FULL_STATE_DICT, kSharded}) {
      SCOPED_TRACE(name);
      auto saved = make_trained(name, {});
      saved.train(2);
      const auto state =
          checkpoint::state_dict(saved.sharded, saved.optimizer.get(), {.type = type});
      auto loaded = make_trained(name, {}, Rule::kAdamW, 8);
      checkpoint::load_state_dict(state, loaded.sharded, loaded.optimizer.get());
      expect_equal(snapshot(loaded), snapshot(saved));
      saved.train(1);
      loaded.steps = 2;
      loaded.train(1);
      expect_equal(snapshot(loaded), snapshot(saved));
    }
}

TEST(StateDicts, OneThatSharesTheModelsMemoryLoadsBack) {
  auto trained = make_trained("transformer", {});
  trained.train(2);
  const auto expected = snapshot(trained);
  const auto state =
      checkpoint::state_dict(trained.sharded, trained.optimizer.get(),
                             {.type = kSharded, .offload_to_cpu = false, .copy = false});
  checkpoint::load_state_dict(state, trained.sharded, trained.optimizer.get());
  expect_equal(snapshot(trained), expected);
}

TEST(StateDicts, HoldTheMaster) {
  auto saved = make_trained("transformer", {.mixed_precision = bf16_precision()});
  saved.train(2);
  const auto state = checkpoint::state_dict(saved.sharded, saved.optimizer.get());
  EXPECT_EQ(state.at("model.embedding.weight").dtype, at::kFloat);
  auto loaded = make_trained("transformer", {}, Rule::kAdamW, 8);
  checkpoint::load_state_dict(state, loaded.sharded, loaded.optimizer.get());
  expect_equal(snapshot(loaded), snapshot(saved));
}

TEST(StateDicts, AModelOnTheMetaDeviceLoadsWithoutInitialization) {
  auto saved = make_trained("transformer", {});
  saved.train(1);
  const auto state = checkpoint::state_dict(saved.sharded);
  Built built = build_seeded(model_case("transformer"));
  for (auto& [name, value] : built.parameters)
    shard::become(value, at::empty(value.sizes(), value.options().device(at::kMeta)));
  auto sharded = fully_shard({ModuleRef(built.module)},
                             {.wrap = model_case("transformer").wrap, .device = test_device()});
  expect_error([&] { checkpoint::state_dict(sharded); }, {"meta device"});
  checkpoint::load_state_dict(state, sharded);
  for (const auto& [name, tensor] : saved.sharded.full_state_dict())
    EXPECT_TRUE(at::equal(sharded.full_tensor(name).cpu(), tensor)) << name;
}

TEST(StateDicts, MismatchesAreNamedAndNothingIsWritten) {
  auto trained = make_trained("transformer", {});
  trained.train(1);
  const auto before = snapshot(trained);
  const auto good = checkpoint::state_dict(trained.sharded, trained.optimizer.get());
  const std::string name = "model.embedding.weight",
                    moment = "optim.state.embedding.weight.exp_avg";
  ASSERT_TRUE(good.contains(name) && good.contains(moment));
  const auto refused = [&](const std::function<void(StateDict&)>& change,
                           const std::vector<std::string>& words) {
    StateDict state = good;
    change(state);
    expect_error(
        [&] { checkpoint::load_state_dict(state, trained.sharded, trained.optimizer.get()); },
        words);
    expect_equal(snapshot(trained), before);
  };
  std::string norm;  // a parameter with one name
  for (const auto& [key, tensor] : good)
    if (key.starts_with("model.") && key.find("norm") != std::string::npos) norm = key;
  ASSERT_NE(norm, "");
  refused([&](StateDict& s) { s.erase(norm); }, {norm, "not in the state dict"});
  refused([&](StateDict& s) { s["model.other"] = s.at(norm); }, {"model.other", "not in the model"});
  refused([&](StateDict& s) { s["optim.state.other.exp_avg"] = s.at(norm); }, {"not in the optimizer"});
  refused(
      [&](StateDict& s) {
        s.at(name) = {{2, 3}, at::kFloat, {{{{0, 0}, {2, 3}}, at::zeros({2, 3})}}};
      },
      {name, "[2, 3]"});
  refused([&](StateDict& s) { s.at(name).shards[0].values = at::zeros({2}); }, {name, "invalid shard"});
  refused([&](StateDict& s) { s.at(name).shards.clear(); }, {"embedding.weight", "other parts"});
  refused([&](StateDict& s) { s.at(moment).shards.clear(); }, {"embedding.weight.exp_avg"});
  refused([&](StateDict& s) { std::erase_if(s, [](auto& e) { return e.first[0] == 'o'; }); },
          {"no optimizer states"});

  StateDict state = good;
  state.erase(norm);
  state["model.other"] = state.at(name);
  const auto skipped = checkpoint::load_state_dict(state, trained.sharded, trained.optimizer.get(),
                                                   {.strict = false});
  EXPECT_EQ(skipped, (std::vector<std::string>{norm, "model.other"}));
}

TEST(StateDicts, AShardedOneOfAnotherShardingIsRefusedOnEveryRank) {
  if (world_size() == 1) GTEST_SKIP() << "one rank has everything";
  auto saved = make_trained("transformer", {});
  const auto state = checkpoint::state_dict(saved.sharded, nullptr, {.type = kSharded});
  auto other = make_trained("transformer", {.strategy = ShardingStrategy::NO_SHARD});
  expect_error([&] { checkpoint::load_state_dict(state, other.sharded); },
               {"the state dict has other parts of it"});
}

TEST(StateDicts, TheOptimizerOfAnotherModelIsRefused) {
  auto one = make_trained("mlp", {}), other = make_trained("mlp", {});
  expect_error([&] { checkpoint::state_dict(one.sharded, other.optimizer.get()); }, {"another"});
}

}  // namespace
}  // namespace fsdp::testing
