// Saving and loading with ranks as processes. Every rank runs these tests, which compare full
// tensors gathered by the engine.
#include <ATen/ATen.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <fstream>

#include "base/seams.h"
#include "checkpoint/files.h"
#include "checkpoint/messages.h"
#include "checkpoint/metadata.h"
#include "checkpoint/together.h"
#include "checkpoint/trained.h"
#include "fsdp/deferred_init.h"
#include "optim/states.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/oracle.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

namespace fs = std::filesystem;
using checkpoint::Extra;

ShardOptions with_strategy(ShardingStrategy strategy) {
  ShardOptions options{.strategy = strategy};
  if (strategy == ShardingStrategy::HYBRID_SHARD) options.mesh = hybrid_mesh();
  return options;
}

std::vector<ShardingStrategy> strategies() {
  std::vector<ShardingStrategy> all = {ShardingStrategy::FULL_SHARD, ShardingStrategy::NO_SHARD};
  if (world_size() % 2 == 0) all.push_back(ShardingStrategy::HYBRID_SHARD);
  return all;
}

// Models with one difficulty each: tied weights, memory orders and sizes that don't divide evenly,
// frozen parameters, units of two dtypes, units that some steps skip, buffers.
const std::vector<std::string> kModels = {"transformer", "odd",      "lora",
                                          "mixed_types", "branches", "resnet"};

// --- one world ---

TEST(Checkpoints, EveryModelLoadsWhatItSaved) {
  for (const auto& name : kModels) {
    SCOPED_TRACE(name);
    SharedFolder folder;
    auto saved = make_trained(name, {});
    saved.train(2);
    checkpoint::save(folder / "step-2", saved.sharded, saved.optimizer.get());
    auto expected = snapshot(saved);
    auto loaded = make_trained(name, {}, Rule::kAdamW, 8);
    loaded.train(1);  // existing states must be replaced
    auto result = checkpoint::load(folder / "step-2", loaded.sharded, loaded.optimizer.get());
    EXPECT_TRUE(result.skipped.empty());
    const auto actual = snapshot(loaded);
    // Each rank has its own BatchNorm statistics; rank 0's are saved.
    if (name != "resnet" || rank() == 0) expect_equal(actual, expected);
  }
}

TEST(Checkpoints, HoldsAndLoadsOnlyWhatIsChosen) {
  const checkpoint::Chosen chosen = [](const std::string& name) {  // all that is trained
    return name.ends_with(".a") || name.ends_with(".b");
  };
  SharedFolder folder;
  auto saved = make_trained("lora", {});
  saved.train(2);
  checkpoint::save(folder / "some", saved.sharded, saved.optimizer.get(), {.only = chosen});
  auto loaded = make_trained("lora", {}, Rule::kAdamW, 8);
  loaded.train(1);
  Snapshot expected = snapshot(saved);
  for (auto& [name, value] : snapshot(loaded))
    if (name.starts_with("model.") && !chosen(name)) expected[name] = value;
  EXPECT_NE(error_of([&] {
              checkpoint::load(folder / "some", loaded.sharded, loaded.optimizer.get());
            }).find("\"model.first.weight\" is in the model but not in the checkpoint"),
            std::string::npos);
  checkpoint::load(folder / "some", loaded.sharded, loaded.optimizer.get(), {.only = chosen});
  expect_equal(snapshot(loaded), expected);
}

TEST(Checkpoints, AnyStrategyWrapPolicyAndCutLoadsWhatAnyOtherSaved) {
  std::vector<ShardOptions> ways;
  for (auto strategy : strategies()) ways.push_back(with_strategy(strategy));
  ways.push_back({.wrap = wrap::names({})});
  ways.push_back({.cut = Cut::ELEMENT});
  ways.push_back({.cut = Cut::TENSOR});
  ways.push_back({.share_host_memory = false});
  for (const std::string name : {"odd", "transformer"})
    for (size_t from = 0; from < ways.size(); ++from) {
      SharedFolder folder;
      auto saved = make_trained(name, ways[from]);
      saved.train(2);
      checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get());
      const auto expected = snapshot(saved);
      for (size_t to = 0; to < ways.size(); ++to) {
        if (from != 0 && to != 0 && from != to) continue;  // covered through the first
        SCOPED_TRACE(name + " from way " + std::to_string(from) + " to " + std::to_string(to));
        auto loaded = make_trained(name, ways[to], Rule::kAdamW, 8);
        checkpoint::load(folder / "a", loaded.sharded, loaded.optimizer.get());
        expect_equal(snapshot(loaded), expected);
      }
    }
}

TEST(Checkpoints, TrainingResumesBitForBit) {
  for (const auto rule : {Rule::kAdamW, Rule::kSgdWithMomentum, Rule::kSgd})
    for (const bool bf16 : {false, true}) {
      SharedFolder folder;
      const ShardOptions options{.mixed_precision = bf16 ? bf16_precision() : MixedPrecision{}};
      auto straight = make_trained("transformer", options, rule);
      straight.train(3);
      checkpoint::save(folder / "a", straight.sharded, straight.optimizer.get());
      straight.train(3);
      auto resumed = make_trained("transformer", options, rule, 8);
      checkpoint::load(folder / "a", resumed.sharded, resumed.optimizer.get());
      resumed.steps = 3;
      resumed.train(3);
      expect_equal(snapshot(resumed), snapshot(straight));
    }
}

TEST(Checkpoints, SavesTheMasterAndNotTheGatheredParameters) {
  SharedFolder folder;
  auto saved = make_trained("transformer", {.mixed_precision = bf16_precision()});
  saved.train(2);
  checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get());
  auto loaded = make_trained("transformer", {}, Rule::kAdamW, 8);  // float32 throughout
  checkpoint::load(folder / "a", loaded.sharded, loaded.optimizer.get());
  expect_equal(snapshot(loaded), snapshot(saved));
  EXPECT_EQ(loaded.sharded.full_tensor("embedding.weight").scalar_type(), at::kFloat);
}

TEST(Checkpoints, DtypesAreConverted) {
  SharedFolder folder;
  auto saved = make_trained("mlp", {});
  saved.train(1);
  checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get());
  auto loaded =
      make_trained("mlp", {.mixed_precision = {.master_dtype = at::kDouble}}, Rule::kAdamW, 8);
  checkpoint::load(folder / "a", loaded.sharded, loaded.optimizer.get());
  auto expected = snapshot(saved);
  for (auto& [name, tensor] : expected)
    if (!name.starts_with("steps.")) tensor = tensor.to(at::kDouble);
  expect_equal(snapshot(loaded), expected);
}

TEST(Checkpoints, AModelOnTheMetaDeviceLoadsWithoutInitialization) {
  SharedFolder folder;
  auto saved = make_trained("transformer", {});
  saved.train(1);
  checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get());
  Built built = build_seeded(model_case("transformer"));
  for (auto& [name, value] : built.parameters)  // as third-party code may build it
    shard::become(value, at::empty(value.sizes(), value.options().device(at::kMeta)));
  auto sharded = fully_shard({ModuleRef(built.module)},
                             {.wrap = model_case("transformer").wrap, .device = test_device()});
  checkpoint::load(folder / "a", sharded, nullptr);
  for (const auto& [name, tensor] : saved.sharded.full_state_dict())
    EXPECT_TRUE(at::equal(sharded.full_tensor(name).cpu(), tensor)) << name;
}

TEST(Checkpoints, ADeferredModelLoadsWithoutInitialization) {
  SharedFolder folder;
  auto saved = make_trained("transformer", {});
  saved.train(1);
  checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get());
  std::map<std::string, at::Tensor> expected;
  for (const auto& [name, tensor] : saved.sharded.full_state_dict()) expected.emplace(name, tensor);
  const ModelCase& model = model_case("transformer");
  const auto build = [&] { return deferred_init([&] { return build_seeded(model, 8); }); };
  Built built = build();
  auto sharded = fully_shard({ModuleRef(built.module)},
                             {.wrap = model.wrap, .device = test_device(), .initialize = false});
  // No values exist yet, so nothing was initialized.
  expect_error([&] { sharded.full_state_dict(); }, {"no values yet", "HINT"});
  checkpoint::load(folder / "a", sharded, nullptr);
  for (const auto& [name, tensor] : expected)
    EXPECT_TRUE(at::equal(sharded.full_tensor(name).cpu(), tensor)) << name;

  Built plain = build();
  checkpoint::load(folder / "a", *plain.module);
  for (const auto& item : plain.module->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), expected.at(item.key()))) << item.key();
    EXPECT_TRUE(item.value().requires_grad()) << item.key();
  }
}

TEST(Checkpoints, APlainModuleInOneProcessLoadsThem) {
  for (const auto& name : kModels) {
    SCOPED_TRACE(name);
    SharedFolder folder;
    auto saved = make_trained(name, {});
    saved.train(2);
    checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get(), {.extra = {{"step", 2}}});
    const auto expected = snapshot(saved);
    Built plain = build_seeded(model_case(name), 8);
    const auto loaded = checkpoint::load(folder / "a", *plain.module);
    EXPECT_EQ(std::get<int64_t>(loaded.extra.at("step")), 2);
    for (const auto& item : plain.module->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), expected.at("model." + item.key()))) << item.key();
    if (rank() != 0) continue;
    for (const auto& item : plain.module->named_buffers())
      EXPECT_TRUE(at::equal(item.value(), expected.at("model." + item.key()))) << item.key();
  }
}

TEST(Checkpoints, ExtraValuesReadBackUnchanged) {
  SharedFolder folder;
  auto saved = make_trained("mlp", {});
  const Extra extra = {{"step", int64_t{1} << 40},
                       {"negative", int64_t{-7}},
                       {"loss", 0.1},
                       {"done", true},
                       {"text", std::string("grüße\n\0x", 11)},
                       {"tensor", at::arange(6, at::kLong).view({2, 3}).t()}};
  const Extra own = {{"rng", at::full({3}, rank(), at::kByte)}, {"seed", int64_t{100 + rank()}}};
  checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get(),
                   {.extra = extra, .per_rank = own});
  const auto loaded = checkpoint::load(folder / "a", saved.sharded, saved.optimizer.get());
  ASSERT_EQ(loaded.extra.size(), extra.size());
  for (const auto& [key, value] : extra) {
    if (const auto* tensor = std::get_if<at::Tensor>(&value))
      EXPECT_TRUE(at::equal(std::get<at::Tensor>(loaded.extra.at(key)), *tensor));
    else
      EXPECT_TRUE(loaded.extra.at(key).index() == value.index()) << key;
  }
  EXPECT_EQ(std::get<int64_t>(loaded.extra.at("step")), int64_t{1} << 40);
  EXPECT_EQ(std::get<int64_t>(loaded.extra.at("negative")), -7);
  EXPECT_EQ(std::get<double>(loaded.extra.at("loss")), 0.1);
  EXPECT_EQ(std::get<bool>(loaded.extra.at("done")), true);
  EXPECT_EQ(std::get<std::string>(loaded.extra.at("text")),
            std::get<std::string>(extra.at("text")));
  ASSERT_EQ(loaded.per_rank.size(), 2u);
  EXPECT_EQ(std::get<int64_t>(loaded.per_rank.at("seed")), 100 + rank());
  EXPECT_TRUE(
      at::equal(std::get<at::Tensor>(loaded.per_rank.at("rng")), at::full({3}, rank(), at::kByte)));
  EXPECT_EQ(checkpoint::read_extra(folder / "a").size(), extra.size());
  expect_error(
      [&] {
        checkpoint::save(folder / "b", saved.sharded, nullptr, {.extra = {{"rank3.x", 1.0}}});
      },
      {"rank3.x"});
}

TEST(Checkpoints, EveryElementIsWrittenOnceAndReplicasShareTheWork) {
  for (auto strategy : strategies()) {
    SCOPED_TRACE(name(strategy));
    SharedFolder folder;
    auto saved = make_trained("mlp", with_strategy(strategy));
    saved.train(1);
    checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get());
    const auto metadata = checkpoint::read_metadata(folder / "a");
    std::map<std::string, int64_t> written;  // elements in each file
    for (const auto& [name, entry] : metadata.tensors) {
      int64_t elements = 0;
      for (const auto& chunk : entry.chunks) {
        elements += c10::multiply_integers(chunk.rectangle.sizes);
        written[chunk.place.file] += c10::multiply_integers(chunk.rectangle.sizes);
      }
      EXPECT_EQ(elements, c10::multiply_integers(entry.sizes)) << name;
    }
    if (strategy != ShardingStrategy::NO_SHARD) continue;
    const int64_t all = 3 * 8 * 17 * 16;
    EXPECT_EQ(static_cast<int>(written.size()), world_size());
    for (const auto& [file, elements] : written)
      EXPECT_NEAR(elements, all / world_size(), 16 * 17) << file;
  }
}

TEST(Checkpoints, AParameterThatWasNeverUpdatedHasNoState) {
  SharedFolder folder;
  auto saved = make_trained("branches", {});
  saved.train(1);  // step 0 skips "right"
  checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get());
  auto loaded = make_trained("branches", {}, Rule::kAdamW, 8);
  loaded.train(3);
  checkpoint::load(folder / "a", loaded.sharded, loaded.optimizer.get());
  for (auto* flat : shard::lock(loaded.sharded)->flats()) {
    const bool right = flat->parameters()[0].name().starts_with("right");
    EXPECT_EQ(optim::states_of(*loaded.optimizer).steps(*flat), right ? 0 : 1)
        << flat->parameters()[0].name();
    for (const auto& state : optim::states_of(*loaded.optimizer).slots(*flat))
      EXPECT_TRUE(!right || state.abs().max().item<double>() == 0);
  }
}

// --- mismatches ---

struct Smaller : nn::Module {
  nn::ModuleList layers = register_module("layers", nn::ModuleList());
  explicit Smaller(int64_t width, int count) {
    for (int i = 0; i < count; ++i) layers->push_back(nn::Linear(16, width));
  }
};

TEST(Mismatches, AreErrorsThatNameTheTensorAndStrictFalseSkipsThem) {
  SharedFolder folder;
  auto saved = make_trained("mlp", {});
  checkpoint::save(folder / "a", saved.sharded, nullptr);
  const auto load_into = [&](int64_t width, int count, bool strict) {
    auto module = std::make_shared<Smaller>(width, count);
    auto sharded = fully_shard({ModuleRef(module)}, {.device = test_device()});
    return checkpoint::load(folder / "a", sharded, nullptr, {.strict = strict});
  };
  expect_error([&] { load_into(16, 7, true); }, {"model.layers.7.weight", "not in the model"});
  expect_error([&] { load_into(16, 9, true); }, {"model.layers.8.weight", "not in the checkpoint"});
  expect_error([&] { load_into(15, 8, true); }, {"model.layers.0.weight", "[16, 16]", "[15, 16]"});
  EXPECT_EQ(load_into(16, 7, false).skipped,
            (std::vector<std::string>{"model.layers.7.bias", "model.layers.7.weight"}));
  EXPECT_EQ(load_into(16, 9, false).skipped,
            (std::vector<std::string>{"model.layers.8.weight", "model.layers.8.bias"}));
  EXPECT_EQ(load_into(15, 8, false).skipped.size(), 16u);
}

TEST(Mismatches, OptimizersOfAnotherKind) {
  SharedFolder folder;
  auto saved = make_trained("mlp", {});
  saved.train(1);
  checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get());
  checkpoint::save(folder / "model-only", saved.sharded, nullptr);
  auto sgd = make_trained("mlp", {}, Rule::kSgdWithMomentum);
  expect_error([&] { checkpoint::load(folder / "a", sgd.sharded, sgd.optimizer.get()); },
               {"exp_avg", "not in the optimizer"});
  checkpoint::load(folder / "a", sgd.sharded, sgd.optimizer.get(), {.optimizer = false});
  checkpoint::load(folder / "a", sgd.sharded, nullptr);
  expect_error([&] { checkpoint::load(folder / "model-only", sgd.sharded, sgd.optimizer.get()); },
               {"optim.", ".optimizer = false"});
}

// --- failures ---

// One unit, so that every rank has something of it.
Trained one_unit() {
  return make_trained("mlp", {.wrap = wrap::names({})});
}

int failing_rank = 0;
std::string failing_call;

int fail_once(const char* call, const checkpoint::files::Path&) {
  return rank() == failing_rank && call == failing_call ? ENOSPC : 0;
}

TEST(Failures, OnOneRankAreErrorsOnEveryRankAndTheOlderCheckpointStays) {
  SharedFolder folder;
  auto saved = one_unit();
  checkpoint::save(folder / "step-1", saved.sharded, saved.optimizer.get());
  const auto expected = snapshot(saved);
  saved.train(1);
  for (failing_rank = 0; failing_rank < world_size(); ++failing_rank)
    for (const std::string call : {"create", "reserve", "write", "fsync", "mkdir", "rename"}) {
      if (failing_rank != 0 && (call == "mkdir" || call == "rename")) continue;  // rank 0's work
      SCOPED_TRACE(call + " on rank " + std::to_string(failing_rank));
      failing_call = call;
      const std::string error = error_of([&] {
        const WithSeams failing({.files = fail_once});
        checkpoint::save(folder / "step-2", saved.sharded, saved.optimizer.get());
      });
      EXPECT_TRUE(contains(error, "No space left")) << error;
      EXPECT_TRUE(contains(error, "step-2")) << error;
      EXPECT_TRUE(rank() == failing_rank || contains(error, "rank " + std::to_string(failing_rank)))
          << error;
      test_world().comm().barrier();
      EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-1");
      EXPECT_EQ(checkpoint::list(folder.path()).size(), 1u);
      test_world().comm().barrier();
    }
  checkpoint::save(folder / "step-2", saved.sharded, saved.optimizer.get());
  EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-2");
  auto loaded = make_trained("mlp", {}, Rule::kAdamW, 8);
  checkpoint::load(folder / "step-1", loaded.sharded, loaded.optimizer.get());
  expect_equal(snapshot(loaded), expected);
}

// Renames first, so that no file can be created in it while it is being removed.
int vanish(const char* call, const fs::path& path) {
  const fs::path folder = path.parent_path();
  if (std::string(call) == "create" && rank() == world_size() - 1 && fs::exists(folder)) {
    fs::rename(folder, folder.string() + ".gone");
    fs::remove_all(folder.string() + ".gone");
  }
  return 0;
}

int read_only(const char*, const fs::path&) {
  return EROFS;
}

// A save in the background exchanges its texts over the store.
TEST(Failures, AForgedKeyOfASaveIsRefusedAndNamed) {
  if (world_size() < 2) GTEST_SKIP() << "nobody sends anything";
  const std::string large(4 << 20, 'x');
  const std::vector<std::string> forged = {"",
                                           "3:999",
                                           "1:05:hello",
                                           "1:11:x1:y",
                                           checkpoint::FirstPiece{1'000'000, large}.encode(),
                                           checkpoint::FirstPiece{2, "short"}.encode()};
  for (size_t i = 0; i < forged.size(); ++i) {
    const std::string name = "forged/" + std::to_string(i),
                      key = "fsdp/exchange/" + name + "/to/1/0";
    const auto exchange = checkpoint::by_store(test_world(), name);
    if (rank() == 1) test_world().store()->set(key, forged[i]);
    if (rank() != 0) continue;
    expect_error([&] { exchange.to_first("the checkpoint step-1", ""); },
                 {"the checkpoint step-1: rank 1 (store key " + key + ")"});
  }
  test_world().comm().barrier();
}

TEST(Failures, AVanishedOrReadOnlyDirectoryIsNamed) {
  SharedFolder folder;
  auto saved = one_unit();
  checkpoint::save(folder / "step-1", saved.sharded, saved.optimizer.get());
  for (const auto& [word, seam] : {std::pair("No such file", &vanish), {"Read-only", &read_only}}) {
    test_world().comm().barrier();
    const std::string error = error_of([&] {
      const WithSeams failing({.files = seam});
      checkpoint::save(folder / "step-2", saved.sharded, saved.optimizer.get());
    });
    EXPECT_TRUE(contains(error, word) && contains(error, "step-2") && contains(error, "HINT"))
        << error;
    test_world().comm().barrier();
    EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-1");
  }
  test_world().comm().barrier();
}

TEST(Failures, DamagedFilesAreNamed) {
  SharedFolder folder;
  auto saved = one_unit();
  saved.train(1);
  bool listed = true;  // whether there is a manifest
  const auto damage = [&](const std::string& file, const std::function<void(fs::path)>& act,
                          const std::vector<std::string>& words) {
    checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get());
    if (rank() == 0 && !listed) {  // as Python writes it
      auto metadata = checkpoint::read_metadata(folder / "a");
      metadata.mark.clear();
      std::ofstream(folder / "a/.metadata", std::ios::binary) << checkpoint::encode(metadata);
      fs::remove(folder / "a" / ".manifest.json");
    }
    if (rank() == 0) act(folder / "a" / file);
    test_world().comm().barrier();
    expect_error([&] { checkpoint::load(folder / "a", saved.sharded, saved.optimizer.get()); },
                 words);
    test_world().comm().barrier();
  };
  const std::string last = "__" + std::to_string(world_size() - 1) + "_0.distcp";
  const auto flip = [](int64_t from_end) {
    return [from_end](const fs::path& path) {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      const auto at = static_cast<int64_t>(fs::file_size(path)) - from_end;
      file.seekg(at);
      const char byte = static_cast<char>(file.get());
      file.seekp(at);
      file.put(static_cast<char>(byte ^ 4));
    };
  };
  for (bool with_manifest : {true, false}) {
    listed = with_manifest;
    damage(".metadata", [](const fs::path& path) { fs::remove(path); }, {".metadata", "missing"});
    damage(".metadata", [](const fs::path& path) { fs::resize_file(path, 100); }, {".metadata"});
    damage(last, [](const fs::path& path) { fs::remove(path); }, {last});
    damage(last, [](const fs::path& path) { fs::resize_file(path, fs::file_size(path) / 2); },
           {last, "bytes"});
    damage(last, [](const fs::path& path) { fs::resize_file(path, fs::file_size(path) - 1); },
           {last, "bytes"});
    damage(last,
           [](const fs::path& path) {
             const auto size = fs::file_size(path);
             std::ofstream(path, std::ios::binary) << std::string(size, '\0');
           },
           {last});
  }
  listed = true;
  // One bit: in the elements of a tensor, in the metadata, in the checksums.
  damage(last, flip(2000), {last, "differ from what was saved", "layers."});
  damage(".metadata", flip(200), {".metadata", "differ from what was saved"});
  damage(".manifest.json", flip(40), {".manifest.json"});
  damage(".manifest.json", [](const fs::path& path) { fs::remove(path); },
         {".manifest.json", "missing", "--restore-manifest"});
  damage(last,  // the manifest of another checkpoint
         [&](const fs::path& path) {
           auto manifest = *checkpoint::read_manifest(path.parent_path());
           manifest.files[last].sums[0] ^= 1;
           checkpoint::write_manifest(path.parent_path(), manifest);
         },
         {".manifest.json", "another checkpoint"});
  listed = false;
  damage(".metadata",
         [](const fs::path& path) {  // a part is missing from the list
           auto metadata = checkpoint::read_metadata(path.parent_path());
           metadata.tensors.at("model.layers.3.weight").chunks.pop_back();
           std::ofstream(path, std::ios::binary) << checkpoint::encode(metadata);
         },
         {".metadata", "model.layers.3.weight", "don't cover"});
  damage(".metadata",
         [](const fs::path& path) {  // a tensor has the place of another
           auto metadata = checkpoint::read_metadata(path.parent_path());
           metadata.tensors.at("model.layers.3.weight").chunks[0].place =
               metadata.tensors.at("model.layers.2.bias").chunks[0].place;
           std::ofstream(path, std::ios::binary) << checkpoint::encode(metadata);
         },
         {".distcp", "model.layers.3.weight", "different tensor"});
  expect_error([&] { checkpoint::load(folder / "b", saved.sharded, nullptr); },
               {"no such checkpoint"});
}

TEST(Failures, ACheckpointOfTheSameNameIsReplaced) {
  SharedFolder folder;
  auto saved = one_unit();
  checkpoint::save(folder / "a", saved.sharded, saved.optimizer.get());
  saved.train(1);
  checkpoint::save(folder / "a/", saved.sharded, saved.optimizer.get());
  auto loaded = make_trained("mlp", {}, Rule::kAdamW, 8);
  checkpoint::load(folder / "latest", loaded.sharded, loaded.optimizer.get());
  expect_equal(snapshot(loaded), snapshot(saved));
  test_world().comm().barrier();
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path()))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"a", "latest"}));
}

// --- two worlds: reshard.sh runs Save in one world, then Load in worlds of other sizes ---

fs::path worlds_folder() {
  const char* folder = std::getenv("FSDP_TEST_FOLDER");
  return folder ? folder : "";
}

std::string file_name(const std::string& model, ShardingStrategy strategy) {
  return model + "-" + name(strategy);
}

TEST(Worlds, Save) {
  if (worlds_folder().empty()) GTEST_SKIP() << "reshard.sh sets FSDP_TEST_FOLDER";
  for (const auto& model : kModels)
    for (auto strategy : strategies()) {
      auto saved = make_trained(model, with_strategy(strategy));
      saved.train(2);
      const auto file = file_name(model, strategy);
      checkpoint::save(worlds_folder() / file, saved.sharded, saved.optimizer.get(),
                       {.per_rank = {{"rank", int64_t{rank()}}}});
      const auto whole = snapshot(saved);
      if (rank() == 0) write_snapshot(worlds_folder() / (file + ".whole"), whole);
    }
}

TEST(Worlds, Load) {
  if (worlds_folder().empty()) GTEST_SKIP() << "reshard.sh sets FSDP_TEST_FOLDER";
  int found = 0;
  for (const auto& model : kModels)
    for (auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::NO_SHARD,
                          ShardingStrategy::HYBRID_SHARD}) {
      const auto file = file_name(model, strategy);
      if (!fs::exists(worlds_folder() / file)) continue;
      SCOPED_TRACE(file);
      ++found;
      auto loaded = make_trained(model, {}, Rule::kAdamW, 8);
      const auto result =
          checkpoint::load(worlds_folder() / file, loaded.sharded, loaded.optimizer.get());
      expect_equal(snapshot(loaded), read_snapshot(worlds_folder() / (file + ".whole")));
      EXPECT_TRUE(result.per_rank.empty() ||
                  std::get<int64_t>(result.per_rank.at("rank")) == rank());
    }
  EXPECT_GE(found, 12);
}

}  // namespace
}  // namespace fsdp::testing
