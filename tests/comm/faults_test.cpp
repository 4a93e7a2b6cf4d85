// What the surviving ranks see when one is killed, stopped, throws or makes a different call: each
// gets an error that names the rank and the operation, never a hang.
#include "comm/ranks.h"
#include "paths.h"

namespace fsdp::testing {
namespace {

struct FaultCase {
  std::string backend, kind;
  int victim;
};

class Faults : public ::testing::TestWithParam<FaultCase> {};

TEST_P(Faults, EverySurvivorGetsAnErrorThatNamesTheRankAndTheCall) {
  const auto& [backend, kind, victim] = GetParam();
  int size = backend == "nccl" ? 2 : 3;
  // Deaths, exceptions and different calls must be found long before the timeout; only the timeout
  // finds a stopped process.
  Ranks::Environment environment{{"FSDP_BACKEND", backend},
                                 {"FSDP_TIMEOUT", kind == "stop" ? "5" : "600"}};
  std::vector<std::string> program = {paths::program("rank_program"), "fault", kind,
                                      std::to_string(victim)};
  Ranks ranks;
  if (backend == "mpi") {
    auto command = mpirun(size);
    command.insert(command.end(), program.begin(), program.end());
    ranks.start_one(command, environment);
  } else {
    ranks.start(size, program, environment);
  }
  std::string who = "rank " + std::to_string(victim);
  for (int rank = 0; rank < size; ++rank) {
    if (rank == victim && kind != "mismatch") continue;
    std::string error = ranks.result(rank);
    SCOPED_TRACE("rank " + std::to_string(rank) + " said: " + error);
    auto expect = [&](const std::string& text) {
      EXPECT_NE(error.find(text), std::string::npos) << "missing: " << text << "\n" << ranks.logs();
    };
    expect("HINT: ");
    expect("communicator \"world\"");
    if (kind == "mismatch") {
      expect("ranks made different calls");
      expect("all_gather of 500 float");
      expect("all_reduce(sum) of 1,000 float");
    } else {
      expect(who);
      expect("for unit layers.7");
      expect("all_reduce(sum) of 1,000 float");
      if (kind == "kill") expect("died");
      // A rank that throws leaves, and its process may already be gone when another rank looks.
      if (kind == "throw" && error.find("died") == std::string::npos) expect("left");
      if (kind == "stop") expect("no answer in 5 s");
      if (kind == "stop") expect("stopped by a signal");
    }
  }
}

std::vector<FaultCase> fault_cases() {
  std::vector<std::string> backends = {"shm"};
#ifdef FSDP_TEST_MPI
  backends.push_back("mpi");
#endif
  if (has_gpu()) backends.push_back("nccl");
  std::vector<FaultCase> all;
  for (const auto& backend : backends)
    for (const char* kind : {"kill", "stop", "throw", "mismatch"})
      for (int victim : {0, 1}) {
        all.push_back({backend, kind, victim});
      }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Matrix, Faults, ::testing::ValuesIn(fault_cases()), [](const auto& info) {
  return info.param.backend + "_" + info.param.kind + "_rank" + std::to_string(info.param.victim);
});

#ifdef FSDP_TEST_MPI
// The ranks believe they are on different hosts, so only heartbeats can tell.
TEST(FaultsAcrossHosts, ARankWithoutASignOfLifeIsNamed) {
  Ranks ranks;
  auto command = mpirun(2);
  command.insert(command.end(), {"sh", "-c",
                                 "FSDP_HOST_ID=host$OMPI_COMM_WORLD_RANK exec " +
                                     paths::program("rank_program") + " fault kill 1"});
  ranks.start_one(command, {{"FSDP_BACKEND", "mpi"}, {"FSDP_TIMEOUT", "600"}});
  std::string error = ranks.result(0);
  EXPECT_NE(error.find("rank 1 has given no sign of life"), std::string::npos)
      << error << ranks.logs();
  EXPECT_NE(error.find("all_reduce(sum) of 1,000 float32"), std::string::npos) << error;
}

// The store goes with its process, and its connections say so at once.
TEST(FaultsAcrossHosts, TheRankWithTheStoreIsMissedAtOnce) {
  Ranks ranks;
  auto command = mpirun(2);
  command.insert(command.end(), {"sh", "-c",
                                 "FSDP_HOST_ID=host$OMPI_COMM_WORLD_RANK exec " +
                                     paths::program("rank_program") + " fault kill 0"});
  ranks.start_one(command, {{"FSDP_BACKEND", "mpi"}, {"FSDP_TIMEOUT", "600"}});
  std::string error = ranks.result(1);
  EXPECT_NE(error.find("rank 0 is gone, and the rendezvous store with it"), std::string::npos)
      << error << ranks.logs();
}
#endif

}  // namespace
}  // namespace fsdp::testing
