// fsdp::init() under the real launchers that people use.
#include <sys/stat.h>

#include "comm/ranks.h"
#include "paths.h"

namespace fsdp::testing {
namespace {

void expect_world(Ranks& ranks, int size, const std::string& launcher) {
  for (int rank = 0; rank < size; ++rank) {
    std::string result = ranks.result(rank);
    EXPECT_TRUE(result.starts_with("ok ") && result.ends_with(" " + launcher))
        << result << ranks.logs();
  }
}

std::string test_python() {
  const char* python = std::getenv("FSDP_TEST_PYTHON");
  EXPECT_NE(python, nullptr)
      << "FSDP_TEST_PYTHON must name a python with torch; ./fsdp test creates one.";
  return python ? python : "python3";
}

TEST(Launchers, FsdpRun) {
  Ranks ranks;
  ranks.start_one(
      {paths::program("fsdp"), "run", "-n", "2", paths::program("rank_program"), "collectives"},
      {{"FSDP_BACKEND", "shm"}});
  expect_world(ranks, 2, "fsdp run");
}

TEST(Launchers, TorchrunWhoseAgentHoldsTheStore) {
  Ranks ranks;
  ranks.start_one(
      {test_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python",
       "--master-port", std::to_string(free_port()), paths::program("rank_program"), "collectives"},
      {{"FSDP_BACKEND", "shm"}});
  expect_world(ranks, 2, "torchrun");
}

TEST(Launchers, TorchrunStandalone) {
  Ranks ranks;
  ranks.start_one({test_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                   "3", "--no-python", paths::program("rank_program"), "collectives"},
                  {{"FSDP_BACKEND", "shm"}});
  expect_world(ranks, 3, "torchrun");
}

TEST(Launchers, FsdpRunStartsPythonScriptsOfTorchDistributed) {
  Ranks ranks;
  std::string script = ranks.dir() + "/script.py";
  std::ofstream(script) << "import os, torch, torch.distributed as dist\n"
                           "dist.init_process_group('gloo')\n"
                           "t = torch.ones(3) * (dist.get_rank() + 1)\n"
                           "dist.all_reduce(t)\n"
                           "path = f\"{os.environ['FSDP_TEST_DIR']}/rank-{dist.get_rank()}\"\n"
                           "open(path + '.part', 'w').write(f'ok {t[0].item()} python')\n"
                           "os.rename(path + '.part', path)\n"
                           "dist.destroy_process_group()\n";
  ranks.start_one({paths::program("fsdp"), "run", "-n", "2", "--", test_python(), script}, {});
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_EQ(ranks.result(rank), "ok 3.0 python") << ranks.logs();
}

#ifdef FSDP_TEST_MPI
TEST(Launchers, MpirunWithShm) {
  Ranks ranks;
  auto command = mpirun(2);
  command.insert(command.end(), {paths::program("rank_program"), "collectives"});
  ranks.start_one(command, {{"FSDP_BACKEND", "shm"}});
  expect_world(ranks, 2, "OpenMPI");
}

TEST(Launchers, MpiWithoutItsLauncherSaysWhatToDo) {
  Ranks ranks;
  ranks.start(2, {paths::program("rank_program"), "fault", "none", "0"},
              {{"FSDP_BACKEND", "mpi"}, {"FSDP_TIMEOUT", "20"}});
  for (pid_t pid : std::vector<pid_t>(ranks.pids())) EXPECT_TRUE(WIFEXITED(ranks.wait_for(pid)));
  EXPECT_NE(ranks.logs().find("mpirun -n 2"), std::string::npos) << ranks.logs();
}
#endif

TEST(Launchers, RanksInTwoPidNamespacesAreTwoHostsForShm) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to create a PID namespace";
  Ranks ranks;
  std::string port = std::to_string(free_port());
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<std::string> command = {paths::program("rank_program"), "fault", "none", "0"};
    if (rank == 1) command.insert(command.begin(), {"unshare", "--pid", "--fork", "--mount-proc"});
    std::string n = std::to_string(rank);
    ranks.start_one(command, {{"FSDP_BACKEND", "shm"},
                              {"RANK", n},
                              {"LOCAL_RANK", n},
                              {"WORLD_SIZE", "2"},
                              {"LOCAL_WORLD_SIZE", "2"},
                              {"MASTER_ADDR", "127.0.0.1"},
                              {"MASTER_PORT", port}});
  }
  for (pid_t pid : std::vector<pid_t>(ranks.pids())) EXPECT_EQ(WEXITSTATUS(ranks.wait_for(pid)), 3);
  std::string logs = ranks.logs();
  EXPECT_NE(logs.find("cannot reach rank 1"), std::string::npos) << logs;
  EXPECT_NE(logs.find("use the mpi backend (CPU clusters) or nccl (GPUs)"), std::string::npos);
}

}  // namespace
}  // namespace fsdp::testing
