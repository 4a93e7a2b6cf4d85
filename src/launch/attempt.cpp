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

#include "base/format.h"
#include "base/terminal.h"
#include "fsdp/error.h"

namespace fsdp::launch {
namespace {

using namespace std::chrono_literals;

constexpr auto kTick = 100ms;      // how late a deadline may be noticed
constexpr auto kPartialLine = 1s;  // an incomplete line is shown after this much silence
constexpr auto kOpenPipe = 1s;     // a pipe that a rank's orphans hold open is closed after this
constexpr auto kDoubleSignal = 300ms;  // `timeout` and shells may send one Ctrl-C twice
constexpr auto kUnkillable = 30s;      // after SIGKILL: the process is stuck in the kernel
constexpr auto kVerdict = 60s;         // for the other nodes to end their ranks, beyond the grace
constexpr double kFailureGrace = 10;   // seconds after a rank failed: there is nothing to save

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
                 Screens screens)
    : options_(options), nodes_(nodes), signals_(signals), guard_(guard), screens_(screens) {
  const Plan& plan = nodes.plan();
  bool prefixed = options.prefix == Options::kAlways ||
                  (options.prefix == Options::kAuto && (plan.world() > 1 || plan.max_restarts > 0));
  at_once_ = !prefixed && options.nproc == 1;
  ranks_.resize(options.nproc);
  for (int local = 0; local < options.nproc; ++local) {
    ranks_[local].rank = plan.first_rank(options.node_rank) + local;
    if (prefixed) ranks_[local].prefix = rank_prefix(ranks_[local].rank, plan.world());
  }
}

Verdict Attempt::run() {
  start_ranks();
  while (true) {
    // Everything that can set the failure comes before the stop; a later one would wait for poll().
    take_signals();
    read_ranks();
    write_screens();
    notice_exits();
    nodes_.receive();
    hurry_ |= nodes_.killing();
    if (nodes_.failure() && !stopping_) stop(SIGTERM);
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

void Attempt::open_logs() {
  if (options_.log_dir.empty()) return;
  int restart = nodes_.plan().restart;
  for (auto& rank : ranks_) {
    std::string path = formatted("{}/rank-{}.log", options_.log_dir, rank.rank);
    int flags = O_WRONLY | O_CREAT | O_CLOEXEC | (restart == 0 ? O_TRUNC : O_APPEND);
    rank.log = FileDescriptor(open(path.c_str(), flags, 0666));
    if (!rank.log) {
      throw Error(formatted("cannot write {}: {}.", path, std::strerror(errno)),
                  "pass --log-dir a folder that you can write to.");
    }
    if (restart == 0) continue;
    std::string marker = formatted("--- fsdp: restart {} ---\n", restart);
    if (write(rank.log.get(), marker.data(), marker.size()) < 0) rank.log.close();
  }
}

void Attempt::start_ranks() {
  int exec_errno = 0;
  int rank_failed = -1;
  try {
    open_logs();
    int cores = available_cores();
    for (int local = 0; local < options_.nproc; ++local) {
      auto& rank = ranks_[local];
      rank_failed = rank.rank;
      auto variables = rank_variables(nodes_.plan(), options_.node_rank, local, cores, is_set);
      int width = terminal_width(STDOUT) - static_cast<int>(rank.prefix.size());
      if (width > 0 && options_.log_dir.empty())  // a log shouldn't hold a line that is redrawn
        variables.emplace_back("FSDP_TERMINAL", std::to_string(width));
      rank.status = rank_status::SharedPage();
      int status = rank.status.fd();
      variables.emplace_back(rank_status::kVariable, status < 0 ? "" : std::to_string(status));
      rank.process = start(options_.command, merged_environment(variables), rank.rank == 0, status,
                           signals_, exec_errno);
      rank.status.close_fd();
      guard_.watch(rank.process.pid);
    }
  } catch (const Error& problem) {
    Failure failure;
    failure.kind = FailureKind::kStart;
    failure.node = options_.node_rank;
    failure.rank = rank_failed;
    failure.code = exec_errno == 0 ? 1 : exec_errno == ENOENT ? 127 : 126;  // as in a shell
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
  for (auto& rank : ranks_) {
    timed |= rank.process.exit && !rank.gone();
    for (int stream : {0, 1}) {
      timed |= !rank.streams[stream].splitter.empty();
      if (rank.pipe(stream) && !screens_.of(stream).writer().full()) {
        fds.push_back({rank.pipe(stream).get(), POLLIN, 0});
      }
    }
  }
  for (int stream : {0, 1}) {
    Writer& writer = screens_.of(stream).writer();
    if (writer.pending() > 0) fds.push_back({writer.fd(), POLLOUT, 0});
  }
  poll(fds.data(), fds.size(),
       timed ? static_cast<int>(std::chrono::milliseconds(kTick).count()) : -1);
}

void Attempt::take_signals() {
  while (int signal = signals_.next()) {
    if (signal == SIGCHLD) continue;  // notice_exits() checks every rank anyway
    if (!interrupted_) {
      interrupted_ = true;
      Failure failure;
      failure.kind = FailureKind::kInterrupted;
      failure.node = options_.node_rank;
      failure.signal = signal;
      nodes_.failed(failure);
      if (!stopping_) stop(signal == SIGINT ? SIGINT : SIGTERM);
    } else if (Clock::now() - stopped_at_ > kDoubleSignal) {
      hurry_ = true;
      nodes_.kill();
    }
  }
}

void Attempt::read_ranks() {
  auto now = Clock::now();
  for (auto& rank : ranks_) {
    for (int stream : {0, 1}) {
      if (!rank.pipe(stream)) continue;
      bool full = screens_.of(stream).writer().full();
      if (!full || hurry_) read_stream(rank, stream, 64 * 1024);
      // The rank has exited, but a child that it left behind holds its pipe.
      if (rank.pipe(stream) && rank.process.exit &&
          (hurry_ || (!full && now - rank.exited > kOpenPipe))) {
        read_stream(rank, stream, 1024 * 1024);
        rank.pipe(stream).close();
      }
      auto& [splitter, last_read] = rank.streams[stream];
      bool due = at_once_ || !rank.pipe(stream) || now - last_read > kPartialLine;
      if (due && !splitter.empty()) show(rank, stream, splitter.take_rest());
    }
  }
}

void Attempt::read_stream(Rank& rank, int stream, size_t most) {
  char buffer[64 * 1024];
  std::vector<std::string> pieces;
  while (most > 0 && rank.pipe(stream)) {
    ssize_t got = read(rank.pipe(stream).get(), buffer, std::min(most, sizeof buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      rank.pipe(stream).close();
      return;
    }
    most -= got;
    rank.streams[stream].last_read = Clock::now();
    if (rank.log) {
      ssize_t written = write(rank.log.get(), buffer, got);
      if (written != got) {
        say(formatted("fsdp: the log of rank {} ends here: {}.\n", rank.rank,
                      written < 0 ? std::strerror(errno) : "the disk is full"));
        rank.log.close();
      }
    }
    pieces.clear();
    rank.streams[stream].splitter.feed({buffer, static_cast<size_t>(got)}, pieces);
    for (const auto& piece : pieces) show(rank, stream, piece);
  }
}

void Attempt::show(Rank& rank, int stream, std::string_view piece) {
  rank.last_lines.add(piece);
  screens_.of(stream).show(rank.rank, rank.prefix, piece, stream);
}

void Attempt::notice_exits() {
  Rank* first = nullptr;
  for (auto& rank : ranks_) {
    if (rank.process.exit) continue;
    check_exit(rank.process);
    if (!rank.process.exit) continue;
    rank.exited = Clock::now();
    if (rank.process.exit->clean()) continue;
    // Among ranks found in one pass, one killed by a signal is more likely the cause than one with
    // an exit code: the others fail because their connections break.
    if (!first || (rank.process.exit->signal != 0 && first->process.exit->signal == 0))
      first = &rank;
  }
  if (!first || nodes_.failure()) return;
  Failure failure;
  failure.node = options_.node_rank;
  failure.rank = first->rank;
  failure.pid = first->process.pid;
  failure.code = first->process.exit->code;
  failure.signal = first->process.exit->signal;
  nodes_.failed(failure);
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
    failure.node = options_.node_rank;
    failure.signal = problem == EPIPE ? SIGPIPE : 0;
    failure.code = 1;
    failure.message =
        formatted("cannot write to {} of node {}'s launcher: {}", stream == 0 ? "stdout" : "stderr",
                  options_.node_rank, std::strerror(problem));
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
    say(formatted("fsdp: {}; ending {}.\n", describe(failure, options_.nnodes),
                  ranks_text(stopped_ranks_)));
  }
  for (auto& rank : ranks_) {
    if (rank.process.exit) continue;
    rank.status.announce_stop();
    pid_t reporting = rank.status.read().pid;
    rank.cpu_at_stop = rank_status::cpu_seconds(reporting > 0 ? reporting : rank.process.pid);
  }
  for (auto& rank : ranks_) {
    signal_group(rank.process, signal);
    signal_group(rank.process, SIGCONT);  // a stopped process can't handle the signal
  }
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
  if (!killed_ && (hurry_ || now - stopped_at_ >= std::chrono::duration<double>(grace_s()))) {
    kill_ranks();
  }
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

bool Attempt::all_clean() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    return rank.process.exit && rank.process.exit->clean();
  });
}

int Attempt::running() const {
  return static_cast<int>(std::count_if(ranks_.begin(), ranks_.end(),
                                        [](const Rank& rank) { return !rank.process.exit; }));
}

}  // namespace fsdp::launch
