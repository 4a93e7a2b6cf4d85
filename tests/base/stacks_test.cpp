#include "base/stacks.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace fsdp {
namespace {

const ThreadStack* find(const std::vector<ThreadStack>& all, pid_t thread) {
  auto found = std::find_if(all.begin(), all.end(),
                            [&](const ThreadStack& one) { return one.thread == thread; });
  return found == all.end() ? nullptr : &*found;
}

bool has_frame(const ThreadStack& stack, const std::string& part) {
  return std::any_of(stack.frames.begin(), stack.frames.end(), [&](const std::string& frame) {
    return frame.find(part) != std::string::npos;
  });
}

// A thread that waits in read() until `end` is closed.
class Waiting {
 public:
  explicit Waiting(bool blocks_signals = false) {
    if (pipe(pipe_) != 0) ADD_FAILURE() << "no pipe";
    thread_ = std::thread([this, blocks_signals] {
      pthread_setname_np(pthread_self(), "waiting");
      sigset_t all;
      sigfillset(&all);
      if (blocks_signals) pthread_sigmask(SIG_SETMASK, &all, nullptr);
      id_ = static_cast<pid_t>(syscall(SYS_gettid));
      char byte;
      ended_ = read(pipe_[0], &byte, 1) == 0;
    });
    while (id_ == 0) std::this_thread::yield();
  }
  ~Waiting() {
    close(pipe_[1]);
    thread_.join();
    EXPECT_TRUE(ended_) << "the signal interrupted read()";
    close(pipe_[0]);
  }
  pid_t id() const { return id_; }

 private:
  int pipe_[2] = {-1, -1};
  std::atomic<pid_t> id_{0};
  bool ended_ = false;
  std::thread thread_;
};

TEST(Stacks, OfAllOtherThreadsAreTakenWithoutDisturbingThem) {
  Waiting one, other;
  std::vector<ThreadStack> stacks;
  // From a thread: the main one is shown as well.
  std::thread([&] { stacks = other_stacks(std::chrono::seconds(20)); }).join();
  ASSERT_GE(stacks.size(), 3u);
  EXPECT_EQ(stacks[0].thread, getpid());
  for (const Waiting* waiting : {&one, &other}) {
    const ThreadStack* stack = find(stacks, waiting->id());
    ASSERT_TRUE(stack);
    EXPECT_EQ(stack->name, "waiting");
    EXPECT_FALSE(stack->frames.empty());
    EXPECT_FALSE(stack->state.empty());
  }
  EXPECT_TRUE(has_frame(stacks[0], "libc.so")) << stacks[0].frames.size();
}

TEST(Stacks, AThreadThatBlocksSignalsIsListedWithoutOne) {
  Waiting deaf(/*blocks_signals=*/true);
  Waiting other;
  for (int i = 0; i < 2; ++i) {  // its signal stays pending
    const auto stacks = other_stacks(std::chrono::milliseconds(100));
    const ThreadStack* stack = find(stacks, deaf.id());
    ASSERT_TRUE(stack);
    EXPECT_TRUE(stack->frames.empty());
    const ThreadStack* heard = find(stacks, other.id());
    ASSERT_TRUE(heard);
  }
}

TEST(Stacks, AddressesHaveTheirSymbolAndFile) {
  EXPECT_NE(describe_address(reinterpret_cast<void*>(&fork)).find("fork+0x0 (libc"),
            std::string::npos)
      << describe_address(reinterpret_cast<void*>(&fork));
  EXPECT_EQ(describe_address(reinterpret_cast<void*>(8)), "0x8");
}

}  // namespace
}  // namespace fsdp
