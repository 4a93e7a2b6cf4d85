// The environment of each launcher, worlds of one, fake worlds and meshes.
#include "fsdp/world.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "comm/backend.h"
#include "comm/launch_environment.h"
#include "comm/ranks.h"
#include "fsdp/mesh.h"

namespace fsdp {
namespace {

using Variables = std::map<std::string, std::string>;

// Sets variables for one test, and unsets all launchers' variables before and after.
class Environment {
 public:
  explicit Environment(const Variables& variables = {}) {
    clear();
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() { clear(); }

 private:
  static void clear() {
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "TORCHELASTIC_USE_AGENT_STORE",
                             "TORCHELASTIC_RESTART_COUNT",
                             "TORCHELASTIC_RUN_ID",
                             "FSDP_SECRET",
                             "FSDP_SECRET_FILE",
                             "FSDP_RUN",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMIX_NAMESPACE",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "MPI_LOCALRANKID",
                             "MPI_LOCALNRANKS",
                             "SLURM_PROCID",
                             "SLURM_STEP_ID",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_LOCALID",
                             "SLURM_STEP_NUM_NODES",
                             "SLURM_STEP_NODELIST",
                             "SLURM_JOB_ID",
                             "FSDP_BACKEND",
                             "FSDP_TIMEOUT",
                             "FSDP_FAKE_WORLD"})
      unsetenv(name);
  }
};

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(LaunchEnvironment, NothingSetIsAWorldOfOne) {
  Environment environment;
  auto found = comm::read_launch_environment();
  EXPECT_EQ(found.launcher, "none");
  EXPECT_EQ(found.rank, 0);
  EXPECT_EQ(found.size, 1);
}

TEST(LaunchEnvironment, ReadsTorchrun) {
  Environment environment({{"RANK", "5"},
                           {"WORLD_SIZE", "8"},
                           {"LOCAL_RANK", "1"},
                           {"LOCAL_WORLD_SIZE", "4"},
                           {"MASTER_ADDR", "host"},
                           {"MASTER_PORT", "1234"},
                           {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                           {"TORCHELASTIC_RESTART_COUNT", "2"}});
  auto found = comm::read_launch_environment();
  EXPECT_EQ(found.launcher, "torchrun");
  EXPECT_EQ(found.rank, 5);
  EXPECT_EQ(found.size, 8);
  EXPECT_EQ(found.local_rank, 1);
  EXPECT_EQ(found.local_size, 4);
  EXPECT_EQ(found.master_host, "host");
  EXPECT_EQ(found.master_port, 1234);
  EXPECT_TRUE(found.agent_store);
  EXPECT_EQ(found.attempt, 2);
}

TEST(LaunchEnvironment, ReadsOpenMpiAndMpichAndKnowsWhoseRanksAreOnOneHost) {
  Environment* environment = new Environment({{"OMPI_COMM_WORLD_RANK", "1"},
                                              {"OMPI_COMM_WORLD_SIZE", "2"},
                                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  auto open = comm::read_launch_environment();
  EXPECT_EQ(open.launcher, "OpenMPI");
  EXPECT_EQ(open.rank, 1);
  EXPECT_TRUE(open.one_host);
  setenv("OMPI_COMM_WORLD_RANK", "0", 1);
  setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0", 1);
  EXPECT_EQ(comm::read_launch_environment().job, open.job);
  delete environment;
  Environment mpich(
      {{"PMI_RANK", "3"}, {"PMI_SIZE", "6"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "3"}});
  auto found = comm::read_launch_environment();
  EXPECT_EQ(found.launcher, "MPICH");
  EXPECT_EQ(found.rank, 3);
  EXPECT_EQ(found.local_size, 3);
  EXPECT_FALSE(found.one_host);
  EXPECT_EQ(found.master_host, "");  // two hosts: only MPI or the user knows it
}

TEST(LaunchEnvironment, ReadsSrunButNotABatchScript) {
  {
    Environment environment({{"SLURM_PROCID", "5"},
                             {"SLURM_STEP_ID", "0"},
                             {"SLURM_STEP_NUM_TASKS", "8"},
                             {"SLURM_LOCALID", "1"},
                             {"SLURM_STEP_NUM_NODES", "2"},
                             {"SLURM_JOB_ID", "77"},
                             {"SLURM_STEP_NODELIST", "gpu[03-04]"}});
    auto found = comm::read_launch_environment();
    EXPECT_EQ(found.launcher, "srun");
    EXPECT_EQ(found.rank, 5);
    EXPECT_EQ(found.size, 8);
    EXPECT_EQ(found.local_size, 4);
    EXPECT_EQ(found.master_host, "gpu03");
    EXPECT_GT(found.master_port, 0);
    EXPECT_FALSE(found.one_host);
  }
  Environment batch({{"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "77"}});
  EXPECT_EQ(comm::read_launch_environment().launcher, "none");
}

// A size that is only guessed from the local rank would make ranks meet at different places.
TEST(LaunchEnvironment, OnlyAGivenLocalSizeMakesOneHost) {
  Environment environment({{"RANK", "1"},
                           {"WORLD_SIZE", "2"},
                           {"LOCAL_RANK", "1"},
                           {"MASTER_ADDR", "host"},
                           {"MASTER_PORT", "1234"}});
  EXPECT_FALSE(comm::read_launch_environment().one_host);
  setenv("LOCAL_WORLD_SIZE", "2", 1);
  EXPECT_TRUE(comm::read_launch_environment().one_host);
}

TEST(LaunchEnvironment, FindsTheFirstHostOfASlurmList) {
  EXPECT_EQ(comm::first_host("node[03-07,12]"), "node03");
  EXPECT_EQ(comm::first_host("a1,b[2-3]"), "a1");
  EXPECT_EQ(comm::first_host("single"), "single");
  EXPECT_EQ(comm::first_host("n[7]"), "n7");
}

TEST(LaunchEnvironment, NonsenseIsAnErrorThatNamesIt) {
  auto error = [](const Variables& variables) {
    Environment environment(variables);
    return error_of([] { comm::read_launch_environment(); });
  };
  EXPECT_NE(error({{"RANK", "0"}}).find("WORLD_SIZE is not"), std::string::npos);
  EXPECT_NE(error({{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}})
                .find("rank 2 in a world of 2"),
            std::string::npos);
  EXPECT_NE(error({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).find("MASTER_ADDR"), std::string::npos);
  EXPECT_NE(error({{"RANK", "zero"}, {"WORLD_SIZE", "2"}}).find("\"zero\""), std::string::npos);
  EXPECT_NE(error({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", "99999"}}).find("99999"),
            std::string::npos);
}

TEST(World, OneProcessAloneHasEverything) {
  Environment environment(Variables{{"FSDP_BACKEND", "shm"}});
  World world = init();
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.launcher(), "none");
  at::Tensor x = at::arange(5, at::kFloat), out = at::zeros({5});
  world.comm().all_reduce(x);
  world.comm().all_gather(out, x);
  EXPECT_TRUE(out.equal(at::arange(5, at::kFloat)));
  EXPECT_NE(error_of([] { init(); }).find("already been called"), std::string::npos);
  EXPECT_NE(error_of([&] { world.communicator({0}, "world"); }).find("already exists"),
            std::string::npos);
  EXPECT_NE(error_of([&] { world.communicator({0, 0}, "x"); }).find("distinct"), std::string::npos);
  EXPECT_NE(error_of([&] { world.communicator({1}, "x"); }).find("below 1"), std::string::npos);
}

TEST(World, CanBeJoinedAgainAfterItEnded) {
  Environment environment(Variables{{"FSDP_BACKEND", "shm"}});
  for (int i = 0; i < 2; ++i) EXPECT_EQ(init().size(), 1);
}

TEST(World, BadSettingsAreNamed) {
  Environment environment;
  EXPECT_NE(error_of([] { init({.backend = "gloop"}); }).find("gloop"), std::string::npos);
  setenv("FSDP_BACKEND", "nope", 1);
  EXPECT_NE(error_of([] { init(); }).find("nope"), std::string::npos);
  setenv("FSDP_BACKEND", "shm", 1);
  setenv("FSDP_TIMEOUT", "0", 1);
  EXPECT_NE(error_of([] { init(); }).find("FSDP_TIMEOUT"), std::string::npos);
}

TEST(World, RanksThatDoNotComeAreNamed) {
  Environment environment({{"FSDP_BACKEND", "shm"},
                           {"RANK", "0"},
                           {"WORLD_SIZE", "3"},
                           {"LOCAL_RANK", "0"},
                           {"LOCAL_WORLD_SIZE", "3"},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", std::to_string(free_port())}});
  std::string error = error_of([] { init({.timeout = std::chrono::milliseconds(500)}); });
  EXPECT_NE(error.find("2 of 3 ranks didn't join"), std::string::npos) << error;
  EXPECT_NE(error.find(": rank 1, 2."), std::string::npos) << error;
  setenv("RANK", "1", 1);
  error = error_of([] { init({.timeout = std::chrono::milliseconds(500)}); });
  EXPECT_NE(error.find("rank 1 could not reach the store of rank 0 at @fsdp-"), std::string::npos)
      << error;
  setenv("LOCAL_WORLD_SIZE", "2", 1);  // several hosts
  setenv("MASTER_PORT", "1", 1);       // no process listens there
  error = error_of([] { init({.timeout = std::chrono::milliseconds(500)}); });
  EXPECT_NE(error.find("could not reach the store of rank 0 at 127.0.0.1:1"), std::string::npos)
      << error;
}

TEST(Communicator, BadTensorsAreNamed) {
  Environment environment;
  World world = init({.backend = "fake", .fake_rank = 1, .fake_size = 4});
  const Communicator& comm = world.comm();
  at::Tensor x = at::zeros({6}), full = at::zeros({24});
  auto gather_error = [&](at::Tensor out, at::Tensor in) {
    return error_of([&] { comm.all_gather(out, in); });
  };
  EXPECT_NE(gather_error(at::zeros({23}), x).find("23 elements instead of 24"), std::string::npos);
  EXPECT_NE(gather_error(full.to(at::kDouble), x).find("Double"), std::string::npos);
  EXPECT_NE(gather_error(at::zeros({24, 2}).select(1, 0), x).find("isn't contiguous"),
            std::string::npos);
  EXPECT_NE(gather_error(full, at::zeros({6}, at::kMeta)).find("meta"), std::string::npos);
  EXPECT_NE(error_of([&] { comm.broadcast(x, 4); }).find("no such rank"), std::string::npos);
  EXPECT_NE(error_of([&] {
              comm.all_to_all(full, full, {1, 2}, {});
            }).find("wrong length"),
            std::string::npos);
}

TEST(FakeBackend, AnswersAsIfEveryRankHeldTheSame) {
  Environment environment;
  World world = init({.backend = "fake", .fake_rank = 3, .fake_size = 1000});
  const Communicator& comm = world.comm();
  EXPECT_EQ(world.size(), 1000);
  at::Tensor in = at::arange(2, at::kFloat), out = at::zeros({2000}), sum = at::zeros({2});
  comm.all_gather(out, in, {.async = true}).wait();
  EXPECT_TRUE(out.view({1000, 2}).eq(in).all().item<bool>());
  comm.reduce_scatter(sum, out, ReduceOp::SUM);
  EXPECT_TRUE(sum.equal(in * 1000));
  comm.all_reduce(in, ReduceOp::AVG);
  EXPECT_TRUE(in.equal(at::arange(2, at::kFloat)));
  comm.barrier();
}

TEST(FakeBackend, IsARealC10dBackend) {
  Environment environment;
  World world = init({.backend = "fake", .fake_size = 2});
  auto backend = world.comm().backend();
  std::vector<at::Tensor> in{at::ones({3})};
  std::vector<std::vector<at::Tensor>> out{{at::zeros({3}), at::zeros({3})}};
  auto work = backend->allgather(out, in, {});
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(work->isCompleted() && work->isSuccess());
  EXPECT_EQ(work->getFuture()->value().toTensorVector().size(), 2u);
  EXPECT_TRUE(out[0][1].equal(at::ones({3})));
  std::vector<at::Tensor> sum{at::zeros({3})};
  backend->reduce_scatter(sum, out, {})->wait();
  EXPECT_TRUE(sum[0].equal(at::full({3}, 2.0)));
}

TEST(DeviceMesh, LaysRanksOutWithTheLastDimensionFastest) {
  Environment environment;
  World world = init({.backend = "fake", .fake_rank = 6, .fake_size = 8});
  DeviceMesh mesh(world, {{"replicate", 2}, {"shard", 4}});
  EXPECT_EQ(mesh.coordinate("replicate"), 1);
  EXPECT_EQ(mesh.coordinate("shard"), 2);
  EXPECT_EQ(mesh.ranks("shard"), (std::vector<int>{4, 5, 6, 7}));
  EXPECT_EQ(mesh.ranks("replicate"), (std::vector<int>{2, 6}));
  EXPECT_EQ(mesh.comm("shard").size(), 4);
  EXPECT_EQ(mesh.comm("shard").rank(), 2);
  EXPECT_EQ(mesh.comm("shard").backend(), mesh.comm("shard").backend());
  EXPECT_NE(mesh.comm("shard", "gather").backend(), mesh.comm("shard", "reduce").backend());
}

TEST(DeviceMesh, SizesThatDoNotFitAreErrors) {
  Environment environment;
  World world = init({.backend = "fake", .fake_size = 8});
  auto error = [&](std::vector<MeshDimension> dimensions) {
    return error_of([&] { DeviceMesh(world, dimensions); });
  };
  EXPECT_NE(error({{"a", 2}, {"b", 3}}).find("6 positions, but the world has 8"),
            std::string::npos);
  EXPECT_NE(error({{"a", 2}, {"a", 4}}).find("two dimensions"), std::string::npos);
  EXPECT_NE(error({{"a", 0}}).find("at least 1"), std::string::npos);
  EXPECT_NE(error({}).find("without dimensions"), std::string::npos);
  DeviceMesh mesh(world, {{"shard", 8}});
  EXPECT_NE(error_of([&] { mesh.comm("shards"); }).find("no dimension \"shards\""),
            std::string::npos);
}

}  // namespace
}  // namespace fsdp
