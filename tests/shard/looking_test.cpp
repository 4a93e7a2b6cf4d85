// Reports about a sharded model, and how its values get in and out: describe, shard_of,
// full_tensor, summon_full_params, state dicts, initial values.
#include <ATen/ATen.h>
#include <torch/utils.h>

#include <set>

#include "shard/oracle.h"
#include "shard/tensor_access.h"
#include "shard/told.h"

namespace fsdp::testing {
namespace {

ShardOptions options_for(const ModelCase& model) {
  return {.wrap = model.wrap, .device = test_device()};
}

struct Looked {
  explicit Looked(const char* name, ShardOptions options = {}, uint64_t seed = 7)
      : model(model_case(name)), plain(build_seeded(model)), mine(build_seeded(model, seed)) {
    if (!options.wrap) options.wrap = model.wrap;
    options.device = test_device();
    sharded = fully_shard(mine.module, std::move(options));
  }
  void expect_values_of(const Built& other) const {
    for (const auto& [name, value] : other.parameters)
      EXPECT_TRUE(at::equal(sharded.full_tensor(name).cpu(), value.detach())) << name;
  }

  const ModelCase& model;
  Built plain, mine;
  Sharded sharded;
};

// --- describe ---

TEST(Looking, DescribeShowsTheTreeWithItsUnits) {
  Looked subject("transformer", {.mixed_precision = bf16_precision()});
  std::string text = subject.sharded.describe();
  for (const char* word : {"Transformer", "Block", "embedding", "unit", "bf16", "shard="})
    EXPECT_TRUE(contains(text, word)) << word << " is not in:\n" << text;
  int64_t in_block = subject.sharded.unit("blocks.0").numel();
  std::string digits;  // of the number, without separators
  for (char c : text)
    if (std::isdigit(static_cast<unsigned char>(c)) || c == ' ' || c == '\n') digits += c;
  EXPECT_TRUE(contains(digits, std::to_string(in_block))) << in_block << " is not in:\n" << text;
}

TEST(Looking, ARootThatHoldsMostOfTheModelIsWarnedOf) {
  ::testing::internal::CaptureStderr();
  Looked subject("mlp", {.wrap = wrap::names({"layers.0"})});
  std::string said = ::testing::internal::GetCapturedStderr() + subject.sharded.describe();
  EXPECT_TRUE(on_any_rank(contains(said, "root"))) << said;
  EXPECT_TRUE(on_any_rank(contains(said, "wrap"))) << said;
}

TEST(Looking, APolicyThatMatchesNothingIsWarnedOf) {
  const auto said = [](const char* model, WrapPolicy policy) {
    return text_of_rank_0(told([&] { Looked subject(model, {.wrap = policy}); }));
  };
  std::string text = said("transformer", wrap::names({"blokcs.*"}));
  EXPECT_TRUE(contains(text, "\"blokcs.*\" matches no module")) << text;
  EXPECT_TRUE(contains(text, "did you mean \"blocks.*\"?")) << text;
  EXPECT_TRUE(contains(text, "\"embedding\"")) << text;
  text = said("transformer", wrap::types({"Blok"}));
  EXPECT_TRUE(contains(text, "did you mean \"Block\"?")) << text;
  EXPECT_TRUE(contains(text, "\"LayerNorm\"")) << text;
  for (auto policy :
       {wrap::types({"BlockImpl"}), wrap::types({"Block"}), wrap::names({"blocks.*"})}) {
    auto built = build_seeded(model_case("transformer"));
    std::string nothing = told([&] {
      EXPECT_EQ(fully_shard(built.module, {.wrap = policy, .device = test_device()}).units().size(),
                4u);
    });
    EXPECT_EQ(nothing, "");
  }
}

TEST(Looking, DtypesThatCannotBeTrainedAreErrors) {
  auto built = build_seeded(model_case("mlp"));
  expect_error([&] { fully_shard(built.module, {.mixed_precision = {.param_dtype = at::kChar}}); },
               {"param_dtype", "Char", "kBFloat16"});
  expect_error([&] { fully_shard(built.module, {.mixed_precision = {.reduce_dtype = at::kInt}}); },
               {"reduce_dtype", "Int"});
  struct Waves : torch::nn::Module {
    Waves() { weight = register_parameter("weight", at::zeros({4}, at::kComplexFloat)); }
    at::Tensor weight;
  };
  expect_error([] { fully_shard(std::make_shared<Waves>()); },
               {"\"weight\" is complex", "view_as_real"});
}

// --- shard_of ---

// The number of ranks that hold each element of a parameter.
void expect_tiles(const Looked& subject, const std::string& name, double times) {
  SCOPED_TRACE(name);
  auto info = subject.sharded.shard_of(name);
  auto full = subject.sharded.full_tensor(name);
  EXPECT_EQ(at::IntArrayRef(info.global_shape), full.sizes());
  EXPECT_EQ(info.name, name);
  auto covered = at::zeros(full.sizes(), full.options().dtype(at::kFloat));
  std::vector<at::Tensor> parts;
  for (const auto& rectangle : info.rectangles) {
    at::Tensor part = full, mask = covered;
    ASSERT_EQ(rectangle.offsets.size(), info.global_shape.size());
    for (size_t d = 0; d < rectangle.offsets.size(); ++d) {
      part = part.narrow(d, rectangle.offsets[d], rectangle.sizes[d]);
      mask = mask.narrow(d, rectangle.offsets[d], rectangle.sizes[d]);
    }
    mask.add_(1);
    parts.push_back(part);
  }
  if (covered.numel() > 0) test_world().comm().all_reduce(covered);
  EXPECT_TRUE((covered == times).all().item<bool>()) << covered;
  if (parts.empty()) {
    EXPECT_EQ(info.local.numel(), 0);
  } else if (parts.size() == 1) {
    EXPECT_EQ(info.local.sizes(), parts[0].sizes());
    EXPECT_TRUE(at::equal(info.local, parts[0]));
  } else if (full.is_contiguous()) {
    for (auto& part : parts) part = part.flatten();
    EXPECT_TRUE(at::equal(info.local, at::cat(parts)));
  }
}

TEST(Looking, TheRectanglesOfAllRanksTileEveryParameter) {
  for (const char* name : {"odd", "transformer", "mixed_types", "resnet"}) {
    for (auto cut : {Cut::AUTO, Cut::ROW, Cut::ELEMENT, Cut::TENSOR}) {
      SCOPED_TRACE(std::string(name) + ", cut " + std::to_string(static_cast<int>(cut)));
      Looked subject(name, {.cut = cut});
      for (const auto& [parameter, value] : subject.plain.parameters)
        expect_tiles(subject, parameter, 1);
    }
  }
}

TEST(Looking, CopiesTileAsOftenAsThereAreCopies) {
  Looked copies("odd", {.strategy = ShardingStrategy::NO_SHARD});
  for (const auto& [parameter, value] : copies.plain.parameters)
    expect_tiles(copies, parameter, world_size());
  EXPECT_EQ(copies.sharded.shard_of("prime.weight").placement, "Replicate()");
  if (world_size() % 2) return;
  Looked hybrid("odd", {.strategy = ShardingStrategy::HYBRID_SHARD, .mesh = hybrid_mesh()});
  for (const auto& [parameter, value] : hybrid.plain.parameters) expect_tiles(hybrid, parameter, 2);
  EXPECT_EQ(hybrid.sharded.shard_of("prime.weight").mesh,
            "replicate=2 x shard=" + std::to_string(world_size() / 2));
}

TEST(Looking, ACutBetweenRowsIsAShardOfDimension0) {
  Looked subject("mlp", {.cut = Cut::ROW});
  auto info = subject.sharded.shard_of("layers.3.weight");
  EXPECT_EQ(info.unit, "layers.3");
  EXPECT_EQ(info.mesh, "shard=" + std::to_string(world_size()));
  EXPECT_EQ(info.placement, world_size() > 1 ? "Shard(0)" : "Replicate()");
  EXPECT_LE(info.rectangles.size(), 1u);
}

TEST(Looking, AnUnknownParameterIsAnErrorThatSuggests) {
  Looked subject("mlp");
  expect_error([&] { subject.sharded.shard_of("layer.3.weight"); }, {"layers.3.weight"});
}

// --- values ---

TEST(Looking, FullTensorIsThePlainModelsParameter) {
  for (const char* name : {"odd", "transformer", "lora", "mixed_types"}) {
    for (bool share : {true, false}) {
      Looked subject(name, {.share_host_memory = share});
      subject.expect_values_of(subject.plain);
    }
  }
  Looked tied("transformer");  // by each of its names
  EXPECT_TRUE(at::equal(tied.sharded.full_tensor("head.weight"),
                        tied.sharded.full_tensor("embedding.weight")));
}

TEST(Looking, SummonedParametersAreWholeAndWhatIsWrittenIsKept) {
  for (bool share : {true, false}) {
    Looked subject("transformer", {.share_host_memory = share});
    {
      auto full = subject.sharded.summon_full_params();
      for (const auto& [name, value] : subject.plain.parameters) {
        ASSERT_TRUE(full.values().count(name)) << name;
        EXPECT_TRUE(at::equal(full.values().at(name).detach().cpu(), value.detach())) << name;
      }
      at::NoGradGuard no_grad;
      subject.mine.parameter("blocks.1.up.weight").mul_(2);
      subject.plain.parameter("blocks.1.up.weight").mul_(2);
      subject.mine.parameter("position")[0].fill_(3);
      subject.plain.parameter("position")[0].fill_(3);
    }
    subject.expect_values_of(subject.plain);
    auto batch = moved(subject.model.batch(0, rank()), test_device());
    auto loss = subject.mine.loss(batch);
    if (test_device().type() != at::kCPU) continue;
    EXPECT_EQ(loss.item<float>(), subject.plain.loss(batch).item<float>());
  }
}

TEST(Looking, SummonedWithoutWritebackNothingIsKept) {
  Looked subject("mlp");
  {
    auto full = subject.sharded.summon_full_params({.writeback = false});
    at::NoGradGuard no_grad;
    subject.mine.parameter("layers.1.weight").zero_();
  }
  subject.expect_values_of(subject.plain);
}

TEST(Looking, SummonedOnRank0OnlyTheOthersSeeNothing) {
  for (bool offload : {false, true}) {
    Looked subject("mlp");
    {
      auto full = subject.sharded.summon_full_params(
          {.writeback = true, .rank0_only = true, .offload_to_cpu = offload});
      if (rank() == 0) {
        EXPECT_EQ(full.values().size(), subject.plain.parameters.size());
        auto weight = full.values().at("layers.1.weight");
        EXPECT_TRUE(!offload || weight.device().is_cpu());
        at::NoGradGuard no_grad;
        weight.add_(1);
      } else {
        EXPECT_TRUE(full.values().empty());
      }
    }
    at::NoGradGuard no_grad;
    subject.plain.parameter("layers.1.weight").add_(1);
    subject.expect_values_of(subject.plain);
  }
}

TEST(Looking, AnExceptionWhileSummonedKeepsNothing) {
  Looked subject("mlp");
  auto act = [&] {
    auto full = subject.sharded.summon_full_params();
    at::NoGradGuard no_grad;
    subject.mine.parameter("layers.1.weight").zero_();
    throw std::runtime_error("changed my mind");
  };
  expect_error(act, {"changed my mind"});
  subject.expect_values_of(subject.plain);
}

// --- state dicts ---

std::set<std::string> names_of(const nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) names.insert(item.key());
  for (const auto& item : module.named_buffers()) names.insert(item.key());
  return names;
}

TEST(Looking, TheFullStateDictHasTheModulesNamesAndValues) {
  for (const char* name : {"transformer", "resnet", "odd"}) {
    Looked subject(name);
    auto state = subject.sharded.full_state_dict();
    std::set<std::string> names;
    for (const auto& [key, value] : state) names.insert(key);
    EXPECT_EQ(names, names_of(*subject.plain.module));
    auto parameters = subject.plain.module->named_parameters();
    for (const auto& [key, value] : state)
      if (auto* expected = parameters.find(key)) {
        EXPECT_TRUE(at::equal(value, *expected)) << key;
      }
  }
}

TEST(Looking, OnlyRank0GetsAStateDictThatIsForRank0Only) {
  Looked subject("mlp");
  auto state = subject.sharded.full_state_dict(/*rank0_only=*/true);
  EXPECT_EQ(state.empty(), rank() != 0);
}

TEST(Looking, AStateDictGoesRoundThroughAnotherModel) {
  for (bool share : {true, false}) {
    Looked subject("resnet", {.share_host_memory = share});
    torch::optim::SGD optimizer(subject.sharded.parameters(), sgd_options(subject.model));
    subject.mine.loss(moved(subject.model.batch(0, 0), test_device())).backward();
    optimizer.step();
    auto state = subject.sharded.full_state_dict();
    Looked other("resnet", {.share_host_memory = share}, /*seed=*/99);
    other.sharded.load_full_state_dict(state);
    auto loaded = other.sharded.full_state_dict();
    ASSERT_EQ(loaded.size(), state.size());
    for (const auto& [name, value] : state)
      EXPECT_TRUE(at::equal(loaded.at(name), value)) << name;
    auto batch = moved(subject.model.batch(1, rank()), test_device());
    EXPECT_EQ(subject.mine.loss(batch).item<float>(), other.mine.loss(batch).item<float>());
  }
}

TEST(Looking, AStateDictThatLacksAParameterIsAnErrorThatNamesIt) {
  Looked subject("mlp");
  auto state = subject.sharded.full_state_dict();
  std::erase_if(state, [](const auto& entry) { return entry.first == "layers.4.bias"; });
  expect_error([&] { subject.sharded.load_full_state_dict(state); }, {"layers.4.bias"});
  subject.sharded.load_full_state_dict(state, /*strict=*/false);
  subject.expect_values_of(subject.plain);
}

TEST(Looking, ShardsAreThisRanksParts) {
  Looked subject("odd");
  auto state = subject.sharded.shards();
  int64_t mine = 0, all = 0;
  for (const auto& [name, value] : subject.plain.parameters) {
    ASSERT_TRUE(state.count(name)) << name;
    mine += state.at(name).local.defined() ? state.at(name).local.numel() : 0;
    all += value.numel();
  }
  EXPECT_EQ(sum_over_ranks(static_cast<double>(mine)), static_cast<double>(all));
}

// --- initial values ---

TEST(Looking, SyncModuleStatesGivesEverybodyRank0sValues) {
  const auto& model = model_case("resnet");
  auto plain = build_seeded(model, 7);
  auto mine = build_seeded(model, 7 + rank());
  for (auto& [name, buffer] : mine.buffers)
    if (buffer.is_floating_point()) buffer.add_(rank());
  auto options = options_for(model);
  options.sync_module_states = true;
  auto sharded = fully_shard(mine.module, options);
  for (const auto& [name, value] : plain.parameters)
    EXPECT_TRUE(at::equal(sharded.full_tensor(name).cpu(), value.detach())) << name;
  for (size_t i = 0; i < plain.buffers.size(); ++i)
    EXPECT_TRUE(at::equal(mine.buffers[i].second.cpu(), plain.buffers[i].second))
        << plain.buffers[i].first;
}

TEST(Looking, RanksThatDifferAreWarnedOfWithTheFirstParameterThatDoes) {
  if (world_size() == 1) GTEST_SKIP() << "there is nobody to differ from";
  auto mine = build_seeded(model_case("mlp"));
  if (rank() == world_size() - 1) {
    at::NoGradGuard no_grad;
    mine.parameter("layers.2.bias")[0] += 1;
    mine.parameter("layers.5.bias")[0] += 1;
  }
  ::testing::internal::CaptureStderr();
  auto sharded = fully_shard(mine.module, options_for(model_case("mlp")));
  std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(on_any_rank(contains(said, "layers.2.bias"))) << said;
  EXPECT_FALSE(on_any_rank(contains(said, "layers.5.bias"))) << said;
}

TEST(Looking, RanksThatAreAlikeAreNotWarned) {
  auto mine = build_seeded(model_case("mlp"));
  ::testing::internal::CaptureStderr();
  auto sharded = fully_shard(mine.module, options_for(model_case("mlp")));
  std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_FALSE(contains(said, "differ")) << said;
}

TEST(Looking, IgnoredParametersStayAsTheyAre) {
  const auto& model = model_case("mlp");
  auto mine = build_seeded(model), plain = build_seeded(model);
  mine.module->to(test_device());
  plain.module->to(test_device());
  auto ignored = mine.parameter("layers.3.weight");
  auto options = options_for(model);
  options.ignored_parameters = {ignored};
  auto sharded = fully_shard(mine.module, options);
  EXPECT_NO_THROW(ignored.data_ptr());
  EXPECT_EQ(sharded.unit("layers.3").numel(), 16);  // only the bias
  auto batch = moved(model.batch(0, rank()), test_device());
  mine.loss(batch).backward();
  plain.loss(batch).backward();
  ASSERT_TRUE(ignored.grad().defined());  // this rank's own
  EXPECT_TRUE(at::allclose(ignored.grad(), plain.parameter("layers.3.weight").grad()));
  bool in_state = false;
  for (const auto& [name, value] : sharded.full_state_dict()) in_state |= name == "layers.3.weight";
  EXPECT_TRUE(in_state);
}

// The C++ frontend can't build a Linear on the meta device, but another loader could.
Built on_meta(const ModelCase& model) {
  auto mine = build_seeded(model);
  for (auto& [name, value] : mine.parameters)
    shard::become(value, at::empty(value.sizes(), value.options().device(at::kMeta)));
  return mine;
}

TEST(Looking, AModelOnTheMetaDeviceIsFilledByItsOwnResetParameters) {
  auto mine = on_meta(model_case("mlp"));
  auto sharded = fully_shard(mine.module, options_for(model_case("mlp")));
  expect_error([&] { sharded.full_tensor("layers.0.weight"); }, {}, {"materialize"});
  expect_error([&] { sharded.parameters(); }, {}, {"materialize"});
  torch::manual_seed(5);
  sharded.materialize(test_device());
  if (test_device().type() == at::kCPU) {
    Mlp plain;
    torch::manual_seed(5);
    for (size_t i = 0; i < 8; ++i) plain->layer(i)->reset_parameters();
    for (const auto& item : plain->named_parameters())
      EXPECT_TRUE(at::equal(sharded.full_tensor(item.key()), item.value())) << item.key();
  }
  mine.loss(moved(model_case("mlp").batch(0, rank()), test_device())).backward();
  EXPECT_GT(sharded.full_grad("layers.0.weight").norm().item<float>(), 0);
}

TEST(Looking, AModelOnTheMetaDeviceIsFilledByAFunctionOfTheUser) {
  auto mine = on_meta(model_case("transformer"));
  auto sharded = fully_shard(mine.module, options_for(model_case("transformer")));
  sharded.materialize(test_device(), [](nn::Module& module) {
    for (auto& parameter : module.parameters(/*recurse=*/false))
      parameter.fill_(static_cast<double>(parameter.numel()));
  });
  for (const auto& [name, value] : build_seeded(model_case("transformer")).parameters)
    EXPECT_TRUE((sharded.full_tensor(name) == value.numel()).all().item<bool>()) << name;
}

}  // namespace
}  // namespace fsdp::testing
