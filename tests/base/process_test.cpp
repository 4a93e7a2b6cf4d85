#include "base/process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fsdp {
namespace {

TEST(Process, ADeadChildIsSeenBeforeItIsReaped) {
  pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  Process process(child);
  EXPECT_TRUE(process.alive());
  kill(child, SIGKILL);
  siginfo_t info;
  waitid(P_PID, child, &info, WEXITED | WNOWAIT);  // a zombie now
  EXPECT_FALSE(process.alive());
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(process.alive());
}

TEST(Process, AStoppedChildIsAliveAndStopped) {
  pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  Process process(child);
  EXPECT_FALSE(process.stopped());
  kill(child, SIGSTOP);
  waitpid(child, nullptr, WUNTRACED);
  EXPECT_TRUE(process.stopped());
  EXPECT_TRUE(process.alive());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST(Process, HostIdentityIsStableAndCanBeSet) {
  EXPECT_EQ(host_identity(), host_identity());
  EXPECT_FALSE(host_identity().empty());
  setenv("FSDP_HOST_ID", "elsewhere", 1);
  EXPECT_EQ(host_identity(), "elsewhere");
  unsetenv("FSDP_HOST_ID");
}

}  // namespace
}  // namespace fsdp
