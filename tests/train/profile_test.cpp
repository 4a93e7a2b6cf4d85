// fsdp train --profile: the table, a trace of every rank, and losses that don't change.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "train/runs.h"

namespace fsdp::train {
namespace {

using launch::Folder;
using launch::has;
namespace fs = std::filesystem;

// The names of a rank's events, and of its process.
std::set<std::string> names_in(const fs::path& trace, int rank) {
  std::ifstream file(trace);
  nlohmann::json json = nlohmann::json::parse(file);
  std::set<std::string> names;
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("pid") != rank) continue;
    const std::string name = event.value("name", "");
    names.insert(name == "process_name" ? event.at("args").at("name").get<std::string>() : name);
  }
  return names;
}

// Milliseconds by family, and the step's.
std::pair<double, double> sum_and_step(const nlohmann::json& profile) {
  double sum = 0;
  for (const auto& family : profile.at("families")) sum += family.at("ms").get<double>();
  return {sum, profile.at("traced_ms").get<double>()};
}

// The words of the line that begins with `unit` and `pass`.
Words row(const std::string& text, const std::string& unit, const std::string& pass) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream in(line);
    Words words;
    for (std::string word; in >> word;) words.push_back(word);
    if (words.size() > 2 && words[0] == unit && words[1] == pass) return words;
  }
  return {};
}

TEST(TrainProfile, ATableAndATraceOfEveryRank) {
  Folder folder;
  Said said = train(2, tiny_run(folder, "run", 8) +
                           Words{"--profile", "2", "--shard.share_host_memory", "false"});
  ASSERT_EQ(said.code, 0) << said.err;
  EXPECT_TRUE(has(said.out, "2 steps of")) << said.out;
  EXPECT_TRUE(has(said.out, "rank 0 of 2")) << said.out;
  EXPECT_TRUE(has(said.out, "activations")) << said.out;
  EXPECT_TRUE(has(said.out, "planned")) << "after step 3\n" << said.out;
  EXPECT_FALSE(has(said.err, "than planned")) << said.err;
  EXPECT_FALSE(has(said.out, "measured peak")) << "nothing is measured on the CPU";
  // unit, pass, gathers, median, max, sent (two words), …
  for (const char* unit : {"model.layers.0", "model.layers.1", "root"}) {
    Words forward = row(said.out, unit, "forward"), backward = row(said.out, unit, "backward");
    ASSERT_GT(forward.size(), 3u) << unit << "\n" << said.out;
    ASSERT_GT(backward.size(), 3u) << unit;
    EXPECT_EQ(forward[2], "1") << unit << " is gathered once in forward";
  }
  for (int rank : {0, 1}) {
    std::set<std::string> names = names_in(folder / "run/trace.json", rank);
    for (const char* name :
         {"gather model.layers.1", "reduce model.layers.1", "reshard model.layers.1",
          "wait for model.layers.1", "gather root", "reduce root", "step 6", "forward", "backward",
          "update", "model.layers.1"})
      EXPECT_TRUE(names.count(name)) << name << ", rank " << rank;
    const std::string process = *names.lower_bound("rank ");
    EXPECT_TRUE(process.starts_with("rank " + std::to_string(rank) + " (")) << process;
    EXPECT_FALSE(fs::exists(folder / ("run/trace-rank" + std::to_string(rank) + ".part")));
  }
  EXPECT_FALSE(has(said.err, "RecordFunction")) << said.err;
  const nlohmann::json profile = nlohmann::json::parse(folder.read("run/profile.json"));
  ASSERT_EQ(profile.at("ranks").size(), 2u);
  for (const auto& part : {profile, profile["ranks"][0], profile["ranks"][1]}) {
    const auto [sum, step] = sum_and_step(part);
    EXPECT_NEAR(sum, step, 1e-3 * step);
  }
  EXPECT_TRUE(has(folder.read("run/profile.html"), "Where the time goes"));
  // A resumed run isn't profiled again.
  std::ifstream config(folder / "run/config.toml");
  std::stringstream text;
  text << config.rdbuf();
  EXPECT_TRUE(has(text.str(), "profile = 0")) << text.str();
}

TEST(TrainProfile, ShowsExchangesOfSharedSequences) {
  Folder folder;
  for (const char* kind : {"ulysses", "ring"}) {
    Said said = train(2, tiny_run(folder, kind, 6) + Words{"--profile", "1", "--context.size", "2",
                                                           "--context.kind", kind});
    ASSERT_EQ(said.code, 0) << said.err;
    EXPECT_TRUE(has(said.out, "communication, exposed")) << said.out;
    const std::set<std::string> names = names_in(folder / (std::string(kind) + "/trace.json"), 1);
    EXPECT_TRUE(names.count("comm all_to_all")) << kind;
    EXPECT_EQ(names.count("fsdp::exchange"), kind == std::string("ulysses")) << kind;
    EXPECT_EQ(names.count("comm wait for the ring"), kind == std::string("ring")) << kind;
  }
}

TEST(TrainProfile, OneRankSeesWhereItsTimeWent) {
  Folder folder;
  Said said = train(1, tiny_run(folder, "run", 8) + Words{"--profile", "2"});
  ASSERT_EQ(said.code, 0) << said.err;
  EXPECT_TRUE(row(said.out, "root", "forward").empty()) << "nothing is sent\n" << said.out;
  EXPECT_FALSE(has(said.out, "all units")) << said.out;
  EXPECT_FALSE(has(said.out, "communication, exposed")) << said.out;
  for (const char* text : {"products", "attention", "norms", "loss", "optimizer",
                           "longest operators", "aten::mm", "model.layers.1"})
    EXPECT_TRUE(has(said.out, text)) << text << "\n" << said.out;
  const nlohmann::json profile = nlohmann::json::parse(folder.read("run/profile.json"));
  EXPECT_EQ(profile["kernels"].size(), 10u);
  for (const auto& family : profile["families"]) {
    EXPECT_GT(family["ms"].get<double>(), 0) << family;
    if (family["name"] == "products") {
      EXPECT_GT(family["tflops"].get<double>(), 0) << family;
    }
  }
  double forward = 0, backward = 0;
  for (const auto& unit : profile["units"]) {
    forward += unit["forward_ms"].get<double>();
    backward += unit["backward_ms"].get<double>();
  }
  EXPECT_GT(forward, 0);
  EXPECT_GT(backward, 0);
}

TEST(TrainProfile, ChangesNoLoss) {
  Folder folder;
  ASSERT_EQ(train(2, tiny_run(folder, "plain", 8)).code, 0);
  ASSERT_EQ(train(2, tiny_run(folder, "seen", 8) + Words{"--profile", "3"}).code, 0);
  EXPECT_EQ(losses(folder, "seen"), losses(folder, "plain"));
}

TEST(TrainProfile, ARunThatIsTooShortSaysWhatIsMissing) {
  Folder folder;
  Said short_run = train(1, tiny_run(folder, "short", 5) + Words{"--profile", "10"});
  ASSERT_EQ(short_run.code, 0) << short_run.err;
  EXPECT_TRUE(has(short_run.out, "2 of the 10 steps")) << short_run.out;
  EXPECT_FALSE(fs::exists(folder / "short/trace.json"));
  Said untraced = train(1, tiny_run(folder, "untraced", 5) + Words{"--profile", "2"});
  EXPECT_TRUE(has(untraced.out, "before a step was traced")) << untraced.out;
  Said nothing = train(1, tiny_run(folder, "nothing", 3) + Words{"--profile", "1"});
  ASSERT_EQ(nothing.code, 0) << nothing.err;
  EXPECT_TRUE(has(nothing.out, "nothing was profiled")) << nothing.out;
}

}  // namespace
}  // namespace fsdp::train
