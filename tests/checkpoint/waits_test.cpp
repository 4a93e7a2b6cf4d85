// How long ranks wait for each other in a save: as long as the awaited one shows progress, and no
// longer than the timeout once it doesn't. Ranks are forked processes, and a stopped one is
// stopped.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "checkpoint/together.h"
#include "checkpoint/trained.h"
#include "comm/ranks.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

constexpr int kTimeout = 4;  // seconds

using Act = std::function<void(const World& world, checkpoint::Exchange& exchange)>;

// A rank of three: acts, and leaves "done" or its error in a file.
[[noreturn]] void be_rank(int rank, int port, const std::string& folder, const Act& act) {
  const std::map<std::string, std::string> environment = {
      {"RANK", std::to_string(rank)},
      {"LOCAL_RANK", std::to_string(rank)},
      {"WORLD_SIZE", "3"},
      {"LOCAL_WORLD_SIZE", "3"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(port)},
      {"FSDP_BACKEND", "shm"},
      {"FSDP_TIMEOUT", std::to_string(kTimeout)}};
  for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
  std::string said = "done";
  try {
    const World& world = test_world();
    auto exchange = checkpoint::by_store(world, "test");
    world.comm().barrier();
    act(world, exchange);
  } catch (const std::exception& error) {
    said = error.what();
  }
  const std::string file = folder + "/rank-" + std::to_string(rank);
  std::ofstream(file + ".partial") << said << std::flush;
  fs::rename(file + ".partial", file);
  while (true) ::pause();  // rank 0 has the store, which the others may still need
}

// What the ranks left, without that of `victim`, who leaves nothing.
std::map<int, std::string> said_by_three(const Act& act, int victim = -1) {
  SharedFolder folder;
  leave_world();  // the forked ranks join another
  const int port = free_port();
  std::vector<pid_t> pids;
  for (int rank : {0, 1, 2}) {
    pids.push_back(::fork());
    if (pids.back() == 0) be_rank(rank, port, folder.path().string(), act);
  }
  std::map<int, std::string> said;
  for (int rank : {0, 1, 2}) {
    if (rank == victim) continue;
    const fs::path file = folder / ("rank-" + std::to_string(rank));
    for (int i = 0; i < 6000 && !fs::exists(file); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::ifstream in(file);
    said[rank] = {std::istreambuf_iterator<char>(in), {}};
  }
  for (const pid_t pid : pids) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  return said;
}

void save_nothing(const World& world, const checkpoint::Exchange& exchange) {
  checkpoint::commit(
      world, exchange, "the save", [] { return std::string(); }, [](const auto&) {});
}

const std::string kNoProgress = "no progress in " + std::to_string(kTimeout) + " s";

TEST(WaitingRanks, GiveUpOnAStoppedRankAfterTheTimeout) {
  if (world_size() != 1) GTEST_SKIP() << "forks a world of three";
  const auto said = said_by_three(
      [](const World& world, auto& exchange) {
        if (world.rank() == 2) ::raise(SIGSTOP);
        save_nothing(world, exchange);
      },
      /*victim=*/2);
  EXPECT_TRUE(contains(said.at(0), "the save: waiting for rank 2: " + kNoProgress)) << said.at(0);
  // Told by rank 0, or found at the same time.
  EXPECT_TRUE(contains(said.at(1), "for rank 2: " + kNoProgress)) << said.at(1);
}

TEST(WaitingRanks, WaitForARankThatStillWrites) {
  if (world_size() != 1) GTEST_SKIP() << "forks a world of three";
  const auto said = said_by_three([](const World& world, auto& exchange) {
    for (int i = 0; world.rank() == 2 && i < 10 * kTimeout; ++i) {  // twice the timeout
      exchange.progress(i + 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    save_nothing(world, exchange);
  });
  for (const auto& [rank, text] : said) EXPECT_EQ(text, "done") << "rank " << rank;
}

TEST(WaitingRanks, GiveUpOnAStoppedStoreAfterTheTimeout) {
  if (world_size() != 1) GTEST_SKIP() << "forks a world of three";
  const auto said = said_by_three(
      [](const World& world, auto& exchange) {
        if (world.rank() == 0) ::raise(SIGSTOP);  // it has the store
        save_nothing(world, exchange);
      },
      /*victim=*/0);
  for (int rank : {1, 2}) {
    const std::string& text = said.at(rank);
    EXPECT_TRUE(contains(text, kNoProgress) ||
                contains(text, "the rendezvous store didn't answer"))
        << text;
  }
}

}  // namespace
}  // namespace fsdp::testing
