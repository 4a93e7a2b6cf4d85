// events.jsonl of real runs, and the pages that `fsdp report` makes of them.
#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>

#include "train/runs.h"

namespace fsdp::train {
namespace {

using launch::Folder;
using launch::has;
namespace fs = std::filesystem;

std::vector<nlohmann::json> events(const Folder& folder, const std::string& run,
                                   const std::string& kind = "") {
  std::istringstream lines(folder.read(run + "/events.jsonl"));
  std::vector<nlohmann::json> all;
  for (std::string line; std::getline(lines, line);) {
    const auto event = nlohmann::json::parse(line);
    if (kind.empty() || event["event"] == kind) all.push_back(event);
  }
  return all;
}

TEST(RunEvents, TellWhatHappenedAndSurviveARestart) {
  Folder folder;
  const Words saves = {"--checkpoint.every", "4", "--checkpoint.when_busy", "wait",
                       "--train.eval_every", "4"};
  Said said = train(2, tiny_run(folder, "run", 8) + saves);
  ASSERT_EQ(said.code, 0) << said.err;
  ASSERT_EQ(events(folder, "run", "start").size(), 1u);
  const auto start = events(folder, "run", "start")[0];
  EXPECT_EQ(start["ranks"], 2);
  EXPECT_EQ(start["device"], "CPU");
  EXPECT_EQ(start["units"], 3);
  const auto memory = events(folder, "run", "memory");
  ASSERT_EQ(memory.size(), 1u);
  EXPECT_EQ(memory[0]["step"], 3);
  EXPECT_GT(memory[0]["held"]["activations"].get<int64_t>(), 0);
  EXPECT_GT(memory[0]["held"]["optimizer"].get<int64_t>(), 0);
  const auto checkpoints = events(folder, "run", "checkpoint");
  ASSERT_EQ(checkpoints.size(), 2u);
  EXPECT_EQ(checkpoints[1]["name"], "step-8");
  EXPECT_GT(checkpoints[0]["waited_ms"].get<double>(), 0);
  const auto ranks = events(folder, "run", "ranks").back()["ranks"];
  ASSERT_EQ(ranks.size(), 2u);
  for (int rank : {0, 1}) {
    EXPECT_EQ(ranks[rank]["rank"], rank);
    EXPECT_GT(ranks[rank]["step_ms"].get<double>(), 0);
    EXPECT_GE(ranks[rank]["step_ms"].get<double>(), ranks[rank]["comm_ms"].get<double>());
    EXPECT_GT(ranks[rank]["memory_mb"].get<double>(), 0);
  }
  EXPECT_EQ(events(folder, "run").back()["event"], "end");

  said = train(2, {"--dir", folder / "run", "--resume", "--steps", "10"});
  ASSERT_EQ(said.code, 0) << said.err;
  EXPECT_EQ(events(folder, "run", "start").size(), 1u) << "what was before stays";
  ASSERT_EQ(events(folder, "run", "resume").size(), 1u);
  EXPECT_EQ(events(folder, "run", "resume")[0]["step"], 8);
  EXPECT_EQ(metrics(folder, "run").size(), 10u);
}

TEST(RunEvents, HaveSkipsAndTheErrorThatEndsARun) {
  Folder folder;
  Said said =
      train(1, tiny_run(folder, "run", 20) +
                   Words{"--optim.lr", "1e30", "--train.clip", "0", "--optim.warmup_steps", "0",
                         "--optim.type", "sgd", "--optim.momentum", "0", "--train.max_skips", "2"});
  EXPECT_NE(said.code, 0);
  EXPECT_EQ(events(folder, "run", "skip").size(), 2u);
  const auto last = events(folder, "run").back();
  EXPECT_EQ(last["event"], "error");
  EXPECT_TRUE(has(last["text"], "times in a row")) << last;
}

TEST(Report, IsAPageOfARun) {
  Folder folder;
  ASSERT_EQ(train(2, tiny_run(folder, "one", 8) + Words{"--train.eval_every", "4"}).code, 0);
  Said said = fsdp({"report", folder / "one"});
  ASSERT_EQ(said.code, 0) << said.err;
  EXPECT_EQ(said.out, folder / "one/report.html" + "\n");
  const std::string page = folder.read("one/report.html");
  for (const char* text : {"Overview", "evaluation loss", "finished", "2 ranks, CPU", "rank 1",
                           "step-8", "optimizer states", "train.batch"})
    EXPECT_TRUE(has(page, text)) << text;
  EXPECT_FALSE(has(page, "There is no memory plan")) << "the config gives one";

  ASSERT_EQ(train(1, tiny_run(folder, "two", 8) + Words{"--train.seed", "7"}).code, 0);
  said = fsdp({"report", folder / "one", folder / "two", "-o", folder / "both.html"});
  ASSERT_EQ(said.code, 0) << said.err;
  const std::string both = folder.read("both.html");
  EXPECT_TRUE(has(both, "<tr class=\"differs\"><td class=\"code\">train.seed")) << "what differs";
  EXPECT_FALSE(has(both, "<tr class=\"differs\"><td class=\"code\">train.batch"));
}

TEST(Report, OfARunThatHasHardlyBegunSaysWhatIsMissing) {
  Folder folder;
  ASSERT_EQ(train(1, tiny_run(folder, "run", 2) + Words{"--checkpoint.at_end=false"}).code, 0);
  fs::remove(folder / "run/events.jsonl");  // as earlier versions wrote it
  fs::remove(folder / "run/config.toml");
  const Said said = fsdp({"report", folder / "run"});
  ASSERT_EQ(said.code, 0) << said.err;
  const std::string page = folder.read("run/report.html");
  EXPECT_TRUE(has(page, "There is no events.jsonl"));
  EXPECT_TRUE(has(page, "There is no config.toml"));
  EXPECT_TRUE(has(page, "There are no checkpoints"));
}

TEST(Report, WhatIsNoRunIsAnErrorWithAHint) {
  Folder folder;
  const Said said = fsdp({"report", folder / "nowhere"});
  EXPECT_EQ(said.code, 1);
  EXPECT_TRUE(has(said.err, "there is no directory")) << said.err;
  EXPECT_TRUE(has(said.err, "HINT: pass the directory of a run")) << said.err;
  EXPECT_EQ(fsdp({"report"}).code, 2);
}

}  // namespace
}  // namespace fsdp::train
