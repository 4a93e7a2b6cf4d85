#include "train/stop.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/log.h"
#include "base/rank_status.h"
#include "fsdp/error.h"

namespace fsdp::train {
namespace {

constexpr long kSameSignalMs = 300;  // shells and `timeout` may send one Ctrl-C twice
constexpr int kWatchTickMs = 100;
constexpr size_t kRecentParts = 8;
constexpr unsigned kReportSeconds = 5;  // for the report, whose reader may be stuck

std::atomic<int> received_signal{0};
timespec received_at{};  // valid once received_signal is set
int wake_fd = -1;        // eventfd; wakes the watchdog
constexpr int kStopSignals[] = {SIGINT, SIGTERM, SIGUSR1};
struct sigaction before[std::size(kStopSignals)];

double seconds_since_signal() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec - received_at.tv_sec) +
         static_cast<double>(now.tv_nsec - received_at.tv_nsec) * 1e-9;
}

void wake_watchdog() {
  uint64_t one = 1;
  if (write(wake_fd, &one, sizeof one) < 0) return;  // full: it is awake already
}

void on_stop_signal(int signal) {
  int error = errno;
  const int first = received_signal.load();
  // SIGUSR1 comes ahead of the end and may be repeated; SIGTERM follows when the time is over.
  if (first == 0 || (first == SIGUSR1 && signal != SIGUSR1)) {
    clock_gettime(CLOCK_MONOTONIC, &received_at);
    received_signal.store(signal);
    wake_watchdog();
  } else if (signal != SIGUSR1 && seconds_since_signal() * 1e3 > kSameSignalMs) {
    if (log::has_live_line() && write(STDOUT_FILENO, "\n", 1) < 0) _exit(kExitSignal + signal);
    _exit(kExitSignal + signal);
  }
  errno = error;
}

}  // namespace

StopSignals::StopSignals(double grace_s, int rank) : grace_s_(grace_s), rank_(rank) {
  received_signal = 0;
  wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0)
    throw Error(formatted("can't watch for signals: eventfd: {}.", std::strerror(errno)),
                "raise the limit on open files with: ulimit -n 65536");
  rank_status::set_grace(grace_s_ > 0 ? grace_s_ : rank_status::default_grace(0));
  watchdog_ = std::thread([this] { watch(); });
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < std::size(kStopSignals); ++i)
    sigaction(kStopSignals[i], &action, &before[i]);
}

StopSignals::~StopSignals() {
  for (size_t i = 0; i < std::size(kStopSignals); ++i)
    sigaction(kStopSignals[i], &before[i], nullptr);
  closing_ = true;
  wake_watchdog();
  watchdog_.join();  // Ends: it sees `closing_`
  close(wake_fd);
  wake_fd = -1;
}

int StopSignals::received() {
  return received_signal.load();
}

void StopSignals::begin_part(const char* part, double expected_s) {
  auto now = std::chrono::steady_clock::now();
  if (!part_.empty()) {
    auto& durations = recent_[part_];
    durations.push_back(std::chrono::duration<double>(now - part_begun_).count());
    if (durations.size() > kRecentParts) durations.pop_front();
  }
  part_ = part;
  part_begun_ = now;
  rank_status::set_phase(part);
  if (grace_s_ > 0) return rank_status::set_grace(grace_s_);
  double slowest_s = std::max({expected_s, slowest(part_), slowest("step")});
  double elapsed_s = received() != 0 ? seconds_since_signal() : 0;
  rank_status::set_grace(elapsed_s + rank_status::default_grace(slowest_s));
}

double StopSignals::slowest(const std::string& part) const {
  auto found = recent_.find(part);
  if (found == recent_.end()) return 0;
  return *std::max_element(found->second.begin(), found->second.end());
}

void StopSignals::failed(int code, std::chrono::milliseconds limit) {
  if (failed_.load() != 0) return;
  failed_at_ = std::chrono::steady_clock::now();
  fail_by_ = failed_at_ + limit;
  failed_.store(code);
  wake_watchdog();
}

void StopSignals::watch() {
  double cpu_before_s = -1;
  while (!closing_) {
    const int signal = received(), code = failed_.load();
    if ((signal != 0 || code != 0) && cpu_before_s < 0)
      cpu_before_s = rank_status::cpu_seconds(getpid()).value_or(0);
    double grace_s = rank_status::current().grace_s;
    // The launcher reports and kills all ranks together. If it dies, so does this process.
    if (signal != 0 && seconds_since_signal() >= grace_s && !rank_status::launcher_is_stopping())
      give_up(formatted("SIG{}", sigabbrev_np(signal)), kExitSignal + signal, grace_s,
              cpu_before_s);
    if (code != 0 && std::chrono::steady_clock::now() >= fail_by_)
      give_up("its failure", code, std::chrono::duration<double>(fail_by_ - failed_at_).count(),
              cpu_before_s);
    pollfd woken{wake_fd, POLLIN, 0};
    // Ends: a signal, failed() or the destructor wakes it.
    poll(&woken, 1, signal == 0 && code == 0 ? -1 : kWatchTickMs);
    uint64_t count;
    if (read(wake_fd, &count, sizeof count) < 0 && errno != EAGAIN) return;
  }
}

void StopSignals::give_up(const std::string& since, int code, double waited_s,
                          double cpu_before_s) const {
  // A hung thread may hold the heap's lock, and the reader of stderr may be stuck. SIGALRM then
  // ends the process.
  sigset_t alarms;
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  ::signal(SIGALRM, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &alarms, nullptr);
  alarm(kReportSeconds);
  std::string text =
      formatted("{}fsdp: {} didn't end within {:.{}f} s of {}: exiting with code {}.\n  {}.\n",
                log::has_live_line() && isatty(STDERR_FILENO) ? "\n" : "",
                rank_ < 0 ? formatted("process {}", getpid())
                          : formatted("rank {} (pid {})", rank_, getpid()),
                waited_s, waited_s < 10 ? 1 : 0, since, code,
                rank_status::whereabouts(rank_status::current(), getpid(), cpu_before_s));
  if (rank_ >= 0)
    text +=
        "  HINT: if the run only needed more time, raise --grace; if it hangs, see "
        "docs/hangs.md.\n";
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) _exit(code);
  _exit(code);
}

}  // namespace fsdp::train
