#include "launch/environment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "launch/launched.h"

namespace fsdp::launch {
namespace {

bool nothing_set(const char*) {
  return false;
}

std::map<std::string, std::string> variables(const Plan& plan, int node, int local, int cores,
                                             bool (*is_set)(const char*) = nothing_set) {
  auto list = rank_variables(plan, node, local, cores, is_set);
  return {list.begin(), list.end()};
}

Plan uneven_plan() {
  return {.run_id = "abc",
          .nprocs = {2, 3, 1},
          .master_host = "node0",
          .master_port = 1234,
          .max_restarts = 5,
          .restart = 2};
}

TEST(RankVariables, MatchTorchrunOnUnevenNodes) {
  auto found = variables(uneven_plan(), 1, 2, 64);
  std::map<std::string, std::string> expected = {
      {"RANK", "4"},
      {"WORLD_SIZE", "6"},
      {"LOCAL_RANK", "2"},
      {"LOCAL_WORLD_SIZE", "3"},
      {"GROUP_RANK", "1"},
      {"NODE_RANK", "1"},
      {"GROUP_WORLD_SIZE", "3"},
      {"ROLE_NAME", "default"},
      {"ROLE_RANK", "4"},
      {"ROLE_WORLD_SIZE", "6"},
      {"MASTER_ADDR", "node0"},
      {"MASTER_PORT", "1234"},
      {"TORCHELASTIC_RESTART_COUNT", "2"},
      {"TORCHELASTIC_MAX_RESTARTS", "5"},
      {"TORCHELASTIC_RUN_ID", "abc"},
      {"FSDP_RUN", "1"},
      {"OMP_NUM_THREADS", "21"},
      {"PYTHONUNBUFFERED", "1"},
  };
  EXPECT_EQ(found, expected);
}

TEST(RankVariables, RanksAreNumberedAcrossNodes) {
  Plan plan = uneven_plan();
  int expected = 0;
  for (int node = 0; node < 3; ++node) {
    for (int local = 0; local < plan.nprocs[node]; ++local) {
      EXPECT_EQ(variables(plan, node, local, 1)["RANK"], std::to_string(expected++));
    }
  }
  EXPECT_EQ(expected, plan.world());
}

TEST(RankVariables, ThreadsAreAtLeastOneAndTheUsersIfSet) {
  EXPECT_EQ(variables(uneven_plan(), 0, 0, 1)["OMP_NUM_THREADS"], "1");
  auto found = variables(uneven_plan(), 0, 0, 64, [](const char* name) {
    return std::strcmp(name, "OMP_NUM_THREADS") == 0;
  });
  EXPECT_EQ(found.count("OMP_NUM_THREADS"), 0u);
}

TEST(MergedEnvironment, OverridesVariablesAndDropsAnOuterAgentsStore) {
  setenv("RANK", "17", 1);
  setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  setenv("FSDP_LAUNCH_TEST", "kept", 1);
  auto merged = merged_environment({{"RANK", "1"}});
  auto count = [&](const std::string& prefix) {
    return std::count_if(merged.begin(), merged.end(),
                         [&](const std::string& entry) { return entry.starts_with(prefix); });
  };
  EXPECT_EQ(count("RANK="), 1);
  EXPECT_EQ(count("RANK=1"), 1);
  EXPECT_EQ(count("FSDP_LAUNCH_TEST=kept"), 1);
  EXPECT_EQ(count("TORCHELASTIC_USE_AGENT_STORE"), 0);
  for (const char* name : {"RANK", "TORCHELASTIC_USE_AGENT_STORE", "FSDP_LAUNCH_TEST"})
    unsetenv(name);
}

void write(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << text;
}

TEST(QuotaCores, TakesTheSmallestOfAGroupAndItsParents) {
  Folder root;
  write(root / "slice/job/cpu.max", "max 100000\n");
  write(root / "slice/cpu.max", "250000 100000\n");
  EXPECT_EQ(quota_cores(root.path(), "0::/slice/job\n"), 3);  // 2.5, rounded up
  write(root / "slice/job/cpu.max", "100000 100000\n");
  EXPECT_EQ(quota_cores(root.path(), "0::/slice/job\n"), 1);
  EXPECT_EQ(quota_cores(root.path(), "0::/elsewhere\n"), 0);
}

TEST(QuotaCores, ReadsCgroupVersionOneToo) {
  Folder root;
  write(root / "cpu/job/cpu.cfs_quota_us", "400000\n");
  write(root / "cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota_cores(root.path(), "3:memory:/x\n2:cpuacct,cpu:/job\n"), 4);
  write(root / "cpu/job/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(quota_cores(root.path(), "2:cpuacct,cpu:/job\n"), 0);
}

TEST(QuotaCores, IgnoresMalformedFiles) {
  Folder root;
  write(root / "cpu.max", "lots of them\n");
  EXPECT_EQ(quota_cores(root.path(), "0::/\n:\n\nx\n"), 0);
}

TEST(VisibleGpus, FollowsCudaVisibleDevices) {
  EXPECT_EQ(visible_gpus(4, nullptr), 4);
  EXPECT_EQ(visible_gpus(4, ""), 0);
  EXPECT_EQ(visible_gpus(4, "1,3"), 2);
  EXPECT_EQ(visible_gpus(4, "0,-1,2"), 1);
  EXPECT_EQ(visible_gpus(2, "0,1,2,3"), 2);
  EXPECT_EQ(visible_gpus(0, nullptr), 0);
}

}  // namespace
}  // namespace fsdp::launch
