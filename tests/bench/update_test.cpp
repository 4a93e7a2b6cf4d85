// fsdp bench update from the outside.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp::bench {
namespace {

using nlohmann::json;

TEST(BenchUpdate, EveryMasterAndGradientHasARowForEveryWidthBesideLibTorchs) {
  launch::Launched program(
      {paths::program("fsdp"), "bench", "update", "--millions", "0.05", "--rounds", "1", "--json"},
      {"FSDP_CPU_WIDTH"});
  ASSERT_EQ(program.wait(), 0) << program.err();
  std::set<int> widths;
  std::multiset<std::string> ours;
  std::set<std::string> theirs;
  std::istringstream out(program.out());
  for (std::string line; std::getline(out, line);) {
    const json row = json::parse(line);
    EXPECT_GT(row["ms"], 0);
    EXPECT_GT(row["gb_per_s"], 0);
    if (row["width"].is_null()) {
      theirs.insert(row["what"]);
      continue;
    }
    widths.insert(row["width"].get<int>());
    ours.insert(row["what"].get<std::string>() + ", " + row["gradient"].get<std::string>());
  }
  EXPECT_TRUE(widths.count(16));
  EXPECT_EQ(theirs, (std::set<std::string>{"LibTorch, fused", "LibTorch, fused, and copy"}));
  for (const char* row : {"split master, bf16", "split master, fp32", "master and copy, bf16",
                          "master and copy, fp32"})
    EXPECT_EQ(ours.count(row), widths.size()) << row;
}

TEST(BenchUpdate, AWidthThatNoCpuHasIsRefused) {
  launch::Launched program({paths::program("fsdp"), "bench", "update", "--millions", "0.01"},
                           {"FSDP_CPU_WIDTH=24"});
  EXPECT_EQ(program.wait(), 1);
  EXPECT_NE(program.err().find("FSDP_CPU_WIDTH=24"), std::string::npos) << program.err();
}

}  // namespace
}  // namespace fsdp::bench
