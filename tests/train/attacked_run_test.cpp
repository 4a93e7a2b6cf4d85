// A run over several hosts, as far as its launchers and ranks can tell, while strangers sit on its
// ports and say nothing. tests/comm/attacks_test.cpp has what else they can try.
#include <gtest/gtest.h>

#include <sys/socket.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <memory>
#include <vector>

#include "base/sockets.h"
#include "free_port.h"
#include "paths.h"
#include "train/runs.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;
using launch::eventually;
using launch::Folder;
using launch::Launched;

constexpr int kStrangers = 300;

// Connections to a port that say nothing.
std::vector<FileDescriptor> strangers_at(int port) {
  std::vector<FileDescriptor> idle;
  for (int i = 0; i < kStrangers; ++i) {
    std::string why;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    idle.push_back(sockets::connect_tcp("127.0.0.1", port, limit, why));
    EXPECT_TRUE(idle.back()) << why;
  }
  return idle;
}

int dropped(const std::vector<FileDescriptor>& sockets) {
  return static_cast<int>(std::count_if(sockets.begin(), sockets.end(), [](const auto& socket) {
    char byte;
    const ssize_t got = recv(socket.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return got == 0 || (got < 0 && errno == ECONNRESET);
  }));
}

// Two nodes of one rank, which save after every step.
class AttackedRun : public testing::Test {
 protected:
  std::unique_ptr<Launched> node(int number) {
    Words all = {paths::program("fsdp"),
                 "run",
                 "--nnodes",
                 "2",
                 "--node-rank",
                 std::to_string(number),
                 "--master",
                 "127.0.0.1:" + std::to_string(store_),
                 "--control-port",
                 std::to_string(control_),
                 "--max-restarts",
                 "1",
                 "--",
                 paths::program("fsdp"),
                 "train",
                 "--checkpoint.every",
                 "1",
                 "--checkpoint.when_busy",
                 "wait",
                 "--recovery.memory",
                 "off",
                 "--log.every",
                 "1"};
    const Words run = tiny_run(folder_, "run", 10'000'000);
    all.insert(all.end(), run.begin(), run.end());
    return std::make_unique<Launched>(
        all, Words{"FSDP_SECRET=the secret of a run of two nodes", "OMP_NUM_THREADS=1",
                   "FSDP_BACKEND=shm", "FSDP_TIMEOUT=60", "RANK", "WORLD_SIZE"});
  }
  // The number of the newest checkpoint that is complete; 0 if there is none.
  int saved() const {
    std::error_code problem;
    const fs::path newest = fs::read_symlink(folder_ / "run/checkpoints/latest", problem);
    return problem ? 0 : std::atoi(newest.string().substr(5).c_str());  // "step-N"
  }

  Folder folder_;
  const int store_ = free_port(), control_ = free_port();
};

TEST_F(AttackedRun, SavesWhileIdleConnectionsSitOnItsPorts) {
  const auto first = node(0), second = node(1);
  ASSERT_TRUE(eventually([&] { return saved() > 0; })) << first->err() << second->err();
  const auto at_store = strangers_at(store_), at_launcher = strangers_at(control_);
  const int before = saved();
  // The second save from now on began when they were there.
  EXPECT_TRUE(eventually([&] { return saved() > before + 2; })) << first->err() << second->err();
  // Those for which there is no room go at once, the others when their time is over.
  EXPECT_TRUE(eventually([&] { return dropped(at_store) > kStrangers / 2; })) << dropped(at_store);
  EXPECT_TRUE(eventually([&] { return dropped(at_launcher) > kStrangers / 2; }))
      << dropped(at_launcher);
  EXPECT_TRUE(
      launch::has(first->err(), "refused a connection to the store: 127.0.0.1 said nothing"));
  EXPECT_TRUE(launch::has(first->err(), "refused a launcher: 127.0.0.1 said nothing"));
  first->signal(SIGTERM);
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(second->wait(), 0) << second->err();
  EXPECT_EQ(fsdp({"ckpt", "verify", folder_ / "run/checkpoints/latest"}).code, 0);
}

}  // namespace
}  // namespace fsdp::train
