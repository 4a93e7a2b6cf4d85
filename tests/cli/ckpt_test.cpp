// fsdp ckpt inspect, verify and diff from the outside, on checkpoints of real runs.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "train/runs.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using launch::has;
using Json = nlohmann::json;
using train::Said;

class Ckpt : public testing::Test {
 protected:
  // A run on two ranks with the checkpoints step-1 and step-2.
  void train_run(const std::string& name) {
    auto words = train::tiny_run(folder, name, 2);
    words.insert(words.end(), {"--checkpoint.every", "1", "--checkpoint.when_busy", "wait",
                               "--checkpoint.keep_last", "0"});
    const auto said = train::train(2, words);
    ASSERT_EQ(said.code, 0) << said.err;
  }
  Said ckpt(train::Words words) {
    words.insert(words.begin(), "ckpt");
    return train::fsdp(std::move(words));
  }
  Json json_of(train::Words words, int code = 0) {
    words.push_back("--json");
    const auto said = ckpt(std::move(words));
    EXPECT_EQ(said.code, code) << said.err;
    return Json::parse(said.out, nullptr, /*allow_exceptions=*/false);
  }
  std::string step(const std::string& run, int step) {
    return folder / (run + "/checkpoints/step-" + std::to_string(step));
  }

  launch::Folder folder;
};

TEST_F(Ckpt, InspectShowsWhatIsThere) {
  train_run("a");
  auto said = ckpt({"inspect", folder / "a"});
  EXPECT_EQ(said.code, 0) << said.err;
  for (const char* words :
       {"step        2", "by 2 ranks", "llama", "checksums   manifest", "__1_0.distcp",
        "extra.seed", "model.model.layers.{0..1}.mlp.up_proj.weight", "[64, 32]", "float32",
        "optim.state.model.layers.{0..1}.mlp.up_proj.weight.exp_avg_sq"})
    EXPECT_TRUE(has(said.out, words));
  EXPECT_EQ(said.out.find("layers.0."), std::string::npos);
  EXPECT_LT(said.out.find("model.model.norm"), said.out.find("optim.state.model.norm"));
  EXPECT_EQ(said.out, ckpt({"inspect", folder / "a/checkpoints"}).out);

  said = ckpt({"inspect", step("a", 1), "--tensors", "--filter", "^model.*(up|down)_proj"});
  EXPECT_TRUE(has(said.out, "step        1"));
  EXPECT_TRUE(has(said.out, "model.model.layers.0.mlp.up_proj.weight"));
  EXPECT_TRUE(has(said.out, "model.model.layers.1.mlp.down_proj.weight"));
  EXPECT_EQ(said.out.find("optim.state"), std::string::npos);
  EXPECT_EQ(said.out.find("gate_proj"), std::string::npos);

  const auto all = json_of({"inspect", folder / "a"});
  ASSERT_TRUE(all.is_object());
  EXPECT_EQ(all["step"], 2);
  EXPECT_EQ(all["ranks"], 2);
  EXPECT_EQ(all["manifest"], true);
  EXPECT_EQ(all["bytes"]["model"], all["parameters"].get<int64_t>() * 4);
  int64_t elements = 0, shards = 0;
  for (const auto& tensor : all["tensors"]) {
    if (!tensor["name"].get<std::string>().starts_with("model.")) continue;
    elements += tensor["bytes"].get<int64_t>() / 4;
    int64_t covered = 0;
    for (const auto& shard : tensor["shards"]) {
      int64_t part = 4;
      for (const auto& size : shard["sizes"]) part *= size.get<int64_t>();
      covered += part;
      ++shards;
    }
    EXPECT_EQ(covered, tensor["bytes"]) << tensor["name"];
  }
  EXPECT_EQ(elements, all["parameters"]);
  EXPECT_GT(shards, 20);
  EXPECT_TRUE(all["values"]["extra.config"].get<std::string>().find("[model]") !=
              std::string::npos);

  said = ckpt({"inspect", folder / "a", "--filter", "("});
  EXPECT_EQ(said.code, 2);
  EXPECT_TRUE(has(said.err, "isn't a valid regular expression"));
  EXPECT_EQ(ckpt({"inspect", folder / "none"}).code, 1);
}

TEST_F(Ckpt, VerifyFindsWhatChanged) {
  train_run("a");
  auto said = ckpt({"verify", folder / "a"});
  EXPECT_EQ(said.code, 0) << said.out << said.err;
  EXPECT_TRUE(has(said.out, "good: every block matches its checksum in the manifest"));
  EXPECT_EQ(said.err, "");

  // What Python would have written has no manifest, and .metadata doesn't say that there was one.
  const std::string plain = folder / "plain";
  fs::copy(step("a", 2), plain);
  fs::remove(plain + "/.manifest.json");
  said = ckpt({"verify", plain});
  EXPECT_EQ(said.code, 65);
  EXPECT_TRUE(has(said.out, ".manifest.json: is missing"));
  std::string metadata = folder.read("plain/.metadata");
  const std::string mark = "fsdp manifest ", other = "made by Python";
  ASSERT_NE(metadata.find(mark), std::string::npos);
  metadata.replace(metadata.find(mark), mark.size(), other);
  std::ofstream(plain + "/.metadata", std::ios::binary) << metadata;
  said = ckpt({"verify", plain});
  EXPECT_EQ(said.code, 0) << said.out << said.err;
  EXPECT_TRUE(has(said.out, "CRC-32"));

  // A byte in the middle of a tensor, and a name that would turn a terminal red.
  const auto all = json_of({"inspect", plain});
  for (const auto& tensor : all["tensors"]) {
    if (tensor["name"] != "model.model.embed_tokens.weight") continue;
    const auto& shard = tensor["shards"][0];
    const int64_t middle = shard["at"].get<int64_t>() + shard["length"].get<int64_t>() / 2;
    for (const auto& dir : {plain, step("a", 2)}) {
      std::fstream file(dir + "/" + shard["file"].get<std::string>(),
                        std::ios::binary | std::ios::in | std::ios::out);
      file.seekg(middle);
      const int byte = file.get();
      file.seekp(middle);
      file.put(static_cast<char>(byte ^ 1));
    }
  }
  std::ofstream(plain + "/\033[31mred") << "x";
  for (const auto& dir : {plain, step("a", 2)}) {
    said = ckpt({"verify", dir});
    EXPECT_EQ(said.code, 65) << said.out << said.err;
    EXPECT_TRUE(has(said.out, "differs from what was written"));
    EXPECT_TRUE(has(said.out, "model.model.embed_tokens.weight"));
    EXPECT_EQ(said.out.find('\033'), std::string::npos);
  }
  const auto found = json_of({"verify", plain}, 65);
  EXPECT_EQ(found["ok"], false);
  EXPECT_EQ(found["sums"], "crc32");
  EXPECT_EQ(found["problems"].size(), 2u);
  // The older one is as it was.
  EXPECT_EQ(ckpt({"verify", step("a", 1)}).code, 0);
}

TEST_F(Ckpt, DiffTellsEqualFromDifferent) {
  train_run("a");
  auto said = ckpt({"diff", step("a", 2), folder / "a"});
  EXPECT_EQ(said.code, 0) << said.out << said.err;
  EXPECT_TRUE(has(said.out, "0 differences"));

  said = ckpt({"diff", step("a", 1), step("a", 2)});
  EXPECT_EQ(said.code, 1) << said.err;
  for (const char* words : {"extra.step", "1 → 2", "model.model.layers.{0..1}.mlp.up_proj.weight",
                            "values", "optim.state.model.norm.weight.exp_avg"})
    EXPECT_TRUE(has(said.out, words));
  said = ckpt({"diff", step("a", 1), step("a", 2), "--model-only", "--json"});
  EXPECT_EQ(said.code, 1);
  std::istringstream lines(said.out);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const auto row = Json::parse(line, nullptr, false);
    ASSERT_TRUE(row.is_object()) << line;
    EXPECT_TRUE(row["name"].get<std::string>().starts_with("model."));
    EXPECT_EQ(row["difference"], "values");
    EXPECT_GT(row["largest"].get<double>(), 0);
    EXPECT_LE(row["differing"], row["elements"]);
  }
  EXPECT_GT(count, 10);
  said = ckpt({"diff", step("a", 1), step("a", 2), "--model-only", "--tolerance", "1"});
  EXPECT_EQ(said.code, 0) << said.out << said.err;
  said = ckpt({"diff", step("a", 1), folder / "none"});
  EXPECT_EQ(said.code, 2);
  EXPECT_TRUE(has(said.err, "there is no directory"));
}

TEST_F(Ckpt, HuggingFaceDirectoriesAreLookedAtAsWell) {
  train_run("a");
  for (const std::string dtype : {"fp32", "bf16"}) {
    const auto said = ckpt({"export", folder / "a", folder / dtype, "--dtype", dtype});
    ASSERT_EQ(said.code, 0) << said.err;
  }
  auto said = ckpt({"diff", folder / "a", folder / "fp32"});
  EXPECT_EQ(said.code, 0) << said.out << said.err;
  EXPECT_TRUE(has(said.out, "model only"));
  said = ckpt({"diff", folder / "a", folder / "bf16"});
  EXPECT_EQ(said.code, 1);
  EXPECT_TRUE(has(said.out, "float32 → bfloat16"));
  EXPECT_EQ(ckpt({"diff", folder / "a", folder / "bf16", "--tolerance", "0.01"}).code, 0);

  const auto all = json_of({"inspect", folder / "bf16"});
  EXPECT_EQ(all["format"], "huggingface");
  EXPECT_EQ(all["parameters"], json_of({"inspect", folder / "a"})["parameters"]);
  said = ckpt({"verify", folder / "fp32"});
  EXPECT_EQ(said.code, 0) << said.out << said.err;
  EXPECT_TRUE(has(said.out, "no checksums"));
  fs::resize_file(folder / "fp32/model.safetensors",
                  fs::file_size(folder / "fp32/model.safetensors") - 4);
  said = ckpt({"verify", folder / "fp32"});
  EXPECT_EQ(said.code, 65);
  EXPECT_TRUE(has(said.out, "model.safetensors"));
}

}  // namespace
}  // namespace fsdp
