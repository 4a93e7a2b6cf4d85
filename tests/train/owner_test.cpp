// Who may write into a run's directory: one process at a time, and what a process that lost it can
// still do. Owners are forked.
#include "train/owner.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/format.h"
#include "checkpoint/folder.h"
#include "checkpoint/made.h"
#include "checkpoint/test_files.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;
using checkpoint::error_of;
using checkpoint::Folder;
using checkpoint::has;

constexpr auto kNever = std::chrono::hours(1);
// Refuses at once, and judges owners on other machines only by what they touch.
const Owner::Times kImpatient{.beat = std::chrono::milliseconds(20),
                              .silence = kNever,
                              .moment = std::chrono::milliseconds(0),
                              .ending = std::chrono::minutes(1)};

RunDirectory made_run(const Folder& folder) {
  RunDirectory run{folder / "run"};
  fs::create_directories(run.checkpoints());
  return run;
}

// A process that owns a run's directory until it is told to end, or killed.
class Holder {
 public:
  explicit Holder(const RunDirectory& run, bool take_over = false, const char* host = nullptr) {
    int orders[2], answers[2];
    if (pipe2(orders, O_CLOEXEC) != 0 || pipe2(answers, O_CLOEXEC) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      close(orders[1]);
      if (host) setenv("FSDP_HOST_ID", host, 1);
      obey(run, take_over, orders[0], answers[1]);
    }
    close(orders[0]);
    close(answers[1]);
    orders_ = orders[1], answers_ = answers[0];
    owns_ = answer() == 'y';
  }
  ~Holder() {
    if (orders_ >= 0) end(SIGKILL);
    close(answers_);
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  pid_t pid() const { return pid_; }
  bool owns() const { return owns_; }  // it got the directory
  bool still_owns() {
    if (write(orders_, "c", 1) != 1) return false;
    return answer() == 'y';
  }
  void stop() {
    kill(pid_, SIGSTOP);
    waitpid(pid_, nullptr, WUNTRACED);
  }
  void end(int signal) {  // 0: it gives the directory back
    if (signal != 0) kill(pid_, signal);
    close(std::exchange(orders_, -1));
    waitpid(pid_, nullptr, 0);
  }

 private:
  [[noreturn]] static void obey(const RunDirectory& run, bool take_over, int orders, int answers) {
    const auto say = [&](char word) {
      if (write(answers, &word, 1) != 1) _exit(1);
    };
    try {
      const Owner owner(run, take_over, kImpatient);
      say('y');
      for (char order; read(orders, &order, 1) == 1;)
        say(error_of([&] { owner.check(); }).empty() ? 'y' : 'n');
    } catch (const std::exception&) {
      say('n');
    }
    _exit(0);
  }
  char answer() const {
    char word = 0;
    return read(answers_, &word, 1) == 1 ? word : '\0';
  }

  pid_t pid_ = 0;
  int orders_ = -1, answers_ = -1;
  bool owns_ = false;
};

void touch_long_ago(const fs::path& file) {
  const timespec times[2] = {{1'000'000, 0}, {1'000'000, 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, file.c_str(), times, 0), 0);
}

TEST(Owner, TheSecondIsRefusedAndToldAboutTheFirst) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  const Holder first(run);
  ASSERT_TRUE(first.owns());
  const std::string said = error_of([&] { Owner(run, false, kImpatient); });
  EXPECT_TRUE(has(said, formatted("process {}", first.pid()))) << said;
  EXPECT_TRUE(has(said, "which is running")) << said;
  EXPECT_TRUE(has(said, "--take-over")) << said;
}

TEST(Owner, GivenBackItIsFreeForAnyMachine) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  Holder(run).end(0);
  Holder elsewhere(run, false, "elsewhere");
  EXPECT_TRUE(elsewhere.owns());
  elsewhere.end(0);
  const Owner third(run, false, kImpatient);
  EXPECT_EQ(third.number(), 3);
  third.check();
}

TEST(Owner, AfterAKillTheNextTakesItAtOnce) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  Holder first(run);
  first.end(SIGKILL);
  EXPECT_EQ(Owner(run, false, kImpatient).number(), 2);
  Holder zombie(run);
  kill(zombie.pid(), SIGKILL);  // nobody has reaped it yet
  EXPECT_EQ(Owner(run, false, kImpatient).number(), 4);
}

TEST(Owner, AReusedPidIsNotTheOwner) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  Holder first(run);
  first.end(SIGKILL);
  const std::string file = run.owner() / "1.json";
  std::ifstream in(file);
  std::string text((std::istreambuf_iterator<char>(in)), {});
  const std::string pid = formatted("\"pid\": {}", first.pid());
  text.replace(text.find(pid), pid.size(), formatted("\"pid\": {}", getpid()));
  std::ofstream(file) << text;
  EXPECT_EQ(Owner(run, false, kImpatient).number(), 2);
}

TEST(Owner, AStoppedOneIsRefusedUnlessItIsTakenOver) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  Holder first(run);
  first.stop();
  const std::string said = error_of([&] { Owner(run, false, kImpatient); });
  EXPECT_TRUE(has(said, "which is stopped") && has(said, "kill -CONT")) << said;
  const Owner second(run, /*take_over=*/true, kImpatient);
  kill(first.pid(), SIGCONT);
  EXPECT_FALSE(first.still_owns());
  first.end(0);  // and doesn't give back what isn't its own
  second.check();
}

TEST(Owner, OnAnotherMachineItsTouchesTell) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  Holder first(run, false, "elsewhere");
  const std::string said = error_of([&] { Owner(run, false, kImpatient); });
  EXPECT_TRUE(has(said, "which is alive")) << said;
  first.stop();
  touch_long_ago(run.owner() / "1.json");
  const Owner second(run, false, kImpatient);
  kill(first.pid(), SIGCONT);
  EXPECT_FALSE(first.still_owns());
  second.check();
}

TEST(Owner, ADamagedFileCountsAsAnOwnerThatTouchesIt) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  fs::create_directories(run.owner());
  std::ofstream(run.owner() / "7.json") << "{\"number\": 7, \"pid\": \"x\"";
  touch_long_ago(run.owner() / "7.json");
  EXPECT_EQ(Owner(run, false, kImpatient).number(), 8);
}

TEST(Owner, OfManyThatTryOneWins) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  for (int round = 0; round < 5; ++round) {
    Holder(run).end(SIGKILL);
    std::vector<std::unique_ptr<Holder>> all(6);
    std::vector<std::thread> starts;  // at the same time
    for (auto& one : all)
      starts.emplace_back([&] { one = std::make_unique<Holder>(run); });
    for (auto& start : starts) start.join();
    int owners = 0;
    for (auto& one : all) owners += one->owns() && one->still_owns() ? 1 : 0;
    EXPECT_EQ(owners, 1);
  }
}

TEST(Owner, ADeletedDirectoryIsAnError) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  const Owner owner(run, false, kImpatient);
  fs::remove_all(run.checkpoints());
  EXPECT_TRUE(has(error_of([&] { owner.check(); }), "checkpoints was deleted"));
  fs::rename(run.root, folder / "moved");
  EXPECT_TRUE(has(error_of([&] { owner.check(); }), "deleted or moved"));
  fs::create_directories(run.checkpoints());  // another run, in the same place
  const Owner other(run, false, kImpatient);
  EXPECT_TRUE(has(error_of([&] { owner.check(); }), "deleted or replaced"));
  other.check();
}

// In a child, whose limit isn't this process's.
TEST(Owner, ThatTheProcessMayOpenNoFilesIsSaid) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  const pid_t child = fork();
  if (child == 0) {
    const rlimit none{0, 0};
    setrlimit(RLIMIT_NOFILE, &none);
    _exit(has(error_of([&] { Owner(run, false, kImpatient); }), "ulimit -n") ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// --- what it has begun ---

void write_checkpoint(const fs::path& dir, int64_t value) {
  checkpoint::Made made(dir);
  made.value({std::string("extra"), std::string("step")}, value);
  made.finish(true);
}

int64_t step_of(const fs::path& dir) {
  return std::get<int64_t>(checkpoint::read_extra(dir).at("step"));
}

checkpoint::Partial begun(const RunDirectory& run, const Owner& owner, int64_t step) {
  checkpoint::Partial partial{run.checkpoint(step), owner.epoch(), [&owner] { owner.check(); }};
  checkpoint::begin_partial(partial);
  fs::remove(partial.path());
  write_checkpoint(partial.path(), step);
  return partial;
}

TEST(Owner, WhatTheLastOneHasBegunCannotBePublished) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  const Owner first(run, false, kImpatient);
  const auto published = begun(run, first, 1);
  checkpoint::publish_partial(published);
  auto stale = begun(run, first, 2);
  const Owner second(run, /*take_over=*/true, kImpatient);
  EXPECT_FALSE(fs::exists(stale.path()));  // renamed and removed
  EXPECT_TRUE(has(error_of([&] { checkpoint::publish_partial(stale); }), "is gone"));
  // It believes that it is still the owner: it was stopped right behind the check.
  stale.check = {};
  EXPECT_TRUE(has(error_of([&] { checkpoint::publish_partial(stale); }), "is gone"));
  EXPECT_TRUE(has(error_of([&] { begun(run, first, 3); }), "taken over"));
  checkpoint::publish_partial(begun(run, second, 2));
  EXPECT_EQ(checkpoint::latest(run.checkpoints()), run.checkpoint(2));
  EXPECT_EQ(step_of(run.checkpoint(2)), 2);
  EXPECT_EQ(step_of(run.checkpoint(1)), 1);
  for (const auto& entry : fs::directory_iterator(run.checkpoints()))
    EXPECT_FALSE(has(entry.path().filename(), ".partial")) << entry.path();
}

TEST(Owner, ALinkThatTheLastOneHasMadeIsRemoved) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  const Owner first(run, false, kImpatient);
  // Stopped between the two calls that move the link.
  const fs::path fresh = run.checkpoints() / ("latest.partial." + first.epoch());
  fs::create_symlink("step-1", fresh);
  const Owner second(run, /*take_over=*/true, kImpatient);
  EXPECT_FALSE(fs::is_symlink(fresh));
}

TEST(Owner, AnOldOneDeletesNothing) {
  Folder folder;
  const RunDirectory run = made_run(folder);
  const Owner first(run, false, kImpatient);
  for (int64_t step : {1, 2, 3}) checkpoint::publish_partial(begun(run, first, step));
  const Owner second(run, /*take_over=*/true, kImpatient);
  const std::string said = error_of(
      [&] { checkpoint::keep_last(run.checkpoints(), 1, [&] { first.check(); }); });
  EXPECT_TRUE(has(said, "taken over")) << said;
  EXPECT_EQ(checkpoint::list(run.checkpoints()).size(), 3u);
  checkpoint::keep_last(run.checkpoints(), 1, [&] { second.check(); });
  EXPECT_EQ(checkpoint::list(run.checkpoints()).size(), 1u);
}

}  // namespace
}  // namespace fsdp::train
