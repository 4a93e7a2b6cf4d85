// Every operation on every backend with real processes; shm and mpi give the same bits.
#include "comm/ranks.h"
#include "paths.h"

namespace fsdp::testing {
namespace {

struct Case {
  std::string backend;
  int ranks;
};

std::vector<std::string> run_collectives(const Case& test) {
  Ranks ranks;
  Ranks::Environment environment{{"FSDP_BACKEND", test.backend}, {"FSDP_TIMEOUT", "120"}};
  if (test.backend == "mpi") {
    auto command = mpirun(test.ranks);
    command.insert(command.end(), {paths::program("rank_program"), "collectives"});
    ranks.start_one(command, environment);
  } else {
    ranks.start(test.ranks, {paths::program("rank_program"), "collectives"}, environment);
  }
  std::vector<std::string> results;
  for (int rank = 0; rank < test.ranks; ++rank) results.push_back(ranks.result(rank));
  for (const auto& result : results)
    EXPECT_TRUE(result.starts_with("ok ")) << result << ranks.logs();
  return results;
}

std::string digest(const std::string& result) {
  return result.starts_with("ok ") ? result.substr(3, result.find(' ', 3) - 3) : "none";
}

class Backends : public ::testing::TestWithParam<Case> {};

TEST_P(Backends, EveryOperationTypeAndSizeIsRight) {
  auto results = run_collectives(GetParam());
  for (const auto& result : results) EXPECT_EQ(digest(result), digest(results[0]));
}

std::vector<Case> cases() {
  std::vector<Case> all = {{"shm", 1}, {"shm", 2}, {"shm", 3}, {"shm", 4}};
#ifdef FSDP_TEST_MPI
  all.insert(all.end(), {{"mpi", 1}, {"mpi", 2}, {"mpi", 3}, {"mpi", 4}});
#endif
  if (has_gpu()) all.insert(all.end(), {{"nccl", 1}, {"nccl", 2}});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cases, Backends, ::testing::ValuesIn(cases()), [](const auto& info) {
  return info.param.backend + "_" + std::to_string(info.param.ranks);
});

#ifdef FSDP_TEST_MPI
TEST(BackendBits, MpiSumsAsShmDoes) {
  EXPECT_EQ(digest(run_collectives({"mpi", 3})[0]), digest(run_collectives({"shm", 3})[0]));
}
#endif

TEST(BackendMemory, HasNoNameThatCouldBeLeftAfterEveryRankWasKilled) {
  Ranks ranks;
  ranks.start(3, {paths::program("rank_program"), "hold", "64"}, {{"FSDP_BACKEND", "shm"}});
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks.result(rank), "ok");
  for (pid_t pid : ranks.pids()) {
    std::stringstream maps;
    maps << std::ifstream("/proc/" + std::to_string(pid) + "/maps").rdbuf();
    EXPECT_NE(maps.str().find("/memfd:fsdp (deleted)"), std::string::npos);
    EXPECT_EQ(maps.str().find("/dev/shm/"), std::string::npos) << maps.str();
  }
}

TEST(BackendMemory, ASmallDevShmIsNoLimit) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to mount a small /dev/shm";
  Ranks ranks;
  ranks.start(2,
              {"unshare", "-m", "sh", "-c",
               "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec " +
                   paths::program("rank_program") + " hold 64"},
              {{"FSDP_BACKEND", "shm"}});
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(ranks.result(rank), "ok");
}

}  // namespace
}  // namespace fsdp::testing
