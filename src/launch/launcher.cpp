#include "launch/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/log.h"
#include "base/terminal.h"
#include "fsdp/error.h"
#include "launch/attempt.h"
#include "launch/connection.h"
#include "launch/guard.h"
#include "launch/memory_folder.h"
#include "launch/nodes.h"

namespace fsdp::launch {
namespace {

constexpr double kStuckReader = 10;  // seconds, after a failure and without --grace

// A closed standard stream would give its number to the next pipe, and ranks would write into it.
void open_standard_streams() {
  int fd;
  do fd = open("/dev/null", O_RDWR);
  while (fd >= 0 && fd <= 2);
  if (fd > 2) close(fd);
}

void check_log_dir(const std::string& folder) {
  if (folder.empty()) return;
  std::error_code problem;
  std::filesystem::create_directories(folder, problem);
  if (!problem && access(folder.c_str(), W_OK | X_OK) != 0)
    problem = {errno, std::generic_category()};
  if (!problem && !std::filesystem::is_directory(folder)) {
    problem = std::make_error_code(std::errc::not_a_directory);
  }
  if (problem) {
    throw Error(formatted("--log-dir {} isn't writable: {}.", folder, problem.message()),
                "pass a folder that you can write to; it is created if it doesn't exist.");
  }
}

// The port of rank 0, held for as long as it may need it. Fails before ranks are started if
// another program has it. On the other nodes, and for a port chosen for each start: nothing.
std::optional<HeldPort> hold_master_port(const Options& options) {
  if (options.node_rank != 0 || options.master_port == 0) return std::nullopt;
  return HeldPort(options.master_port, "the master port, where rank 0 listens");
}

void warn_without_secret(const Options& options) {
  if (options.nnodes == 1 || options.node_rank != 0 || !options.secret.empty()) return;
  log::warn(
      "the nodes have no secret, so anyone who reaches this node's ports can disturb or join the "
      "run: set FSDP_SECRET, FSDP_SECRET_FILE or --secret-file on every node (docs/security.md).");
}

// A signal to end that has arrived; 0: none.
int ending_signal(Signals& signals) {
  while (const int signal = signals.next())
    if (signal != SIGCHLD) return signal;
  return 0;
}

// How long to wait for a stuck reader: forever if the run was good, as any program does, or if it
// is a terminal, but not after a failure, when the batch system should learn of it. Milliseconds.
int patience(const Writer& writer, const Verdict& verdict, bool interrupted, double grace_s) {
  if (interrupted) return 1000;
  if (!verdict.failure || isatty(writer.fd())) return -1;
  return static_cast<int>(1e3 * std::min(grace_s > 0 ? grace_s : kStuckReader, 1e6));
}

// Writes what is left, until the reader is gone, stuck for `patience_ms`, or a signal arrives.
void flush(Writer& writer, Signals& signals, int patience_ms) {
  writer.write_some();
  while (writer.pending() > 0) {
    pollfd fds[] = {{signals.fd(), POLLIN, 0}, {writer.fd(), POLLOUT, 0}};
    if (poll(fds, 2, patience_ms) == 0) return;
    while (int signal = signals.next()) {
      if (signal != SIGCHLD) return;
    }
    writer.write_some();
  }
}

// Says why a start failed, and what follows.
void say_failed_start(Attempt& attempt, const Verdict& verdict, const Plan& plan, Screen& screen) {
  const Failure& failure = *verdict.failure;
  bool already_said = failure.kind == FailureKind::kInterrupted ||
                      (failure.kind == FailureKind::kOutput && failure.signal == SIGPIPE);
  if (!already_said) attempt.say_failure(failure);
  if (verdict.restart)
    screen.say(formatted("fsdp: restart {} of {}.\n", plan.restart + 1, plan.max_restarts));
  else if (plan.max_restarts > 0 && plan.restart == plan.max_restarts)
    screen.say(formatted("fsdp: giving up after restart {}.\n", plan.max_restarts));
}

}  // namespace

int run(const Options& options) {
  open_standard_streams();
  Guard guard;
  remove_dead_memory_folders();
  check_log_dir(options.log_dir);
  const auto master_port = hold_master_port(options);
  warn_without_secret(options);
  Nodes nodes(options);  // until all have joined, signals end this process as usual
  if (nodes.dismissed()) return 0;
  Signals signals;

  Writer out_writer(STDOUT_FILENO), err_writer(STDERR_FILENO);
  // If both streams are the same file, one queue keeps their order.
  bool same = same_file(STDOUT_FILENO, STDERR_FILENO);
  Screen out(out_writer, has_colour(STDOUT));
  Screen err(err_writer, has_colour(STDERR));
  Screens screens{out, same ? out : err};

  MemoryFolder memory;
  if (nodes.plan().max_restarts > 0)
    memory = MemoryFolder(formatted("{}-{}", nodes.plan().run_id, nodes.plan().node));

  Verdict verdict;
  bool interrupted = false;
  int code = kExitDone;
  for (;;) {
    std::optional<HeldPort> free_port;
    if (options.master_port == 0) free_port.emplace(0, "a free port for rank 0");
    nodes.begin(nodes.plan().restart, free_port ? free_port->number() : nodes.plan().master_port);
    Attempt attempt(options, nodes, signals, guard, screens, memory.path());
    verdict = attempt.run();
    interrupted = attempt.interrupted();
    // Ranks that ended well after a signal to end haven't failed.
    if (verdict.failure && verdict.failure->kind == FailureKind::kInterrupted &&
        attempt.all_ended_well())
      verdict.failure.reset();
    if (!verdict.failure) {
      code = attempt.code();
      break;
    }
    say_failed_start(attempt, verdict, nodes.plan(), screens.err);  // ranks may have been replaced
    if (!verdict.restart) break;
    for (Writer* writer : {&out_writer, &err_writer}) writer->write_some();
    if (const int signal = nodes.meet_again([&] { return ending_signal(signals); }))
      return kExitSignal + signal;
    if (nodes.dismissed()) {
      screens.err.say("fsdp: the run has ended; another node had taken this one's place.\n");
      verdict = {};
      break;
    }
  }
  for (Writer* writer : {&out_writer, &err_writer})
    flush(*writer, signals, patience(*writer, verdict, interrupted, nodes.plan().grace_s));
  return verdict.failure ? verdict.failure->exit_code() : code;
}

}  // namespace fsdp::launch
