// fsdp plan from the outside: its JSON, world sizes, and what it refuses.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp {
namespace {

using Json = nlohmann::ordered_json;
using Words = std::vector<std::string>;

launch::Ended plan(Words arguments) {
  arguments.insert(arguments.begin(), {paths::program("fsdp"), "plan"});
  return launch::run_to_end(arguments, {"RANK", "WORLD_SIZE", "FSDP_BACKEND"});
}

std::vector<Json> rows_of(Words arguments) {
  arguments.push_back("--json");
  launch::Ended said = plan(arguments);
  EXPECT_EQ(said.code, 0) << said.err;
  std::vector<Json> rows;
  std::istringstream lines(said.out);
  for (std::string line; std::getline(lines, line);) {
    rows.push_back(Json::parse(line, nullptr, /*allow_exceptions=*/false));
    EXPECT_TRUE(rows.back().is_object()) << line;
  }
  return rows;
}

std::map<std::string, int64_t> kinds_of(Words arguments) {
  arguments.push_back("--no-survey");
  std::map<std::string, int64_t> kinds;
  for (const Json& row : rows_of(arguments))
    if (row.contains("kind")) kinds[row["kind"].get<std::string>()] = row["bytes"].get<int64_t>();
  return kinds;
}

bool has(const std::string& text, const std::string& word) {
  return text.find(word) != std::string::npos;
}

TEST(PlanCommand, AProgramLearnsWhetherItFits) {
  const Json verdict = rows_of({"demo", "--world", "2", "--no-survey"}).back();
  EXPECT_TRUE(verdict["fits"].get<bool>());
  EXPECT_GT(verdict["checkpoint_bytes"].get<double>(), 0);
  EXPECT_GE(verdict["checkpoint_every"].get<int64_t>(), 1);
  EXPECT_GT(verdict["bytes"], verdict["peak_bytes"]);
  EXPECT_GT(verdict["step_ms"], 0);
  EXPECT_GT(verdict["tokens_per_second"], 0);
  EXPECT_TRUE(verdict["advice"].is_array());
}

TEST(PlanCommand, SaysWhenItIsTheHostsMemoryThatLacks) {
  const Words asked = {"demo", "--no-survey", "--offload", "all", "--host-memory", "0.001"};
  Words several = asked;
  several.insert(several.end(), {"--world", "1,2"});
  const launch::Ended said = plan(several);
  EXPECT_TRUE(has(said.out, "the hosts don't")) << said.out;
  EXPECT_FALSE(has(said.out, "GPUs with more memory")) << said.out;
}

TEST(PlanCommand, TheFastestOfAWorldIsTheSameAmongOthersAndAlone) {
  const Words model = {"gpt2-124m", "--gpu", "4", "--json"};
  auto with = [&](const std::string& world) {
    Words words = model;
    words.insert(words.end(), {"--world", world});
    return rows_of(words);
  };
  for (const Json& row : with("1,2,8")) {
    double best = 0;
    for (const Json& choice : with(std::to_string(row["world"].get<int>())))
      if (choice.contains("fastest") && choice["fastest"].get<bool>())
        best = choice["tokens_per_second"];
    EXPECT_NEAR(row["tokens_per_second"].get<double>(), best, 1e-6 * best) << row;
  }
}

TEST(PlanCommand, SaysHowLongSequencesCanBe) {
  auto longest = [](const std::string& mode) {
    return rows_of(
        {"demo", "--gpu", "2", "--world", "1,2", "--max-seq", "--activations.mode", mode});
  };
  const std::vector<Json> none = longest("none"), with_tiles = longest("long");
  ASSERT_EQ(none.size(), 2);
  for (size_t i = 0; i < none.size(); ++i) {
    const auto tokens = none[i]["max_seq"].get<int64_t>();
    EXPECT_GE(tokens, 1024);
    EXPECT_LE(none[i]["bytes"].get<double>(), 2e9);
    EXPECT_GT(with_tiles[i]["max_seq"].get<int64_t>(), 2 * tokens);
    EXPECT_GT(with_tiles[i]["host_bytes"], 0);
    // It fits, and a tenth more doesn't.
    auto fits = [&](int64_t seq) {
      return rows_of({"demo", "--gpu", "2", "--world", std::to_string(i + 1), "--no-survey",
                      "--train.micro_batch", "1", "--data.seq", std::to_string(seq)})
          .back()["fits"]
          .get<bool>();
    };
    EXPECT_TRUE(fits(tokens));
    EXPECT_FALSE(fits(tokens * 11 / 10));
  }
  const launch::Ended said = plan({"gpt2-124m", "--max-seq"});
  EXPECT_EQ(said.code, 2);
  EXPECT_TRUE(has(said.err, "learned positions")) << said.err;
}

TEST(PlanCommand, EveryKindIsThere) {
  auto kinds = kinds_of({"gpt2-124m", "--gpu", "h100", "--world", "8"});
  for (const char* kind :
       {"parameters", "master", "gradients", "states", "gather_buffers", "communication",
        "activations", "logits", "temporaries", "workspaces", "fragmentation", "outside", "host"})
    EXPECT_TRUE(kinds.count(kind)) << kind;
  EXPECT_GT(kinds["logits"], 0);
  EXPECT_GT(kinds["activations"], 0);
  EXPECT_EQ(kinds["host"], 0);
}

TEST(PlanCommand, MoreIsKeptWhereFewerBlocksAreRecomputed) {
  auto kept = [](const Words& more) {
    Words words = {"demo", "--world", "2", "--train.micro_batch", "4"};
    words.insert(words.end(), more.begin(), more.end());
    return kinds_of(words)["activations"];
  };
  int64_t all = kept({}), none = kept({"--recompute", "full"});
  int64_t half = kept({"--recompute", "full", "--activations.every", "2"});
  EXPECT_LT(none, half);
  EXPECT_LT(half, all);
}

TEST(PlanCommand, RanksThatShareSequencesHoldTheirPart) {
  const Words model = {"llama-1b", "--world", "8", "--data.seq", "32768", "--batch", "8"};
  auto with = [&](const Words& context) {
    Words words = model;
    words.insert(words.end(), context.begin(), context.end());
    return words;
  };
  std::map<std::string, int64_t> whole = kinds_of(with({}));
  for (const char* kind : {"ulysses", "ring"}) {
    const Words shared =
        with({"--context.size", "4", "--context.kind", kind, "--train.micro_batch", "1"});
    std::map<std::string, int64_t> part = kinds_of(shared);
    const double share = static_cast<double>(part["activations"]) / whole["activations"];
    EXPECT_NEAR(share, 0.25, 0.04) << kind;
    EXPECT_EQ(part["states"], whole["states"]);
  }
}

TEST(PlanCommand, OffloadMovesStatesToTheHost) {
  Words words = {"demo", "--world", "2", "--offload", "optimizer"};
  auto kinds = kinds_of(words);
  EXPECT_EQ(kinds["states"], 0);
  EXPECT_GT(kinds["host"], 0);
}

TEST(PlanCommand, AFrozenBaseHasNoMastersGradientsOrStates) {
  const Words words = {"llama-1b", "--world", "2"}, adapters = {"--lora.rank", "8"};
  Words adapted = words;
  adapted.insert(adapted.end(), adapters.begin(), adapters.end());
  auto whole = kinds_of(words), some = kinds_of(adapted);
  for (const char* kind : {"master", "gradients", "states"}) {
    EXPECT_GT(some[kind], 0) << kind;
    EXPECT_LT(some[kind], whole[kind] / 50) << kind;
  }
  EXPECT_GT(some["parameters"], whole["parameters"] * 9 / 10);
  EXPECT_LT(some["parameters"], whole["parameters"] * 11 / 10);
  adapted.insert(adapted.end(), {"--offload", "optimizer"});
  EXPECT_LT(kinds_of(adapted)["host"], some["parameters"] / 10);
  adapted.push_back("--no-survey");
  const Json verdict = rows_of(adapted).back();
  EXPECT_LT(verdict["checkpoint_bytes"].get<double>(), 2.0 * double(some["states"]));
}

TEST(PlanCommand, AQuantisedBaseIsCountedInBytes) {
  const auto planned = [](const char* base) {
    return kinds_of({"llama-1b", "--world", "2", "--lora.rank", "8", "--lora.base", base});
  };
  auto plain = planned("plain"), nf4 = planned("nf4"), smaller = planned("nf4_double");
  // Blocks take 0.28 of their bytes in bf16; the embedding stays.
  EXPECT_LT(nf4["parameters"], plain["parameters"] / 2);
  EXPECT_LT(smaller["parameters"], nf4["parameters"]);
  EXPECT_EQ(nf4["states"], plain["states"]);
}

TEST(PlanCommand, ADirectoryTakesThemOffTheHost) {
  Words words = {"demo", "--world", "2", "--offload", "optimizer"};
  const int64_t host = kinds_of(words)["host"];
  words.insert(words.end(), {"--offload.directory", "/tmp"});
  auto kinds = kinds_of(words);
  EXPECT_GT(kinds["disk"], 0);
  EXPECT_LT(kinds["host"], host);
}

TEST(PlanCommand, TheSurveyHasEverySettingThatCanBeTrained) {
  std::set<std::string> strategies, recompute;
  int rows = 0, fastest = 0;
  for (const Json& row : rows_of({"demo", "--world", "16", "--gpu", "2"})) {
    if (!row.contains("strategy")) continue;
    ++rows;
    fastest += row["fastest"].get<bool>();
    strategies.insert(row["strategy"].get<std::string>());
    recompute.insert(row["recompute"].get<std::string>());
  }
  EXPECT_EQ(rows, 4 * 4 * 3 - 4);  // parameters of no_shard stay on the device
  EXPECT_EQ(fastest, 1);
  EXPECT_TRUE(strategies.count("hybrid_shard"));
  EXPECT_EQ(recompute, (std::set<std::string>{"none", "feed_forward", "full", "offload"}));
}

TEST(PlanCommand, AnMlpHasNoFeedForwards) {
  for (const Json& row : rows_of({"mlp-small", "--world", "2", "--gpu", "2"}))
    if (row.contains("recompute")) {
      EXPECT_NE(row["recompute"], "feed_forward");
    }
}

TEST(PlanCommand, ARangeOfWorldsIsDoubledAndEndsWhereItSays) {
  auto worlds = [](const char* text) {
    std::vector<int> found;
    for (const Json& row : rows_of({"mlp-small", "--gpu", "h100", "--no-survey", "--world", text}))
      found.push_back(row["world"].get<int>());
    return found;
  };
  EXPECT_EQ(worlds("2..16"), (std::vector{2, 4, 8, 16}));
  EXPECT_EQ(worlds("2..5"), (std::vector{2, 4, 5}));
  EXPECT_EQ(worlds("8,3"), (std::vector{8, 3}));
}

TEST(PlanCommand, ThatNothingFitsIsAnAnswer) {
  for (const char* world : {"2", "2,4"}) {
    launch::Ended said = plan({"mlp-small", "--gpu", "0.1", "--world", world});
    EXPECT_EQ(said.code, 0) << said.err;
    EXPECT_TRUE(has(said.out, "Nothing fits")) << said.out;
  }
}

TEST(PlanCommand, WhatCouldNotBeTrainedIsNotPlanned) {
  launch::Ended said = plan({"demo", "--world", "1", "--offload.fraction", "0.5"});
  EXPECT_NE(said.code, 0);
  EXPECT_TRUE(has(said.err, "nothing is offloaded")) << said.err;
}

TEST(PlanCommand, HowManyBlocksNeedNotBeRecomputedIsSaid) {
  launch::Ended said = plan({"demo", "--world", "1", "--recompute", "full", "--no-survey"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_TRUE(has(said.out, "activations.keep_last = 3 fits")) << said.out;  // of 4 layers
}

TEST(PlanCommand, BadWorldsAndGpusAreRefusedWithWhatToWrite) {
  for (const char* world :
       {"0", "-1", "x", "8..", "..8", "16..8", "8,,9", "8,", "8...16", "70000", "1e3"}) {
    launch::Ended said = plan({"mlp-small", "--world", world});
    EXPECT_NE(said.code, 0) << world;
    EXPECT_TRUE(has(said.err, "--world")) << world << "\n" << said.err;
    EXPECT_TRUE(has(said.err, "8..1024")) << world << "\n" << said.err;
  }
  for (const char* gpu : {"v100", "-3", "0", ""}) {
    launch::Ended said = plan({"mlp-small", "--gpu", gpu});
    EXPECT_NE(said.code, 0) << gpu;
    EXPECT_TRUE(has(said.err, "a100-40")) << said.err;
  }
}

}  // namespace
}  // namespace fsdp
