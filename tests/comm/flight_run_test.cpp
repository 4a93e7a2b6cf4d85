// The flight recorder's files of real ranks that hang, crash or differ; what fsdp hang says about
// them, and that PyTorch's torchfrtrace reads them.
#include "launch/launched.h"  // before ranks.h, which makes a namespace fsdp::testing

#include <nlohmann/json.hpp>

#include "comm/ranks.h"
#include "paths.h"

namespace fsdp::testing {
namespace {

using launch::has;
using nlohmann::json;

constexpr auto kJoin = std::chrono::minutes(3);  // for ranks to start and meet, on a busy machine

class FlightRun : public ::testing::Test {
 protected:
  std::string folder() const { return ranks_.dir() + "/flight"; }

  void start(int size, const std::string& kind, int victim, const std::string& timeout_s,
             const std::string& backend = "shm") {
    std::vector<std::string> program = {paths::program("rank_program"), "fault", kind,
                                        std::to_string(victim)};
    Ranks::Environment environment{{"FSDP_BACKEND", backend}, {"FSDP_TIMEOUT", timeout_s}};
    if (backend == "mpi") {
      auto command = mpirun(size);
      command.insert(command.end(), program.begin(), program.end());
      ranks_.start_one(command, environment);
    } else {
      ranks_.start(size, program, environment);
    }
  }

  bool has_file(int rank) const { return fs::exists(folder() + "/rank-" + std::to_string(rank)); }
  void await_files(std::vector<int> of) {
    for (int rank : of)
      ASSERT_TRUE(launch::eventually([&] { return has_file(rank); }, kJoin))
          << "no file of rank " << rank << "\n"
          << ranks_.logs();
  }

  json hang_json() const {
    const launch::Ended ended =
        launch::run_to_end({paths::program("fsdp"), "hang", folder(), "--json"});
    EXPECT_EQ(ended.code, 0) << ended.err;
    return json::parse(ended.out, nullptr, false);
  }
  std::string hang() const {
    const launch::Ended ended = launch::run_to_end({paths::program("fsdp"), "hang", folder()});
    EXPECT_EQ(ended.code, 0) << ended.err;
    return ended.out;
  }
  std::string torchfrtrace(std::vector<std::string> arguments) const {
    const char* python = std::getenv("FSDP_TEST_PYTHON");
    std::vector<std::string> words = {python ? python : "python3",
                                      paths::source("tests/comm/torchfrtrace.py"),
                                      FSDP_TEST_LIBTORCH, folder()};
    words.insert(words.end(), arguments.begin(), arguments.end());
    const launch::Ended ended = launch::run_to_end(words);
    if (ended.code == 77) return "";
    EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
    return ended.out + ended.err;
  }

  // Asks the ranks again until fsdp hang sees `kind`.
  json await_story(const std::string& kind, std::vector<int> of) {
    json story;
    for (int rank : of)  // before that, the signal would end it
      EXPECT_TRUE(launch::eventually([&] {
        return fs::exists(ranks_.dir() + "/ready-" + std::to_string(rank));
      })) << ranks_.logs();
    launch::eventually([&] {
      ranks_.kill_all(SIGUSR2);
      await_files(of);
      story = hang_json();
      return story.value("kind", "") == kind || HasFatalFailure();
    });
    EXPECT_EQ(story.value("kind", ""), kind) << story << ranks_.logs();
    return story;
  }

  Ranks ranks_;
};

TEST_F(FlightRun, DifferentCallsAreNamedHereAndByTorchfrtrace) {
  start(3, "mismatch", 1, "600");
  await_files({0, 1, 2});
  const json story = hang_json();
  EXPECT_EQ(story["kind"], "mismatch") << story;
  EXPECT_EQ(story["communicator"], "world");
  EXPECT_EQ(story["sequence"], 5);
  ASSERT_EQ(story["calls"].size(), 2u) << story;
  EXPECT_EQ(story["calls"][0]["ranks"], json({0, 2}));
  EXPECT_EQ(story["calls"][0]["call"], "all_reduce(sum) of 1,000 float32 for unit layers.7");
  EXPECT_EQ(story["calls"][1]["ranks"], json({1}));
  EXPECT_EQ(story["calls"][1]["call"], "all_gather of 500 float32");
  const std::string text = hang();
  EXPECT_TRUE(has(text, "differs  rank 1: all_gather of 500 float32"));
  EXPECT_TRUE(has(text, "differs  ranks 0, 2: all_reduce(sum) of 1,000 float32"));
  EXPECT_TRUE(has(text, "said     rank "));
  EXPECT_TRUE(has(ranks_.result(0), "fsdp hang " + folder() + " says which rank is where"));
  const std::string trace = torchfrtrace({});
  if (trace.empty()) GTEST_SKIP() << "no torchfrtrace here";
  EXPECT_TRUE(has(trace, "Collective sequence number: 5 has errors"));
  EXPECT_TRUE(has(trace, "COLLECTIVE_TYPE_MISMATCH"));
  EXPECT_TRUE(has(trace, "Culprit rank"));  // it takes any rank's call for the right one
}

TEST_F(FlightRun, AStoppedRankIsTheOneThatIsMissing) {
  start(3, "stop", 1, "10");
  await_files({0, 2});
  const std::string text = hang();
  EXPECT_TRUE(has(text,
                  "call     5 on communicator \"world\" (shm, 3 ranks): all_reduce(sum) of "
                  "1,000 float32 for unit layers.7"));
  EXPECT_TRUE(has(text, "waiting  ranks 0, 2, for "));
  EXPECT_TRUE(has(text, "missing  rank 1 has no file"));
  EXPECT_TRUE(has(text, "stopped by a signal"));
  EXPECT_TRUE(has(text, "no file  rank 1"));
  EXPECT_FALSE(has_file(1));
  const std::string trace = torchfrtrace({"--allow-incomplete-ranks"});
  if (trace.empty()) GTEST_SKIP() << "no torchfrtrace here";
  EXPECT_TRUE(has(trace, "missed FR dumps from ranks ({1})"));
}

TEST_F(FlightRun, AStoppedRankThatWasAskedBeforeIsFoundByItsProcess) {
  start(2, "elsewhere", 1, "600");
  json story = await_story("missing", {0, 1});
  ranks_.kill_all(SIGSTOP);
  story = hang_json();
  EXPECT_TRUE(has(story["missing"][0]["where"], "stopped"));
  EXPECT_TRUE(has(story["next"], "kill -CONT"));
  ranks_.kill_all(SIGCONT);
}

// Asked by SIGUSR2: nothing has failed, and nothing ends.
TEST_F(FlightRun, ARankThatHangsElsewhereIsFoundWithoutATimeout) {
  start(3, "elsewhere", 1, "600");
  const json story = await_story("missing", {0, 1, 2});
  EXPECT_EQ(story["call"], "all_reduce(sum) of 1,000 float32 for unit layers.7");
  ASSERT_EQ(story["missing"].size(), 1u) << story;
  EXPECT_EQ(story["missing"][0]["rank"], 1);
  EXPECT_TRUE(has(story["missing"][0]["where"], "its last call here was 4, barrier"));
  EXPECT_TRUE(has(story["next"], "gdb -p "));
  for (pid_t pid : ranks_.pids()) EXPECT_TRUE(launch::is_alive(pid));
  const std::string trace = torchfrtrace({});
  if (trace.empty()) GTEST_SKIP() << "no torchfrtrace here";
  EXPECT_TRUE(has(trace, "Not all ranks joining collective, sequence number: 5"));
  EXPECT_TRUE(has(trace, "missing ranks: {1}"));
}

TEST_F(FlightRun, ACrashWritesTheFileAndKeepsItsSignal) {
  start(2, "crash", 1, "600");
  const std::vector<pid_t> pids = ranks_.pids();
  const int status = ranks_.wait_for(pids[1]);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
  await_files({0, 1});
  const std::string text = hang();
  EXPECT_TRUE(has(text, "crashed (SIGSEGV)"));
  EXPECT_TRUE(has(text, "crashed  rank 1"));
  EXPECT_TRUE(has(text, "waiting  rank 0"));
  EXPECT_TRUE(has(ranks_.logs(), "fsdp: SIGSEGV: what its collectives did last is in " + folder()));
}

TEST_F(FlightRun, AnExceptionThatNothingCatchesIsInTheFile) {
  start(2, "terminate", 1, "600");
  const std::vector<pid_t> pids = ranks_.pids();
  const int status = ranks_.wait_for(pids[1]);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT) << status;
  await_files({0, 1});
  EXPECT_TRUE(has(hang(), "crashed (an exception on a thread of its own)"));
}

TEST_F(FlightRun, ARankThatThrowsSaysSo) {
  start(2, "throw", 1, "600");
  await_files({0, 1});
  const json story = hang_json();
  EXPECT_EQ(story["kind"], "missing") << story;
  EXPECT_EQ(story["missing"][0]["rank"], 1);
  EXPECT_TRUE(has(story["next"], "an exception ended this rank's communicators"));
}

TEST_F(FlightRun, RanksThatWaitForEachOtherOnTwoCommunicatorsAreACrossing) {
  start(2, "order", 1, "600");
  const json story = await_story("order", {0, 1});
  EXPECT_TRUE(has(story["next"], "in the same order"));
}

TEST_F(FlightRun, WhereNothingHappenedNoFileIsWritten) {
  ranks_.start(2, {paths::program("rank_program"), "fault", "none", "1"},
               {{"FSDP_BACKEND", "shm"}});
  EXPECT_EQ(ranks_.result(0), "ok");
  EXPECT_EQ(ranks_.result(1), "ok");
  for (pid_t pid : std::vector<pid_t>(ranks_.pids())) EXPECT_EQ(ranks_.wait_for(pid), 0);
  EXPECT_FALSE(fs::exists(folder()));
}

#ifdef FSDP_TEST_MPI
TEST_F(FlightRun, OverMpiDifferentCallsAreNamedAsWell) {
  start(2, "mismatch", 1, "600", "mpi");
  await_files({0, 1});
  const json story = hang_json();
  EXPECT_EQ(story["kind"], "mismatch") << story;
  EXPECT_EQ(story["backend"], "mpi");
  EXPECT_EQ(story["sequence"], 5);
}
#endif

// The launcher asks the others when a rank fails, and says how to read the answer.
TEST_F(FlightRun, TheLauncherAsksTheOthersAndNamesTheFolder) {
  const launch::Ended ended = launch::run_to_end(
      launch::fsdp_run({"-n", "3", paths::program("rank_program"), "fault", "leave", "1"}),
      {"FSDP_BACKEND=shm", "FSDP_TIMEOUT=600", "FSDP_FLIGHT_DIR=" + folder(),
       "FSDP_TEST_DIR=" + ranks_.dir()});
  EXPECT_EQ(ended.code, 3) << ended.err;
  EXPECT_TRUE(has(ended.err, "fsdp hang " + folder() + " says which rank was where"));
  EXPECT_TRUE(has_file(0));
  EXPECT_TRUE(has_file(2));
}

TEST_F(FlightRun, DamagedAndForeignFilesAreNamed) {
  fs::create_directories(folder());
  const launch::Ended none = launch::run_to_end({paths::program("fsdp"), "hang", folder()});
  EXPECT_NE(none.code, 0);
  EXPECT_TRUE(has(none.err, "has no files of the flight recorder"));
  for (const std::string& bytes :
       {std::string(), std::string("\x80\x02}."), std::string("\x80\x02}(X\xff\xff\xff\x7f"),
        std::string("\x80\x02"
                    "cos\nsystem\n(X\x02\x00\x00\x00idtR.",
                    30)}) {
    std::ofstream(folder() + "/rank-0", std::ios::trunc) << bytes;
    const launch::Ended ended = launch::run_to_end({paths::program("fsdp"), "hang", folder()});
    EXPECT_EQ(ended.code, 1) << ended.out;
    EXPECT_TRUE(has(ended.err, folder() + "/rank-0"));
  }
}

}  // namespace
}  // namespace fsdp::testing
