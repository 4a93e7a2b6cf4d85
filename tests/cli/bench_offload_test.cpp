// fsdp bench offload: the sum of its parts, and the command from the outside on the CPU.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "cli/step_split.h"
#include "launch/launched.h"

namespace fsdp::cli {
namespace {

using nlohmann::json;
using Parts = std::array<int64_t, kParts>;

TEST(StepSplit, EveryMomentBelongsToTheFirstThatWasGoingOn) {
  const std::vector<Span> spans = {{Activity::kCpu, 0, 50},      {Activity::kKernel, 10, 20},
                                   {Activity::kKernel, 15, 30},  {Activity::kMemcpy, 25, 40},
                                   {Activity::kRuntime, 45, 60}, {Activity::kLoading, 70, 80}};
  EXPECT_EQ(split(spans, 0, 100), (Parts{20, 10, 0, 15, 10, 15, 30}));
}

TEST(StepSplit, WhatLiesOutsideIsCutOff) {
  const std::vector<Span> spans = {{Activity::kKernel, -10, 10}, {Activity::kMemset, 90, 200}};
  EXPECT_EQ(split(spans, 5, 100), (Parts{5, 0, 10, 0, 0, 0, 80}));
  EXPECT_EQ(split({}, 5, 100), (Parts{0, 0, 0, 0, 0, 0, 95}));
}

TEST(StepSplit, SharesAddUpToTheWhole) {
  EXPECT_EQ(shares({1, 1, 1, 0, 0, 0, 0}), (Parts{3334, 3333, 3333, 0, 0, 0, 0}));
  EXPECT_EQ(shares({}), Parts{});
  const Parts found = shares({7, 1, 13, 29, 3, 101, 11});
  EXPECT_EQ(std::accumulate(found.begin(), found.end(), int64_t{0}), 10000);
}

TEST(BenchOffload, MovesMemoryAndKeepsTheLoss) {
  launch::Launched program(
      {FSDP_BINARY, "bench",    "offload", "--layers", "2", "--dim",   "32", "--heads",
       "2",         "--vocab",  "64",      "--seq",    "8", "--batch", "1",  "--steps",
       "2",         "--warmup", "1",       "--ranks",  "2", "--json"},
      {"RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_TIMEOUT"});
  ASSERT_EQ(program.wait(), 0) << program.err();
  std::map<std::string, json> rows;
  std::map<std::string, double> percent;
  std::istringstream out(program.out());
  for (std::string line; std::getline(out, line);) {
    const json found = json::parse(line);
    if (found.contains("part"))
      percent[found["offload"]] += found["percent"].get<double>();
    else
      rows[found["offload"]] = found;
  }
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows["off"]["host_bytes"], 0);
  for (const char* away : {"optimizer", "everything"}) {
    EXPECT_EQ(rows[away]["loss"], rows["off"]["loss"]) << away;
    EXPECT_GT(rows[away]["host_bytes"], 0) << away;
    EXPECT_LT(rows[away]["device_bytes"], rows["off"]["device_bytes"]) << away;
  }
  EXPECT_LT(rows["everything"]["device_bytes"], rows["optimizer"]["device_bytes"]);
  ASSERT_EQ(percent.size(), 3u);
  for (const auto& [name, sum] : percent) EXPECT_NEAR(sum, 100, 1e-6) << name;
}

}  // namespace
}  // namespace fsdp::cli
