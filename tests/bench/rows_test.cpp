// fsdp bench train --rows from the outside, on the CPU with the smallest row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp {
namespace {

using launch::has;
using nlohmann::json;

struct Rows {
  int code = -1;
  std::string err;
  std::vector<json> lines;
};

Rows bench_rows(std::vector<std::string> arguments) {
  std::vector<std::string> words = {
      paths::program("fsdp"), "bench", "train", "--device", "cpu", "--json"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  launch::Launched program(words, {"RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_TIMEOUT"});
  Rows rows;
  rows.code = program.wait();
  rows.err = program.err();
  std::istringstream out(program.out());
  for (std::string line; std::getline(out, line);) rows.lines.push_back(json::parse(line));
  return rows;
}

TEST(BenchRows, AnUnknownRowIsRefusedWithTheKnownOnes) {
  Rows rows = bench_rows({"--rows", "182m,nothing"});
  EXPECT_EQ(rows.code, 1);
  EXPECT_TRUE(has(rows.err, "there is no row \"nothing\"."));
  EXPECT_TRUE(has(rows.err, "182m, 953m, mlp, 117m, qwen0.5b, qwen1.5b, qwen3b, 3.6b, "));
}

TEST(BenchRows, EveryModeHasTheSameLossAndIsKept) {
  launch::Folder folder;
  std::string kept = folder / "kept.jsonl", page = folder / "page.md";
  std::vector<std::string> arguments = {"--rows", "tiny",   "--steps", "1",       "--warmup",
                                        "1",      "--keep", kept,      "--write", page};
  Rows rows = bench_rows(arguments);
  ASSERT_EQ(rows.code, 0) << rows.err;
  ASSERT_EQ(rows.lines.size(), 3U);  // eager, graph, plain
  for (const json& line : rows.lines) {
    EXPECT_GT(line["step_ms"].get<double>(), 0) << line;
    EXPECT_GT(line["tokens_s"].get<double>(), 0) << line;
    // Fused weights of a unit round differently.
    EXPECT_NEAR(line["first_loss"].get<double>(), rows.lines[0]["first_loss"].get<double>(), 1e-3);
    EXPECT_NEAR(line["last_loss"].get<double>(), rows.lines[0]["last_loss"].get<double>(), 5e-3);
    EXPECT_LT(line["last_loss"], line["first_loss"]);
  }

  std::string before = folder.read("kept.jsonl");
  EXPECT_EQ(std::count(before.begin(), before.end(), '\n'), 3);
  EXPECT_TRUE(has(folder.read("page.md"), "\"ours\":\"graph\""));
  EXPECT_TRUE(has(folder.read("page.md"), "| command | `./fsdp bench train --device cpu"));

  Rows again = bench_rows(arguments);
  EXPECT_EQ(again.lines, rows.lines) << "kept rows are not measured again";
  EXPECT_EQ(folder.read("kept.jsonl"), before);
}

TEST(BenchRows, RecomputationKeepsLessAndChangesNoLoss) {
  std::map<std::string, json> raw;
  for (const char* mode : {"none", "selective", "feed_forward", "full", "offload"}) {
    launch::Folder folder;
    Rows rows = bench_rows({"--rows", "tiny", "--mode", "eager", "--steps", "1", "--warmup", "1",
                            "--activations", mode, "--keep", folder / "kept.jsonl"});
    ASSERT_EQ(rows.code, 0) << rows.err;
    raw[mode] = json::parse(folder.read("kept.jsonl"))["line"];
    EXPECT_EQ(raw[mode]["loss0"], raw["none"]["loss0"]) << mode;
    EXPECT_EQ(raw[mode]["loss"], raw["none"]["loss"]) << mode;
  }
  auto planned = [&](const char* mode) { return raw[mode]["planned_mb"].get<double>(); };
  EXPECT_GT(planned("full"), 0);
  EXPECT_LT(planned("full"), planned("none"));
  auto kept = [&](const char* mode) { return raw[mode]["activations_mb"].get<double>(); };
  EXPECT_NEAR(kept("selective"), kept("none"), 0.01 * kept("none"));  // layers do so themselves
  EXPECT_LT(kept("feed_forward"), kept("none"));
  EXPECT_LT(kept("full"), kept("feed_forward"));
}

TEST(BenchRows, WeightsDrawnOnTheDeviceAreTheSameWithAndWithoutSharding) {
  Rows rows = bench_rows({"--rows", "tiny", "--mode", "eager,plain", "--steps", "1", "--warmup",
                          "1", "--init", "device"});
  ASSERT_EQ(rows.code, 0) << rows.err;
  ASSERT_EQ(rows.lines.size(), 2U);
  const double loss = rows.lines.front()["first_loss"], plain = rows.lines.back()["first_loss"];
  EXPECT_NEAR(loss, plain, 1e-3);  // bf16: the layers of both differ in where they round
  // Weights this small say nothing: any of 256 tokens may come next.
  EXPECT_NEAR(loss, std::log(256), 0.1);
  EXPECT_GT(std::abs(loss - std::log(256)), 1e-5) << "weights are zero";
  EXPECT_LT(rows.lines.front()["last_loss"], loss);
}

TEST(BenchRows, RecordingIsTimedBesideTheSameForward) {
  launch::Folder folder;
  Rows rows = bench_rows({"--rows", "tiny", "--mode", "tape", "--steps", "4", "--warmup", "1",
                          "--keep", folder / "kept.jsonl"});
  ASSERT_EQ(rows.code, 0) << rows.err;
  ASSERT_EQ(rows.lines.size(), 1U);  // it has a table of its own
  const json& line = rows.lines.front();
  const double without = line["forward_ms"], with = line["recorded_forward_ms"];
  EXPECT_GT(without, 0);
  EXPECT_NEAR(line["more_percent"].get<double>(), (with / without - 1) * 100, 0.1);
  const json raw = json::parse(folder.read("kept.jsonl"))["line"];
  EXPECT_EQ(raw["recorded_loss"], raw["loss"]);
}

TEST(BenchRows, AStartThatFailsCostsItsOwnLine) {
  Rows rows = bench_rows({"--rows", "tiny", "--mode", "plain,eager", "--backend", "none"});
  EXPECT_EQ(rows.code, 1);
  ASSERT_EQ(rows.lines.size(), 2U) << rows.err;
  for (const json& line : rows.lines) {
    EXPECT_TRUE(line["step_ms"].is_null()) << line;
    EXPECT_TRUE(has(line["what"].get<std::string>(), ": failed"));
  }
}

}  // namespace
}  // namespace fsdp
