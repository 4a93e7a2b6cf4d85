#include "base/crash.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <thread>

namespace fsdp::crash {
namespace {

constexpr int kCrashes[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr size_t kStack = 128 << 10;  // of handlers, for a thread whose own stack has overflowed

std::atomic<pid_t> owner{0};  // 0: not installed
std::atomic<void (*)(const char*)> on_crash{nullptr};
std::atomic<void (*)(bool)> on_request{nullptr};
std::atomic<pid_t> asker{0};
std::atomic<int> requests{-1};  // eventfd; -1: SIGUSR2 isn't ours
struct sigaction before[std::size(kCrashes)];
std::terminate_handler terminate_before = nullptr;

const char* crash_name(int signal) {
  switch (signal) {
    case SIGSEGV:
      return "SIGSEGV";
    case SIGBUS:
      return "SIGBUS";
    case SIGFPE:
      return "SIGFPE";
    case SIGILL:
      return "SIGILL";
    default:
      return "SIGABRT";
  }
}

void call_crashed(const char* why) {
  if (getpid() != owner.load()) return;
  if (auto* hook = on_crash.load()) hook(why);
}

void handle_crash(int signal, siginfo_t* info, void*) {
  const int error = errno;
  call_crashed(crash_name(signal));
  for (size_t i = 0; i < std::size(kCrashes); ++i)
    if (kCrashes[i] == signal) sigaction(signal, &before[i], nullptr);
  // A fault comes again when we return. A signal that was sent doesn't.
  if (info->si_code <= 0) syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), signal);
  errno = error;
}

[[noreturn]] void handle_terminate() {
  const char* why = "std::terminate";
  if (std::exception_ptr failure = std::current_exception()) {
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& known) {
      call_crashed(known.what());
      why = nullptr;
    } catch (...) {
      why = "an exception of unknown type";
    }
  }
  if (why) call_crashed(why);
  if (terminate_before) terminate_before();
  std::abort();
}

void handle_request(int, siginfo_t* info, void*) {
  const int error = errno;
  asker = info->si_pid;
  const uint64_t one = 1;
  // Full: a request is waiting already.
  if (getpid() == owner.load() && write(requests.load(), &one, sizeof one) < 0) errno = error;
  errno = error;
}

void serve_requests(int events) {
  pthread_setname_np(pthread_self(), "fsdp-report");
  uint64_t count = 0;
  for (;;) {
    if (read(events, &count, sizeof count) != sizeof count && errno != EINTR) return;
    if (auto* hook = on_request.load()) hook(asker == getppid());
  }
}

void take_crashes() {
  // Static: threads of this process may still crash while it exits.
  static char stack[kStack];
  stack_t current{}, own{};
  own.ss_sp = stack;
  own.ss_size = sizeof stack;
  if (sigaltstack(nullptr, &current) == 0 && current.ss_flags == SS_DISABLE)
    sigaltstack(&own, nullptr);
  struct sigaction action {};
  action.sa_sigaction = handle_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (size_t i = 0; i < std::size(kCrashes); ++i) sigaction(kCrashes[i], &action, &before[i]);
  terminate_before = std::set_terminate(handle_terminate);
}

void take_requests(bool again) {
  struct sigaction now {};
  sigaction(SIGUSR2, nullptr, &now);
  const bool free = !(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_DFL;
  if (!free && !(again && now.sa_sigaction == handle_request)) return;
  const int events = eventfd(0, EFD_CLOEXEC);
  if (events < 0) return;
  requests = events;
  // No signal of the program is handled on this thread.
  sigset_t all, kept;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &kept);
  std::thread(serve_requests, events).detach();
  pthread_sigmask(SIG_SETMASK, &kept, nullptr);
  struct sigaction action {};
  action.sa_sigaction = handle_request;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGUSR2, &action, nullptr);
}

}  // namespace

void install(Hooks hooks) {
  on_crash = hooks.crashed;
  on_request = hooks.asked;
  const pid_t earlier = owner.exchange(getpid());
  if (earlier == getpid()) return;
  if (earlier == 0) take_crashes();  // a forked child has inherited the handlers
  requests = -1;
  take_requests(/*again=*/earlier != 0);
}

bool answers() {
  return owner.load() == getpid() && requests.load() >= 0;
}

}  // namespace fsdp::crash
