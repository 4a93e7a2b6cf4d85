// Real ranks under attack: on the port of their store, and by a process that has its name.
#include "base/sockets.h"
#include "comm/ranks.h"
#include "paths.h"

namespace fsdp::testing {
namespace {

const Ranks::Environment kShm = {{"FSDP_BACKEND", "shm"}, {"FSDP_TIMEOUT", "60"}};

void expect_ok(Ranks& ranks, int size) {
  for (int rank = 0; rank < size; ++rank) EXPECT_EQ(ranks.result(rank), "ok") << ranks.logs();
}

void end(Ranks& ranks) {
  std::ofstream(ranks.dir() + "/go") << "";
}

sockets::Deadline soon() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(60);
}

FileDescriptor stranger(int port) {
  std::string why;
  FileDescriptor socket = sockets::connect_tcp("127.0.0.1", port, soon(), why);
  EXPECT_TRUE(socket) << why;
  return socket;
}

TEST(StoreOfRanks, HoldsOnOneHost) {
  Ranks ranks;
  ranks.start(3, {paths::program("rank_program"), "store"}, kShm);
  end(ranks);
  expect_ok(ranks, 3);
}

// SIGPIPE has its default, and the peers of the store are a greeting of c10d's TCPStore with 50
// requests, 300 that say nothing, and one that talks too much.
TEST(StoreOfRanks, HoldsUnderAttackAcrossHosts) {
  for (const char* secret : {"the secret of this run", ""}) {
    Ranks ranks;
    auto environment = kShm;
    const int port = free_port();
    environment["MASTER_PORT"] = std::to_string(port);
    environment["LOCAL_WORLD_SIZE"] = "1";
    environment["FSDP_SECRET"] = secret;
    ranks.start(2, {paths::program("rank_program"), "store"}, environment);
    for (int rank : {0, 1}) EXPECT_EQ(ranks.result(2 + rank), "ready") << ranks.logs();
    std::string greeting("\0\x3c\x85\xf7\x5e", 5);
    for (int i = 0; i < 50; ++i)
      greeting += std::string("\x04\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0x", 18);
    for (int i = 0; i < 5; ++i) sockets::send_all(stranger(port), greeting, soon());
    std::vector<FileDescriptor> idle;
    for (int i = 0; i < 300; ++i) idle.push_back(stranger(port));
    const FileDescriptor talker = stranger(port);
    while (sockets::send_all(talker, std::string(1 << 20, 'x'), soon()) == 0) {
    }
    end(ranks);
    expect_ok(ranks, 2);
    const std::string logs = ranks.logs();
    EXPECT_NE(logs.find("refused a connection to the store: 127.0.0.1 speaks another protocol"),
              std::string::npos)
        << logs;
    EXPECT_EQ(logs.find("have no secret") == std::string::npos, *secret != '\0') << logs;
    EXPECT_EQ(logs.find("the secret of this run"), std::string::npos) << logs;
  }
}

TEST(StoreOfRanks, ASecondRunOfTheSameNameIsAnError) {
  Ranks ranks;
  auto environment = kShm;
  environment["MASTER_PORT"] = std::to_string(free_port());
  ranks.start(2, {paths::program("rank_program"), "store"}, environment);
  EXPECT_EQ(ranks.result(2), "ready");
  environment.insert({{"RANK", "0"},
                      {"LOCAL_RANK", "0"},
                      {"WORLD_SIZE", "2"},
                      {"LOCAL_WORLD_SIZE", "2"},
                      {"MASTER_ADDR", "127.0.0.1"}});
  const pid_t other = ranks.start_one({paths::program("rank_program"), "store"}, environment);
  EXPECT_EQ(WEXITSTATUS(ranks.wait_for(other)), 3);
  const std::string logs = ranks.logs();
  EXPECT_NE(logs.find("rank 0 could not open the store at @fsdp-"), std::string::npos) << logs;
  EXPECT_NE(logs.find("process " + std::to_string(ranks.pids()[0]) + " of user "),
            std::string::npos)
      << logs;
  end(ranks);
  expect_ok(ranks, 2);
}

TEST(StoreOfRanks, AnotherSecretIsAnErrorOnThatRank) {
  Ranks ranks;
  auto environment = kShm;
  environment["FSDP_TIMEOUT"] = "3";
  environment.insert({{"LOCAL_RANK", "0"},
                      {"WORLD_SIZE", "2"},
                      {"LOCAL_WORLD_SIZE", "1"},
                      {"MASTER_ADDR", "127.0.0.1"},
                      {"MASTER_PORT", std::to_string(free_port())}});
  for (const char* rank : {"0", "1"}) {
    environment["RANK"] = rank;
    environment["FSDP_SECRET"] = std::string("the secret of rank ") + rank;
    ranks.start_one({paths::program("rank_program"), "store"}, environment);
  }
  for (pid_t pid : std::vector<pid_t>(ranks.pids())) EXPECT_EQ(WEXITSTATUS(ranks.wait_for(pid)), 3);
  const std::string logs = ranks.logs();
  EXPECT_NE(logs.find("doesn't know the secret of this run"), std::string::npos) << logs;
  EXPECT_NE(logs.find("rank 0: joining the world: 1 of 2 ranks didn't join"), std::string::npos);
  EXPECT_EQ(logs.find("the secret of rank"), std::string::npos) << logs;
}

}  // namespace
}  // namespace fsdp::testing
