#include "base/stacks.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string_view>
#include <thread>

#include "base/format.h"
#include "base/mutex.h"
#include "base/rank_status.h"
#include "base/regular_file.h"

namespace fsdp::base {
namespace {

constexpr int kMostFrames = 96;
constexpr int kOwnFrames = 2;         // the handler and what the kernel put below it
constexpr size_t kLongestName = 200;  // characters of a symbol; templates are longer

// A thread that is asked late may still answer, so the handler stays installed, and only one thread
// at a time may write.
std::atomic<pid_t> wanted{0};  // thread
std::atomic<bool> busy{false};
std::atomic<int> frames_found{0};
void* found[kMostFrames];
Mutex one_at_a_time;

pid_t thread_id() {
  return static_cast<pid_t>(syscall(SYS_gettid));
}

int stack_signal() {
  return SIGRTMAX - 3;
}

void answer(int) {
  const int error = errno;
  if (wanted.load() == thread_id() && !busy.exchange(true)) {
    frames_found.store(backtrace(found, kMostFrames), std::memory_order_release);
    wanted = 0;
    busy = false;
  }
  errno = error;
}

// False: the program uses the signal itself.
bool install_handler() {
  struct sigaction now {};
  sigaction(stack_signal(), nullptr, &now);
  if (now.sa_handler == answer) return true;
  if ((now.sa_flags & SA_SIGINFO) || now.sa_handler != SIG_DFL) return false;
  void* one = nullptr;
  backtrace(&one, 1);  // loads what it needs, which a handler must not
  struct sigaction action {};
  action.sa_handler = answer;
  action.sa_flags = SA_RESTART;
  return sigaction(stack_signal(), &action, nullptr) == 0;
}

std::vector<std::string> ask_thread(pid_t thread, std::chrono::milliseconds limit)
    FSDP_REQUIRES(one_at_a_time) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + limit;
  auto wait_until = [&](auto&& condition) {
    while (!condition() && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::microseconds(200));  // Ends: at the deadline
    return condition();
  };
  if (!wait_until([] { return !busy.load(); })) return {};
  frames_found = 0;
  wanted = thread;
  if (syscall(SYS_tgkill, getpid(), thread, stack_signal()) != 0) return {};
  wait_until([] { return wanted.load() == 0 && !busy.load(); });
  if (wanted.exchange(0) != 0 || busy.load()) return {};
  std::vector<std::string> frames;
  const int count = frames_found.load(std::memory_order_acquire);
  for (int i = kOwnFrames; i < count; ++i) frames.push_back(describe_address(found[i]));
  return frames;
}

}  // namespace

std::string describe_address(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || !info.dli_fname)
    return formatted("{:#x}", reinterpret_cast<uintptr_t>(address));
  std::string_view file = info.dli_fname;
  file = file.substr(file.rfind('/') + 1);
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (!info.dli_sname)  // an offset that addr2line takes
    return formatted("{}+{:#x}", file, at - reinterpret_cast<uintptr_t>(info.dli_fbase));
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> plain(
      abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
  std::string name = plain ? plain.get() : info.dli_sname;
  if (name.size() > kLongestName) name = name.substr(0, kLongestName) + "…";
  return formatted("{}+{:#x} ({})", name, at - reinterpret_cast<uintptr_t>(info.dli_saddr), file);
}

std::vector<ThreadStack> other_stacks(std::chrono::milliseconds limit) {
  Lock lock(one_at_a_time);
  const bool answers = install_handler();
  std::vector<ThreadStack> stacks;
  std::error_code problem;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", problem)) {
    const pid_t thread = std::atoi(task.path().filename().c_str());
    if (thread == thread_id()) continue;
    ThreadStack stack;
    stack.thread = thread;
    stack.state = rank_status::thread_state(thread);
    stack.name = read_if_there(task.path() / "comm");
    if (stack.name.ends_with('\n')) stack.name.pop_back();
    if (answers) stack.frames = ask_thread(thread, limit);
    stacks.push_back(std::move(stack));
  }
  std::stable_sort(stacks.begin(), stacks.end(), [](const ThreadStack& a, const ThreadStack& b) {
    return (a.thread == getpid()) > (b.thread == getpid());
  });
  return stacks;
}

}  // namespace fsdp::base
