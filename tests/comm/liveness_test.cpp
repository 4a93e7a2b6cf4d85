// What a rank learns of one on another host.
#include "comm/liveness.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>

#include "base/rank_status.h"

namespace fsdp::comm {
namespace {

// The rank of the next test: a process of its own, because a process looks for its page only once.
TEST(LivenessRank, LetsGoOfTheWorldOfWhichItsLauncherSaysThatARankDied) {
  if (!getenv(rank_status::kVariable)) GTEST_SKIP() << "started by another test";
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  store->set("process/0", "1 another host");
  Liveness liveness(store, 1, 2, std::chrono::seconds(60));
  EXPECT_EQ(liveness.trouble({0, 1}), "");
  rank_status::set_step(1);
  std::string trouble;
  for (int i = 0; i < 6000 && trouble.empty(); ++i) {
    usleep(1000);
    trouble = liveness.trouble({0, 1});
  }
  EXPECT_EQ(trouble, "a rank of this run died, as the launcher says");
  rank_status::set_waits_for(1);
  EXPECT_EQ(liveness.trouble({0, 1}), "") << "it was about an earlier world";
}

TEST(Liveness, ADeathOnAnotherHostIsKnownFromTheLauncher) {
  rank_status::SharedPage page;
  ASSERT_GE(page.fd(), 0);
  const pid_t child = fork();
  if (child == 0) {
    fcntl(page.fd(), F_SETFD, 0);
    setenv(rank_status::kVariable, std::to_string(page.fd()).c_str(), 1);
    execl("/proc/self/exe", "library_tests", "--gtest_filter=LivenessRank.*", nullptr);
    _exit(2);
  }
  for (int i = 0; i < 60'000 && page.read().step == 0; ++i) usleep(1000);
  EXPECT_EQ(page.read().step, 1);
  page.tell_to_let_go(1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace fsdp::comm
