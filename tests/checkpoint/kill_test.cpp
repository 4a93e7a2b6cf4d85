// A run killed at any system call of a save leaves a checkpoint that loads: the previous or the new
// one. The seam counts the calls that change the disk.
#include <ATen/ATen.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <set>

#include "base/seams.h"
#include "checkpoint/files.h"
#include "checkpoint/folder.h"
#include "checkpoint/trained.h"
#include "comm/ranks.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

namespace fs = std::filesystem;

int calls_left = 0;

int kill_at_zero(const char*, const checkpoint::files::Path&) {
  if (calls_left-- == 0) ::kill(::getpid(), SIGKILL);
  return 0;
}

int calls = 0;

int count(const char*, const checkpoint::files::Path&) {
  ++calls;
  return 0;
}

enum class How { kSave, kSaveAsync };

// Every parameter is `value`, and so is the extra value.
void save_filled(const fs::path& dir, Trained& trained, int64_t value, How how = How::kSave) {
  StateDict state = trained.sharded.full_state_dict();
  for (auto& [name, tensor] : state) tensor.full().fill_(value);
  trained.sharded.load_full_state_dict(state);
  const checkpoint::SaveOptions options{.extra = {{"value", value}}};
  if (how == How::kSave)
    return checkpoint::save(dir, trained.sharded, trained.optimizer.get(), options);
  checkpoint::save_async(dir, trained.sharded, trained.optimizer.get(), options).wait();
}

// The value that the folder's latest checkpoint is filled with.
int64_t value_of_latest(const fs::path& folder) {
  const auto latest = checkpoint::latest(folder);
  if (!latest) return -1;
  Mlp plain;
  const auto loaded = checkpoint::load(*latest, *plain);
  const auto value = std::get<int64_t>(loaded.extra.at("value"));
  for (const auto& item : plain->named_parameters())
    EXPECT_TRUE(at::equal(item.value(), at::full_like(item.value(), value))) << item.key();
  EXPECT_FALSE(checkpoint::list(folder).empty());
  return value;
}

// Kills a forked child, which is fast enough to do at every call.
void kill_at_every_call(const std::string& second, How how = How::kSave) {
  if (world_size() != 1) GTEST_SKIP() << "for one rank; KillRanks kills one of two";
  auto trained = make_trained("mlp", {});
  int killed = 0;
  for (bool finished = false; !finished; ++killed) {
    SCOPED_TRACE("call " + std::to_string(killed));
    SharedFolder folder;
    save_filled(folder / "step-1", trained, 1);
    const pid_t child = fork();
    if (child == 0) {
      calls_left = killed;
      const WithSeams killed_there({.files = kill_at_zero});
      save_filled(folder / second, trained, 2, how);
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    finished = WIFEXITED(status);
    const auto value = value_of_latest(folder.path());
    EXPECT_TRUE(finished ? value == 2 : value == 1 || value == 2) << value;
    // Leftovers don't get in the way of the next save.
    save_filled(folder / second, trained, 3);
    EXPECT_EQ(value_of_latest(folder.path()), 3);
    ASSERT_LT(killed, 200);
  }
  EXPECT_GT(killed, 12);
}

TEST(Kill, AtEveryCallOfASaveLeavesOneThatLoads) {
  kill_at_every_call("step-2");
}

TEST(Kill, AtEveryCallOfAReplacementLeavesOneThatLoads) {
  kill_at_every_call("step-1");
}

TEST(Kill, AtEveryCallOfABackgroundSaveLeavesOneThatLoads) {
  kill_at_every_call("step-2", How::kSaveAsync);
  kill_at_every_call("step-1", How::kSaveAsync);
}

TEST(Kill, AtEveryCallOfADeletionLeavesTheNewest) {
  if (world_size() != 1) GTEST_SKIP() << "one rank deletes";
  auto trained = make_trained("mlp", {});
  bool finished = false;
  for (int killed = 0; !finished; ++killed) {
    SharedFolder folder;
    for (int64_t step : {1, 2, 3})
      save_filled(folder / ("step-" + std::to_string(step)), trained, step);
    const pid_t child = fork();
    if (child == 0) {
      calls_left = killed;
      const WithSeams killed_there({.files = kill_at_zero});
      checkpoint::keep_last(folder.path(), 1);
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    finished = WIFEXITED(status);
    EXPECT_EQ(value_of_latest(folder.path()), 3);
    for (const auto& path : checkpoint::list(folder.path())) {  // none is incomplete
      Mlp plain;
      checkpoint::load(path, *plain);
    }
    checkpoint::keep_last(folder.path(), 1);
    EXPECT_EQ(checkpoint::list(folder.path()).size(), 1u);
    EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 2);
    ASSERT_LT(killed, 200);
  }
}

// --- two ranks ---

// A rank of two, in a forked process: saves, and is killed at a call of the second save. It ends
// with 0 if both saves succeed.
[[noreturn]] void save_as(int rank, int port, const fs::path& folder, std::optional<int> call,
                          How how) {
  const std::string number = std::to_string(rank);
  ::setenv("RANK", number.c_str(), 1);
  ::setenv("LOCAL_RANK", number.c_str(), 1);
  ::setenv("WORLD_SIZE", "2", 1);
  ::setenv("LOCAL_WORLD_SIZE", "2", 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  try {
    auto trained = make_trained("mlp", {.wrap = wrap::names({})});
    save_filled(folder / "step-1", trained, 1);
    std::optional<WithSeams> killed_there;
    if (call) {
      calls_left = *call;
      killed_there.emplace(Seams{.files = kill_at_zero});
    }
    save_filled(folder / "step-2", trained, 2, how);
    test_world().comm().barrier();  // rank 0 has the store, which the other may still need
    ::_exit(0);
  } catch (const std::exception& error) {  // the other one is gone
    std::fprintf(stderr, "%s\n", error.what());
    ::_exit(1);
  }
}

// Whether both ranks finish. `victims`: those that are killed. If one fails, the other is ended, as
// by fsdp run.
bool save_by_two(const fs::path& folder, const std::vector<int>& victims, int call, How how) {
  const int port = free_port();
  std::set<pid_t> running;
  for (int rank : {0, 1}) {
    const bool victim = std::find(victims.begin(), victims.end(), rank) != victims.end();
    const pid_t pid = fork();
    if (pid == 0) save_as(rank, port, folder, victim ? std::optional(call) : std::nullopt, how);
    running.insert(pid);
  }
  bool finished = true;
  while (!running.empty()) {
    int status = 0;
    running.erase(waitpid(-1, &status, 0));
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    finished = false;
    for (pid_t pid : running) ::kill(pid, SIGTERM);
  }
  return finished;
}

// One rank or both are killed at each call. The ranks are forked: starting programs that load
// LibTorch would take most of the time.
void kill_ranks_at_every_call(How how) {
  if (world_size() != 1) GTEST_SKIP() << "forks a world of two";
  for (const std::vector<int>& victims : std::vector<std::vector<int>>{{0}, {1}, {0, 1}}) {
    int call = 0;
    for (bool finished = false; !finished; ++call) {
      SCOPED_TRACE("rank " + std::to_string(victims[0]) +
                   (victims.size() == 2 ? " and the other" : "") + ", call " +
                   std::to_string(call));
      SharedFolder folder;
      leave_world();  // the forked ranks join another
      finished = save_by_two(folder.path(), victims, call, how);
      const auto value = value_of_latest(folder.path());
      EXPECT_TRUE(finished ? value == 2 : value == 1 || value == 2) << value;
      ASSERT_LT(call, 100) << "the save never succeeds";
    }
    EXPECT_GT(call, 4);
  }
}

TEST(KillRanks, AtEveryCallOfASaveLeavesOneThatLoads) {
  kill_ranks_at_every_call(How::kSave);
}

TEST(KillRanks, AtEveryCallOfABackgroundSaveLeavesOneThatLoads) {
  kill_ranks_at_every_call(How::kSaveAsync);
}

// --- the folder ---

TEST(Folders, ListLatestAndKeepLast) {
  SharedFolder folder;
  auto trained = make_trained("mlp", {});
  EXPECT_EQ(checkpoint::latest(folder.path()), std::nullopt);
  EXPECT_TRUE(checkpoint::list(folder.path()).empty());
  EXPECT_TRUE(checkpoint::list(folder / "nowhere").empty());
  for (int64_t step : {9, 10, 100, 20})
    save_filled(folder / ("step-" + std::to_string(step)), trained, step);
  test_world().comm().barrier();
  const auto names = [&] {
    std::vector<std::string> found;
    for (const auto& path : checkpoint::list(folder.path())) found.push_back(path.filename());
    return found;
  };
  EXPECT_EQ(names(), (std::vector<std::string>{"step-9", "step-10", "step-20", "step-100"}));
  EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-20");  // saved last
  test_world().comm().barrier();
  if (rank() == 0) {
    fs::create_directory(folder / "step-200.partial");
    fs::create_directory(folder / "step-300");  // without .metadata
    checkpoint::keep_last(folder.path(), 1);
    EXPECT_EQ(names(), (std::vector<std::string>{"step-20", "step-100"}));
    fs::remove(folder / "latest");
    EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-100");
    fs::create_directory_symlink("step-300", folder / "latest");
    EXPECT_EQ(checkpoint::latest(folder.path()), folder / "step-100");
    checkpoint::keep_last(folder.path(), 1);
    EXPECT_EQ(names(), (std::vector<std::string>{"step-100"}));
    expect_error([&] { checkpoint::keep_last(folder.path(), 0); }, {"at least one"});
  }
}

TEST(Folders, NamesThatLeadElsewhereAreRefused) {
  using checkpoint::checked_name;
  EXPECT_EQ(checked_name("run/step-1"), "run/step-1");
  EXPECT_EQ(checked_name("run/step-1/"), "run/step-1");
  EXPECT_EQ(checked_name("../step-1"), "../step-1");
  EXPECT_EQ(checked_name("step-1"), "step-1");
  for (const std::string name : {"", "/", ".", "..", "./", "../", "run/..", "run/../", "run/.",
                                 "run/latest", "run/a.partial", "a.deleted", "a.replaced"})
    expect_error([&] { checked_name(name); }, {"\"" + name + "\"", "name"});
}

// A path given by mistake: the home directory, or a folder with other files.
TEST(Folders, OnlyCheckpointsAreReplacedAndDeleted) {
  SharedFolder folder;
  auto trained = make_trained("mlp", {});
  const auto refused = [&](const std::string& file) {
    const fs::path dir = folder / "home", precious = dir / file;
    if (rank() == 0) {
      fs::create_directories(precious.parent_path());
      std::ofstream(precious) << "mine";
    }
    test_world().comm().barrier();
    expect_error([&] { checkpoint::save(dir, trained.sharded, nullptr); },
                 {"home", "not replaced"});
    EXPECT_TRUE(fs::exists(precious)) << file;
    test_world().comm().barrier();
    if (rank() == 0) fs::remove_all(dir);
    test_world().comm().barrier();
  };
  for (const std::string file : {"letter.txt", "folder/letter.txt", "__0_0.distcp/letter.txt",
                                 "__0_x.distcp", "x__0_0.distcp", "__0.distcp", "_.metadata"})
    refused(file);
  // In a leftover directory, in place of a directory, and inside of a checkpoint.
  if (rank() == 0) {
    fs::create_directories(folder / "a.partial");
    std::ofstream(folder / "a.partial/letter.txt") << "mine";
    std::ofstream(folder / "b") << "mine";
    fs::create_directories(folder / "elsewhere");
    fs::create_directory_symlink("elsewhere", folder / "c");
  }
  test_world().comm().barrier();
  for (const std::string name : {"a", "b", "c"})
    expect_error([&] { checkpoint::save(folder / name, trained.sharded, nullptr); },
                 {folder / name});
  EXPECT_TRUE(fs::exists(folder / "a.partial/letter.txt") && fs::exists(folder / "b"));
  for (int64_t step : {1, 2, 3})
    save_filled(folder / ("step-" + std::to_string(step)), trained, step);
  if (rank() == 0) {
    std::ofstream(folder / "step-1/letter.txt") << "mine";
    fs::create_directories(folder / "other");
    std::ofstream(folder / "other/latest") << "mine";
    fs::create_directories(folder / "old.deleted");
    std::ofstream(folder / "old.deleted/letter.txt") << "mine";
    checkpoint::keep_last(folder.path(), 1);
    EXPECT_TRUE(fs::exists(folder / "step-1/letter.txt"));
    EXPECT_TRUE(fs::exists(folder / "step-1/.metadata"));
    EXPECT_FALSE(fs::exists(folder / "step-2"));
    EXPECT_TRUE(fs::exists(folder / "old.deleted/letter.txt"));
  }
  test_world().comm().barrier();
  expect_error([&] { checkpoint::save(folder / "other/a", trained.sharded, nullptr); }, {"latest"});
  EXPECT_TRUE(fs::is_regular_file(folder / "other/latest"));
}

int no_exchange(const char* call, const checkpoint::files::Path&) {
  return std::string(call) == "exchange" ? EINVAL : 0;
}

TEST(Folders, AFileSystemThatCannotExchangeReplacesInTwoSteps) {
  SharedFolder folder;
  auto trained = make_trained("mlp", {});
  save_filled(folder / "a", trained, 1);
  {
    const WithSeams cannot({.files = no_exchange});
    save_filled(folder / "a", trained, 2);
  }
  EXPECT_EQ(value_of_latest(folder.path()), 2);
  test_world().comm().barrier();
  if (rank() == 0) {  // the state between the two steps
    fs::rename(folder / "a", folder / "a.replaced");
    EXPECT_EQ(value_of_latest(folder.path()), 2);
  }
}

TEST(Folders, APlainSaveTakesFewCalls) {
  SharedFolder folder;
  auto trained = make_trained("transformer", {});
  trained.train(1);
  calls = 0;
  const WithSeams counted({.files = count});
  checkpoint::save(folder / "a", trained.sharded, trained.optimizer.get());
  EXPECT_LT(calls, 25);  // hundreds of small items share a write
}

}  // namespace
}  // namespace fsdp::testing
