#include "launch/attempt.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/exit_code.h"
#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "base/terminal.h"
#include "fsdp/error.h"
#include "launch/memory_folder.h"

namespace fsdp::launch {
namespace {

using namespace std::chrono_literals;

constexpr auto kTick = 100ms;          // how late a deadline may be noticed
constexpr auto kShortTick = 10ms;      // the same while ranks are replaced or write their reports
constexpr auto kDoubleSignal = 300ms;  // `timeout` and shells may send one Ctrl-C twice
constexpr auto kUnkillable = 30s;      // after SIGKILL: the process is stuck in the kernel
constexpr auto kVerdict = 60s;         // for the other nodes to end their ranks, beyond the grace
constexpr auto kReport = 1s;           // for the ranks to write their flight recorders
constexpr auto kCause = 1s;  // a rank that lost another one isn't the cause: wait for that one
constexpr double kFailureGrace = 10;  // seconds after a rank failed: there is nothing to save

bool is_set(const char* name) {
  return std::getenv(name) != nullptr;
}

std::string ranks_text(int count) {
  return formatted("{} {}", count, count == 1 ? "rank" : "ranks");
}

std::string seconds_text(double value) {
  return formatted("{:.{}f} s", value, value < 10 ? 1 : 0);
}

}  // namespace

Attempt::Attempt(const Options& options, Nodes& nodes, Signals& signals, Guard& guard,
                 Screens screens, std::string memory)
    : options_(options),
      nodes_(nodes),
      signals_(signals),
      guard_(guard),
      screens_(screens),
      memory_(std::move(memory)) {
  const Plan& plan = nodes.plan();
  bool prefixed = options.prefix == Options::kAlways ||
                  (options.prefix == Options::kAuto && (plan.world() > 1 || plan.max_restarts > 0));
  at_once_ = !prefixed && options.nproc == 1;
  ranks_.resize(options.nproc);
  for (int local = 0; local < options.nproc; ++local) {
    ranks_[local].rank = plan.first_rank(plan.node) + local;
    if (prefixed) ranks_[local].prefix = rank_prefix(ranks_[local].rank, plan.world());
  }
}

Verdict Attempt::run() {
  std::vector<int> all(ranks_.size());
  std::iota(all.begin(), all.end(), 0);
  start_ranks(all);
  while (true) {
    // Everything that can set the failure comes before the stop; a later one would wait for poll().
    take_signals();
    read_ranks();
    write_screens();
    notice_exits();
    nodes_.receive();
    watch_replacing();
    hurry_ |= nodes_.killing();
    if (nodes_.failure() && !stopping_) stop(SIGTERM);
    if (stopping_ && !told_) tell_ranks();
    force();
    finish_node();
    if (nodes_.verdict() && ended_) break;
    wait();
  }
  for (auto& rank : ranks_) {
    if (rank.process.pid == 0) continue;
    guard_.forget(rank.process.pid);
    release(rank.process);
  }
  Verdict verdict = *nodes_.verdict();
  if (interrupted_) verdict.restart = false;
  return verdict;
}

void Attempt::open_log(Rank& rank) {
  if (options_.log_dir.empty()) return;
  int restart = nodes_.plan().restart;
  std::string path = formatted("{}/rank-{}.log", options_.log_dir, rank.rank);
  int flags = O_WRONLY | O_CREAT | O_CLOEXEC | (restart == 0 ? O_TRUNC : O_APPEND);
  rank.log = FileDescriptor(open(place_of_file(path).c_str(), flags, 0666));
  if (!rank.log) {
    const int why = errno;
    throw Error(formatted("cannot write {}: {}.", path, errno_text(why)), file_hint(why));
  }
  if (restart == 0) return;
  std::string marker = formatted("--- fsdp: restart {} ---\n", restart);
  if (write(rank.log.get(), marker.data(), marker.size()) < 0) rank.log.close();
}

void Attempt::start_rank(int local, int& exec_errno) {
  Rank& rank = ranks_[local];
  auto variables =
      rank_variables(nodes_.plan(), nodes_.plan().node, local, available_cores(), is_set);
  int width = terminal_width(STDOUT) - static_cast<int>(rank.prefix.size());
  if (width > 0 && options_.log_dir.empty())  // a log shouldn't hold a line that is redrawn
    variables.emplace_back("FSDP_TERMINAL", std::to_string(width));
  variables.emplace_back(kMemoryVariable, memory_);
  if (!options_.secret.empty()) variables.emplace_back("FSDP_SECRET", options_.secret);
  rank.status = rank_status::SharedPage();
  int status = rank.status.fd();
  variables.emplace_back(rank_status::kVariable, status < 0 ? "" : std::to_string(status));
  rank.process = start(options_.command, merged_environment(variables), rank.rank == 0, status,
                       signals_, exec_errno);
  rank.status.close_fd();
  guard_.watch(rank.process.pid);
}

void Attempt::start_ranks(const std::vector<int>& locals) {
  int exec_errno = 0;
  int rank_failed = -1;
  try {
    for (int local : locals) open_log(ranks_[local]);
    for (int local : locals) {
      rank_failed = ranks_[local].rank;
      start_rank(local, exec_errno);
    }
  } catch (const Error& problem) {
    Failure failure;
    failure.kind = FailureKind::kStart;
    failure.node = nodes_.plan().node;
    failure.rank = rank_failed;
    failure.code = exec_errno == 0        ? kExitFailed
                   : exec_errno == ENOENT ? kExitNotFound
                                          : kExitCannotRun;
    failure.message = problem.message();
    if (failure.message.ends_with('.')) failure.message.pop_back();
    failure.hint = problem.hint();
    nodes_.failed(failure);
  }
  for (auto& rank : ranks_) {
    if (rank.process.pid == 0) rank.process.exit = Exit{};  // never started
  }
}

// Sleeps until something happens; while a deadline is pending, for at most a tick.
void Attempt::wait() {
  std::vector<pollfd> fds = {{signals_.fd(), POLLIN, 0}};
  nodes_.watch(fds);
  bool timed = stopping_;
  const bool asking =
      asked_at_ != Clock::time_point{} && !killed_ && Clock::now() - asked_at_ < kReport;
  for (auto& rank : ranks_) {
    timed |= rank.process.exit && (!rank.gone() || !ended_well(rank));
    for (int stream : {0, 1}) {
      timed |= !rank.streams[stream].splitter.empty();
      if (!rank.pipe(stream)) continue;
      if (held_back(rank, stream))
        timed = true;  // it may begin to fail
      else
        fds.push_back({rank.pipe(stream).get(), POLLIN, 0});
    }
  }
  for (int stream : {0, 1}) {
    Writer& writer = screens_.of(stream).writer();
    if (writer.pending() > 0) fds.push_back({writer.fd(), POLLOUT, 0});
  }
  std::optional<std::chrono::milliseconds> tick = nodes_.tick();
  if (timed) tick = kTick;
  if (asking || replacing_ != Replacing::kNo) tick = kShortTick;
  // Ends: an exit of a rank, its output, or a message of a node wakes it.
  poll(fds.data(), fds.size(), tick ? static_cast<int>(tick->count()) : -1);
}

void Attempt::take_signals() {
  while (int signal = signals_.next()) {
    if (signal == SIGCHLD) continue;  // notice_exits() checks every rank anyway
    if (!interrupted_) {
      interrupted_ = true;
      Failure failure;
      failure.kind = FailureKind::kInterrupted;
      failure.node = nodes_.plan().node;
      failure.signal = signal;
      nodes_.failed(failure);
      if (!stopping_) {
        stop(signal);
        tell_ranks();
      }
    } else if (signal == SIGUSR1) {
      continue;  // ahead of the end; may be repeated
    } else if (stop_signal_ == SIGUSR1) {
      pass_on(signal);  // now the time is over
    } else if (Clock::now() - stopped_at_ > kDoubleSignal) {
      hurry_ = true;
      nodes_.kill();
    }
  }
}

// A rank of another program may mean something else by that code.
bool Attempt::ended_well(const Rank& rank) const {
  const Exit& exit = *rank.process.exit;
  return exit.clean() || (exit.signal == 0 && exit.code == kExitStopped && rank.status.read().pid);
}

void Attempt::notice_exits() {
  // One killed by a signal is more likely the cause than one with an exit code, and one that lost
  // another rank isn't the cause: the others fail because their connections break.
  const auto weight = [](const Rank& rank) {
    return rank.process.exit->signal != 0 ? 2 : rank.process.exit->code != kExitLostRank ? 1 : 0;
  };
  const auto now = Clock::now();
  Rank* first = nullptr;
  for (auto& rank : ranks_) {
    if (!rank.process.exit) {
      check_exit(rank.process);
      if (!rank.process.exit) continue;
      rank.exited = now;
    }
    if (ended_well(rank)) continue;
    if (!first || weight(rank) > weight(*first)) first = &rank;
  }
  if (!first || nodes_.failure()) return;
  if (weight(*first) == 0 && running() > 0 && now - first->exited < kCause) return;
  Failure failure;
  failure.node = nodes_.plan().node;
  failure.rank = first->rank;
  failure.pid = first->process.pid;
  failure.code = first->process.exit->code;
  failure.signal = first->process.exit->signal;
  lost(*first, std::move(failure));
}

// When the reader of our output is gone, the ranks end, as any program in a pipe does.
void Attempt::write_screens() {
  for (int stream : {0, 1}) {
    Writer& writer = screens_.of(stream).writer();
    writer.write_some();
    int problem = writer.problem();
    if (problem == 0 || nodes_.failure()) continue;
    Failure failure;
    failure.kind = FailureKind::kOutput;
    failure.node = nodes_.plan().node;
    failure.signal = problem == EPIPE ? SIGPIPE : 0;
    failure.code = 1;
    failure.message =
        formatted("cannot write to {} of node {}'s launcher: {}", stream == 0 ? "stdout" : "stderr",
                  nodes_.plan().node, std::strerror(problem));
    nodes_.failed(failure);
  }
}

void Attempt::stop(int signal) {
  stopping_ = true;
  stop_signal_ = signal;
  stopped_at_ = Clock::now();
  const Failure& failure = *nodes_.failure();
  stopped_ranks_ = running();
  bool quiet = failure.kind == FailureKind::kOutput && failure.signal == SIGPIPE;
  if (stopped_ranks_ > 0 && !quiet) {
    say(formatted("fsdp: {}; ending {}.\n", describe(failure, nodes_.plan().nodes()),
                  ranks_text(stopped_ranks_)));
  }
}

// Where a rank failed, the others first write down where they are.
void Attempt::tell_ranks() {
  const FailureKind kind = nodes_.failure()->kind;
  const bool fault = kind == FailureKind::kRank || kind == FailureKind::kNode;
  if (told_ || (fault && !interrupted_ && !reported(kReport))) return;
  told_ = true;
  for (auto& rank : ranks_) {
    if (rank.process.exit) continue;
    rank.status.announce_stop();
    pid_t reporting = rank.status.read().pid;
    rank.cpu_at_stop = rank_status::cpu_seconds(reporting > 0 ? reporting : rank.process.pid);
  }
  pass_on(stop_signal_);
}

void Attempt::pass_on(int signal) {
  stop_signal_ = signal == SIGHUP ? SIGTERM : signal;
  stopped_at_ = Clock::now();
  for (auto& rank : ranks_) {
    signal_group(rank.process, stop_signal_);
    signal_group(rank.process, SIGCONT);  // a stopped process can't handle the signal
  }
}

// Asks the ranks once for the files of their flight recorders. True: they are written, or `limit`
// is over.
bool Attempt::reported(std::chrono::milliseconds limit) {
  const bool first = asked_at_ == Clock::time_point{};
  if (first) asked_at_ = Clock::now();
  bool waiting = false;
  for (auto& rank : ranks_) {
    if (rank.process.exit) continue;
    const rank_status::Status status = rank.status.read();
    // The process that answers may be a child of the one that we started, never another's.
    if (first && status.answers && getpgid(status.pid) == rank.process.pid) {
      rank.reports = status.reports;
      kill(status.pid, SIGUSR2);
    }
    waiting |= rank.reports && *rank.reports == status.reports;
  }
  return !waiting || Clock::now() - asked_at_ > limit;
}

std::string Attempt::report_folder() const {
  for (const auto& rank : ranks_)
    if (std::string folder = rank.status.read().report_folder; !folder.empty()) return folder;
  return "";
}

// A rank may ask for more time while it still makes progress, so this is read again on every pass.
double Attempt::grace_s() const {
  double chosen = nodes_.plan().grace_s;
  if (chosen > 0) return chosen;
  if (nodes_.failure()->kind != FailureKind::kInterrupted) return kFailureGrace;
  double asked = 0;
  for (const auto& rank : ranks_) {
    if (!rank.process.exit) asked = std::max(asked, rank.status.read().grace_s);
  }
  return asked > 0 ? asked : rank_status::default_grace(0);
}

// Kills the ranks that didn't end within the grace.
void Attempt::force() {
  if (!stopping_) return;
  auto now = Clock::now();
  const bool late = told_ && now - stopped_at_ >= std::chrono::duration<double>(grace_s());
  if (!killed_ && (hurry_ || (late && reported(kReport)))) kill_ranks();
  if (!killed_ || now - killed_at_ < kUnkillable) return;
  for (auto& rank : ranks_) {
    if (rank.process.exit) continue;
    say(formatted(
        "fsdp: rank {} (pid {}) can't be killed: it is stuck in the kernel. It is left behind.\n",
        rank.rank, rank.process.pid));
    rank.process.exit = Exit{0, SIGKILL};
    rank.process.pid = 0;
  }
}

// Reports where each rank is, then sends SIGKILL to its whole process group.
void Attempt::kill_ranks() {
  killed_ = true;
  killed_at_ = Clock::now();
  if (int left = running(); left > 0) {
    std::string text = "fsdp: ";
    if (hurry_) {
      text += "killing " + ranks_text(left) + " (SIGKILL).\n";
    } else {
      text += ranks_text(left) + " didn't end within " + seconds_text(grace_s()) + " of " +
              signal_name(stop_signal_) + ": killing (SIGKILL).\n";
    }
    for (auto& rank : ranks_) {
      if (rank.process.exit) continue;
      rank_status::Status status = rank.status.read();
      pid_t pid = status.pid > 0 ? status.pid : rank.process.pid;
      text += formatted("  rank {} (pid {}): {}.\n", rank.rank, pid,
                        rank_status::whereabouts(status, pid, rank.cpu_at_stop));
      auto lines = rank.last_lines.lines();
      if (status.pid == 0 && !lines.empty()) text += "    Its last line: " + lines.back() + "\n";
    }
    if (!hurry_) {
      text +=
          "  HINT: if they only needed more time, raise --grace; if they hang, see "
          "docs/hangs.md.\n";
      if (const std::string folder = report_folder(); !folder.empty())
        text += formatted("  HINT: fsdp hang {} says which rank was where.\n", folder);
    }
    say(text);
  }
  for (auto& rank : ranks_) signal_group(rank.process, SIGKILL);
  hurry_ |= interrupted_;  // nor wait for a stuck reader of our output
}

void Attempt::finish_node() {
  bool gone = std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.gone(); });
  if (!gone) return;
  if (!ended_) {
    ended_ = true;
    std::vector<std::string> last_lines;
    if (nodes_.failure()) {
      for (auto& rank : ranks_) {
        if (rank.rank == nodes_.failure()->rank) last_lines = rank.last_lines.lines();
      }
    }
    nodes_.ended(last_lines);
  }
  // The other nodes know. Don't wait for their ranks after an interrupt, or beyond the limit.
  bool late =
      stopping_ && Clock::now() - stopped_at_ > std::chrono::duration<double>(grace_s()) + kVerdict;
  if (interrupted_ || late) nodes_.stop_waiting();
}

void Attempt::say(const std::string& text) {
  screens_.err.say(text);
}

void Attempt::say_failure(const Failure& failure) {
  std::string error = screens_.err.colour() ? "\x1b[31merror\x1b[0m" : "error";
  say(formatted("fsdp: {}: {}", error,
                report(failure, nodes_.plan().nodes(), stopped_ranks_, options_.command.front(),
                       options_.log_dir)));
  if (const std::string folder = report_folder(); !folder.empty())
    say(formatted("  HINT: fsdp hang {} says which rank was where.\n", folder));
}

bool Attempt::all_ended_well() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [this](const Rank& rank) { return rank.process.exit && ended_well(rank); });
}

int Attempt::code() const {
  const bool done = std::all_of(ranks_.begin(), ranks_.end(),
                                [](const Rank& rank) { return rank.process.exit->clean(); });
  return done ? kExitDone : kExitStopped;
}

int Attempt::running() const {
  return static_cast<int>(std::count_if(ranks_.begin(), ranks_.end(),
                                        [](const Rank& rank) { return !rank.process.exit; }));
}

}  // namespace fsdp::launch
