// fsdp run on one node as a user sees it: the real binary with small shell programs as ranks.
// stop_test.cpp has the grace after a signal.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <sstream>

#include "launch/connection.h"
#include "launch/environment.h"
#include "launch/launched.h"
#include "launch/ports.h"
#include "paths.h"

namespace fsdp::launch {
namespace {

using Words = std::vector<std::string>;
using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

AssertionResult has_not(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) return AssertionSuccess();
  return AssertionFailure() << "\"" << part << "\" in:\n" << text;
}

// A program that writes its pid and its child's to the folder $0, then waits for a signal.
const char* const kWaits = "echo $$ > $0/rank-$RANK; sleep 1000 & echo $! > $0/child-$RANK; wait";

TEST(Run, EveryRankHasItsVariables) {
  Launched run(
      fsdp_run({"-n", "3", "sh", "-c",
                "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $FSDP_RUN "
                "${TORCHELASTIC_USE_AGENT_STORE-unset}"}));
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.out_lines(),
            (Words{"[0] 0 0 3 3 127.0.0.1 1 unset", "[1] 1 1 3 3 127.0.0.1 1 unset",
                   "[2] 2 2 3 3 127.0.0.1 1 unset"}));
  EXPECT_EQ(run.err(), "");
}

TEST(Run, TorchrunsSpellingsWork) {
  Launched run(fsdp_run({"--standalone", "--nproc_per_node=2", "--nnodes=1:1", "--node_rank=0",
                         "--max_restarts=0", "sh", "-c", "echo $RANK"}));
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.out_lines(), (Words{"[0] 0", "[1] 1"})) << run.err();
}

TEST(Run, PassesArgumentsToTheProgramUnchanged) {
  for (bool dashes : {false, true}) {
    Words arguments = {"-n", "2"};
    if (dashes) arguments.push_back("--");
    for (const char* word :
         {"printf", "<%s>", "--help", "-n", "5", "--", "[a,b]", "{}", "%%", "", "++"}) {
      arguments.push_back(word);
    }
    Launched run(fsdp_run(arguments));
    EXPECT_EQ(run.wait(), 0) << run.err();
    std::string all = "<--help><-n><5><--><[a,b]><{}><%%><><++>";
    EXPECT_TRUE(has(run.out(), "[0] " + all));
    EXPECT_TRUE(has(run.out(), "[1] " + all));
  }
}

TEST(Run, AProgramMayBeNamedLikeACommand) {
  for (bool dashes : {false, true}) {
    Words arguments = {"-n", "1"};
    if (dashes) arguments.push_back("--");
    arguments.push_back("doctor");
    Launched run(fsdp_run(arguments), {"PATH=/nowhere"});
    EXPECT_EQ(run.wait(), 127);
    EXPECT_TRUE(has(run.err(), "can't run \"doctor\""));
  }
}

TEST(Run, OneRankHasNoPrefixUnlessAsked) {
  Launched plain(fsdp_run({"-n", "1", "echo", "text"}));
  EXPECT_EQ(plain.wait(), 0);
  EXPECT_EQ(plain.out(), "text\n");
  Launched prefixed(fsdp_run({"-n", "1", "--prefix", "always", "echo", "text"}));
  EXPECT_EQ(prefixed.wait(), 0);
  EXPECT_EQ(prefixed.out(), "[0] text\n");
  Launched without(fsdp_run({"-n", "2", "--no-prefix", "echo", "text"}));
  EXPECT_EQ(without.wait(), 0);
  EXPECT_EQ(without.out(), "text\ntext\n");
}

TEST(Run, StreamsStaySeparateAndTheLastLineNeedsNoNewline) {
  Launched run(fsdp_run({"-n", "2", "sh", "-c", "printf out; printf err >&2"}));
  EXPECT_EQ(run.wait(), 0);
  EXPECT_TRUE(has(run.out(), "[0] out"));
  EXPECT_TRUE(has(run.out(), "[1] out"));
  EXPECT_TRUE(has(run.err(), "[0] err"));
  EXPECT_TRUE(has(run.err(), "[1] err"));
}

TEST(Run, TheSignalThatKilledARankIsShownAndReturned) {
  Launched run(fsdp_run({"-n", "3", "sh", "-c",
                         "if test $RANK = 1; then echo last words; kill -9 $$; fi; sleep 1000"}));
  EXPECT_EQ(run.wait(), 128 + SIGKILL);
  EXPECT_TRUE(has(run.err(), "error: rank 1 (pid "));
  EXPECT_TRUE(has(run.err(), "was killed by signal 9 (SIGKILL)."));
  EXPECT_TRUE(has(run.err(), "    last words\n"));
  EXPECT_TRUE(has(run.err(), "2 other ranks were ended."));
  EXPECT_TRUE(has(run.err(), "HINT: the kernel kills a process this way when memory runs out"));
}

TEST(Run, TheExitCodeOfARankIsReturnedWithItsLastLines) {
  Launched run(fsdp_run({"-n", "2", "sh", "-c",
                         "test $RANK = 0 && { seq 1 50; echo problem >&2; exit 7; }; sleep 1000"}));
  EXPECT_EQ(run.wait(), 7);
  EXPECT_TRUE(has(run.err(), "rank 0 (pid "));
  EXPECT_TRUE(has(run.err(), "exited with code 7."));
  EXPECT_TRUE(has(run.err(), "    50\n"));
  EXPECT_TRUE(has(run.err(), "    problem\n"));
  EXPECT_TRUE(has_not(run.err(), "    10\n"));
  EXPECT_TRUE(has(run.err(), "HINT: run with --log-dir"));
}

TEST(Run, RanksMayFinishAtDifferentTimes) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", "sh", "-c",
                         "echo $$ > $0/rank-$RANK; test $RANK = 0 && exit 0; "
                         "while ! test -e $0/go; do sleep 0.01; done; echo later",
                         folder.path()}));
  EXPECT_TRUE(is_gone(folder.read_pid("rank-0")));
  std::ofstream(folder / "go").flush();
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.out(), "[1] later\n");
}

TEST(Run, ARankThatIgnoresSigtermAfterAFailureIsKilledAfterTheGrace) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", "--grace", "0.2", "sh", "-c",
                         "if test $RANK = 0; then trap '' TERM; echo $$ > $0/pid; "
                         "while :; do sleep 0.05; done; fi; "
                         "while ! test -s $0/pid; do sleep 0.01; done; exit 3",
                         folder.path()}));
  EXPECT_EQ(run.wait(), 3);
  EXPECT_TRUE(has(run.err(), "1 rank didn't end within 0.2 s of SIGTERM: killing (SIGKILL)."));
  EXPECT_TRUE(has_not(run.err(), "left behind"));
  EXPECT_TRUE(is_gone(folder.read_pid("pid")));
}

class Interrupted : public testing::TestWithParam<int> {};

TEST_P(Interrupted, LeavesNoProcessBehind) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", "sh", "-c", kWaits, folder.path()}));
  std::vector<pid_t> pids;
  for (const char* name : {"rank-0", "rank-1", "child-0", "child-1"}) {
    pids.push_back(folder.read_pid(name));
    EXPECT_TRUE(is_alive(pids.back())) << name;
  }
  run.signal(GetParam());
  EXPECT_EQ(run.wait(), 128 + GetParam());
  for (pid_t pid : pids) EXPECT_FALSE(is_alive(pid));
  EXPECT_TRUE(has(run.err(), "; ending 2 ranks."));
}

INSTANTIATE_TEST_SUITE_P(Signals, Interrupted, testing::Values(SIGINT, SIGTERM, SIGHUP),
                         [](const auto& info) { return std::string(sigabbrev_np(info.param)); });

TEST(Run, ASecondInterruptKillsAtOnce) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", "--grace", "100000", "sh", "-c",
                         "trap '' INT TERM; echo $$ > $0/rank-$RANK; while :; do sleep 0.05; done",
                         folder.path()}));
  pid_t first = folder.read_pid("rank-0"), second = folder.read_pid("rank-1");
  run.signal(SIGINT);
  EXPECT_TRUE(eventually([&] { return has(run.err(), "interrupted by SIGINT").operator bool(); }));
  EXPECT_TRUE(is_alive(first));
  EXPECT_TRUE(eventually([&] {  // one that follows the first too soon counts as the same
    run.signal(SIGINT);
    return has(run.err(), "killing 2 ranks (SIGKILL).").operator bool();
  }));
  EXPECT_EQ(run.wait(), 128 + SIGINT);
  EXPECT_FALSE(is_alive(first));
  EXPECT_FALSE(is_alive(second));
}

TEST(Run, RanksThatSaveAndExitWithZeroAfterASignalHaveNotFailed) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", "sh", "-c",
                         "trap 'echo saved; exit 0' INT; echo $$ > $0/rank-$RANK; "
                         "while :; do sleep 0.05; done",
                         folder.path()}));
  folder.read_pid("rank-0");
  folder.read_pid("rank-1");
  run.signal(SIGINT);
  EXPECT_EQ(run.wait(), 0);
  EXPECT_TRUE(has(run.out(), "[0] saved"));
  EXPECT_TRUE(has(run.out(), "[1] saved"));
}

TEST(Run, RanksDieWithAKilledLauncher) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", "sh", "-c", kWaits, folder.path()}));
  std::vector<pid_t> pids;
  for (const char* name : {"rank-0", "rank-1", "child-0", "child-1"}) {
    pids.push_back(folder.read_pid(name));
  }
  run.signal(SIGKILL);
  for (pid_t pid : pids) EXPECT_TRUE(is_gone(pid));
  EXPECT_EQ(run.wait(), 128 + SIGKILL);
}

TEST(Run, CtrlCOnATerminalEndsTheRanksAndLinesAreColoured) {
  Folder folder;
  const std::string fsdp = paths::program("fsdp");
  int terminal;
  pid_t pid = forkpty(&terminal, nullptr, nullptr, nullptr);
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    setenv("TERM", "xterm", 1);
    unsetenv("NO_COLOR");
    execl(fsdp.c_str(), fsdp.c_str(), "run", "-n", "2", "sh", "-c",
          "cat; echo text $RANK; echo $$ > $0/rank-$RANK; sleep 1000", folder.path().c_str(),
          nullptr);
    _exit(99);
  }
  pid_t first = folder.read_pid("rank-0"), second = folder.read_pid("rank-1");
  EXPECT_TRUE(is_alive(first));
  ASSERT_EQ(::write(terminal, "\x03", 1), 1);
  std::string text;
  char buffer[4096];
  ssize_t got;
  while ((got = ::read(terminal, buffer, sizeof buffer)) > 0) text.append(buffer, got);
  int status = 0;
  EXPECT_TRUE(eventually([&] { return waitpid(pid, &status, WNOHANG) == pid; }));
  EXPECT_EQ(WEXITSTATUS(status), 128 + SIGINT);
  EXPECT_FALSE(is_alive(first));
  EXPECT_FALSE(is_alive(second));
  EXPECT_TRUE(has(text, "\x1b[36m[0] \x1b[0mtext 0"));
  EXPECT_TRUE(has(text, "\x1b[33m[1] \x1b[0mtext 1"));
  close(terminal);
}

TEST(Run, AllRanksRestartAfterAFailure) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", "--max-restarts", "3", "sh", "-c",
                         "echo start $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; "
                         "echo $MASTER_PORT > $0/port-$TORCHELASTIC_RESTART_COUNT; "
                         "test $TORCHELASTIC_RESTART_COUNT = 1 && exit 0; "
                         "test $RANK = 1 && exit 4; sleep 1000",
                         folder.path()}));
  EXPECT_EQ(run.wait(), 0) << run.err();
  for (const char* line : {"[1] start 0 of 3", "[0] start 1 of 3", "[1] start 1 of 3"}) {
    EXPECT_TRUE(has(run.out(), line));
  }
  EXPECT_TRUE(has(run.err(), "exited with code 4"));
  EXPECT_TRUE(has(run.err(), "restart 1 of 3."));
  EXPECT_TRUE(has_not(run.err(), "restart 2 of 3."));
  EXPECT_NE(folder.read("port-0"), folder.read("port-1"));
}

TEST(Run, RestartsAreLimited) {
  Launched run(fsdp_run({"-n", "2", "--max-restarts", "2", "sh", "-c", "exit 4"}));
  EXPECT_EQ(run.wait(), 4);
  EXPECT_TRUE(has(run.err(), "restart 2 of 2."));
  EXPECT_TRUE(has(run.err(), "giving up after restart 2."));
}

TEST(Run, AnInterruptCausesNoRestart) {
  Folder folder;
  Launched run(fsdp_run({"-n", "2", "--max-restarts", "1000", "sh", "-c", kWaits, folder.path()}));
  folder.read_pid("child-0");
  folder.read_pid("child-1");
  run.signal(SIGTERM);
  EXPECT_EQ(run.wait(), 128 + SIGTERM);
  EXPECT_TRUE(has_not(run.err(), "restart"));
}

TEST(Run, LogsHoldBothStreamsAndRestarts) {
  Folder folder;
  Launched run(
      fsdp_run({"-n", "2", "--max-restarts", "1", "--log-dir", folder / "deep/logs", "sh", "-c",
                "echo out $RANK; echo err $RANK >&2; n=$TORCHELASTIC_RESTART_COUNT; "
                "touch $0/$n-$RANK; "
                "until test -e $0/$n-0 && test -e $0/$n-1; do sleep 0.01; done; exit 5",
                folder.path()}));
  EXPECT_EQ(run.wait(), 5);
  for (std::string rank : {"0", "1"}) {
    std::string log = folder.read("deep/logs/rank-" + rank + ".log");
    auto marker = log.find("--- fsdp: restart 1 ---\n");
    ASSERT_NE(marker, std::string::npos) << log;
    for (const std::string& part : {log.substr(0, marker), log.substr(marker)}) {
      EXPECT_TRUE(has(part, "out " + rank + "\n"));
      EXPECT_TRUE(has(part, "err " + rank + "\n"));
    }
  }
  EXPECT_TRUE(has(run.err(), "HINT: its full output is in " + (folder / "deep/logs/rank-")));
}

TEST(Run, AnUnwritableLogFolderIsAnErrorBeforeAnythingStarts) {
  Folder folder;
  std::ofstream(folder / "file") << "x";
  Launched run(
      fsdp_run({"-n", "2", "--log-dir", folder / "file/logs", "touch", folder / "started"}));
  EXPECT_EQ(run.wait(), 1);
  EXPECT_TRUE(has(run.err(), "--log-dir"));
  EXPECT_TRUE(has(run.err(), "HINT:"));
  EXPECT_FALSE(std::filesystem::exists(folder / "started"));
}

TEST(Run, AProgramThatCannotBeExecutedIsNamedWithTheReason) {
  Folder folder;
  std::ofstream(folder / "data") << "not a program";
  std::ofstream(folder / "script") << "#!/no/such/interpreter\n";
  std::filesystem::permissions(folder / "script", std::filesystem::perms::all);
  struct Case {
    std::string program;
    int code;
    std::string reason, hint;
  };
  for (const auto& [program, code, reason, hint] :
       {Case{"no-such-program", 127, "No such file or directory", "it isn't in PATH"},
        Case{folder / "missing", 127, "No such file or directory", "there is no such file"},
        Case{folder / "script", 127, "No such file or directory", "interpreter"},
        Case{folder / "data", 126, "Permission denied", "chmod +x"},
        Case{folder.path(), 126, "Permission denied", "is it a program?"}}) {
    Launched run(fsdp_run({"-n", "2", program, "argument"}));
    EXPECT_EQ(run.wait(), code) << program;
    EXPECT_TRUE(has(run.err(), "can't run \"" + program + "\": " + reason + "."));
    EXPECT_TRUE(has(run.err(), "HINT: "));
    EXPECT_TRUE(has(run.err(), hint));
    EXPECT_TRUE(has_not(run.err(), "exited"));
  }
}

// flags_test.cpp has many more, in its own process.
TEST(Run, ABadFlagIsAnErrorWithAHint) {
  Launched run(fsdp_run({"-n", "0", "true"}));
  EXPECT_EQ(run.wait(), 2);
  EXPECT_TRUE(has(run.err(), "-n \"0\" isn't a number of ranks"));
  EXPECT_TRUE(has(run.err(), "HINT: "));
  EXPECT_EQ(run.out(), "");
}

TEST(Run, HelpShowsExamples) {
  Launched run(fsdp_run({"--help"}));
  EXPECT_EQ(run.wait(), 0);
  EXPECT_TRUE(
      has(run.out(), "fsdp run -n 8 --nnodes 2 --node-rank 1 --master node0:29500 ./train"));
}

TEST(Run, AMasterPortThatIsTakenIsAnErrorBeforeAnythingStarts) {
  int port = free_port();
  FileDescriptor taken = listen_on(port, "the test's port");
  Launched run(fsdp_run({"-n", "1", "--master-port", std::to_string(port), "echo", "started"}));
  EXPECT_EQ(run.wait(), 1);
  EXPECT_TRUE(has(run.err(), "port " + std::to_string(port)));
  EXPECT_TRUE(has(run.err(), "HINT:"));
  EXPECT_EQ(run.out(), "");
}

TEST(Run, ManyLinesArriveWhole) {
  Launched run(fsdp_run({"-n", "4", "seq", "1", "50000"}));
  EXPECT_EQ(run.wait(), 0);
  std::vector<int> next(4, 1);
  std::istringstream lines(run.out());
  for (std::string line; std::getline(lines, line);) {
    int rank = line.size() > 4 ? line[1] - '0' : -1;
    ASSERT_TRUE(rank >= 0 && rank < 4) << line;
    ASSERT_EQ(line, "[" + std::to_string(rank) + "] " + std::to_string(next[rank]++));
  }
  EXPECT_EQ(next, std::vector<int>(4, 50001));
}

TEST(Run, AVeryLongLineDoesNotFillTheMemory) {
  Launched run(fsdp_run({"-n", "1", "sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; exit 9"}));
  EXPECT_EQ(run.wait(), 9);
  EXPECT_TRUE(run.out() == std::string(3000000, 'x'));
  EXPECT_LT(run.err().size(), 5000u);
}

// The reader of the launcher's output is stuck. The launcher must still handle signals, end its
// ranks and exit.
TEST(Run, AStuckReaderDoesNotBlockTheLauncher) {
  Folder folder;
  Launched pipeline({"sh", "-c",
                     "{ \"$1\" run -n 2 --grace 0.2 sh -c 'echo $$ > $0/rank-$RANK; "
                     "echo $PPID > $0/launcher-$RANK; exec yes' \"$0\"; echo $? > $0/code; } | "
                     "{ while ! test -e $0/go; do sleep 0.01; done; cat > $0/output; }",
                     folder.path(), paths::program("fsdp")});
  pid_t launcher = folder.read_pid("launcher-0");
  pid_t first = folder.read_pid("rank-0"), second = folder.read_pid("rank-1");
  kill(launcher, SIGTERM);
  EXPECT_EQ(folder.read_pid("code"), 128 + SIGTERM);
  EXPECT_FALSE(is_alive(first));
  EXPECT_FALSE(is_alive(second));
  std::ofstream(folder / "go").flush();
  EXPECT_EQ(pipeline.wait(), 0);
}

TEST(Run, ASlowReaderGetsEverything) {
  Folder folder;
  Launched pipeline({"sh", "-c",
                     "\"$1\" run -n 1 sh -c 'seq 1 500000' | "
                     "{ read first; while ! test -e $0/go; do sleep 0.01; done; tail -n 1; }",
                     folder.path(), paths::program("fsdp")});
  std::ofstream(folder / "go").flush();
  EXPECT_EQ(pipeline.wait(), 0);
  EXPECT_EQ(pipeline.out(), "500000\n");
}

TEST(Run, ASingleLineToAReaderThatLeftEndsTheRanks) {
  Folder folder;
  Launched pipeline({"sh", "-c",
                     "{ \"$1\" run -n 2 sh -c 'until test -e $0/left; do sleep 0.01; done; "
                     "echo line; exec sleep 1000' \"$0\"; echo $? > $0/code; } | "
                     "{ exec <&-; touch $0/left; }",
                     folder.path(), paths::program("fsdp")});
  EXPECT_EQ(folder.read_pid("code"), 128 + SIGPIPE);
  EXPECT_EQ(pipeline.wait(), 0);
}

TEST(Run, AReaderThatLeavesEndsTheRanksQuietly) {
  Folder folder;
  Launched pipeline({"sh", "-c",
                     "{ \"$1\" run -n 2 sh -c 'echo $$ > $0/rank-$RANK; exec yes' \"$0\"; "
                     "echo $? > $0/code; } | head -n 1",
                     folder.path(), paths::program("fsdp")});
  EXPECT_EQ(pipeline.wait(), 0);
  EXPECT_EQ(folder.read("code"), "141\n");
  EXPECT_EQ(pipeline.err(), "");
  EXPECT_TRUE(is_gone(folder.read_pid("rank-0")));
}

TEST(Run, ChildrenOfRanksEndWithTheRun) {
  Folder folder;
  Launched run(fsdp_run(
      {"-n", "2", "sh", "-c", "sleep 1000 & echo $! > $0/child-$RANK; echo done", folder.path()}));
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.out_lines(), (Words{"[0] done", "[1] done"}));
  EXPECT_FALSE(is_alive(folder.read_pid("child-0")));
  EXPECT_FALSE(is_alive(folder.read_pid("child-1")));
}

TEST(Run, APipeHeldOpenByADaemonDoesNotHangTheLauncher) {
  Folder folder;
  Launched run(fsdp_run({"-n", "1", "sh", "-c",
                         "setsid sh -c 'echo $$ > $0/child; exec sleep 1000' $0 & "
                         "while ! test -s $0/child; do sleep 0.01; done; echo done",
                         folder.path()}));
  EXPECT_EQ(run.wait(), 0);
  EXPECT_EQ(run.out(), "done\n");
  kill(folder.read_pid("child"), SIGKILL);
}

TEST(Run, ThreadsAreCoresDividedByRanksUnlessSet) {
  Launched run(fsdp_run({"-n", "2", "sh", "-c", "echo $OMP_NUM_THREADS"}), {"OMP_NUM_THREADS"});
  EXPECT_EQ(run.wait(), 0);
  std::string threads = std::to_string(std::max(1, available_cores() / 2));
  EXPECT_EQ(run.out_lines(), (Words{"[0] " + threads, "[1] " + threads}));
  Launched set(fsdp_run({"-n", "2", "sh", "-c", "echo $OMP_NUM_THREADS"}), {"OMP_NUM_THREADS=7"});
  EXPECT_EQ(set.wait(), 0);
  EXPECT_EQ(set.out_lines(), (Words{"[0] 7", "[1] 7"}));
}

TEST(Run, AutoIsOneRankPerCoreIfNoGpuIsVisible) {
  Launched run(fsdp_run({"-n", "auto", "sh", "-c", "echo $WORLD_SIZE"}), {"CUDA_VISIBLE_DEVICES="});
  EXPECT_EQ(run.wait(), 0);
  std::string cores = std::to_string(available_cores());
  EXPECT_TRUE(has(run.out(), cores + "\n"));
  EXPECT_EQ(run.out_lines().size(), static_cast<size_t>(available_cores()));
}

TEST(Run, RunsAPythonFileInPython) {
  Folder folder;
  std::ofstream(folder / "train.py") << "echo interpreted $RANK $1\n";
  // Any interpreter that accepts -u works.
  Launched run(fsdp_run({"-n", "2", folder / "train.py", "x"}), {"PYTHON_EXEC=sh"});
  EXPECT_EQ(run.wait(), 0) << run.err();
  EXPECT_EQ(run.out_lines(), (Words{"[0] interpreted 0 x", "[1] interpreted 1 x"}));
}

TEST(Run, OnlyRankZeroReadsStandardInput) {
  Launched pipeline(
      {"sh", "-c", "echo hello | \"$0\" run -n 2 sh -c 'cat; echo end'", paths::program("fsdp")});
  EXPECT_EQ(pipeline.wait(), 0);
  EXPECT_EQ(pipeline.out_lines(), (Words{"[0] end", "[0] hello", "[1] end"}));
}

TEST(Run, WorksWithClosedStandardStreams) {
  Folder folder;
  Launched pipeline(
      {"sh", "-c",
       "\"$1\" run -n 2 sh -c 'echo text; echo $RANK > $0/rank-$RANK' \"$0\" <&- >&- 2>&-",
       folder.path(), paths::program("fsdp")});
  EXPECT_EQ(pipeline.wait(), 0);
  EXPECT_EQ(folder.read("rank-0"), "0\n");
  EXPECT_EQ(folder.read("rank-1"), "1\n");
}

}  // namespace
}  // namespace fsdp::launch
