#include "launch/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>

#include "base/format.h"
#include "base/log.h"
#include "base/terminal.h"
#include "fsdp/error.h"
#include "launch/attempt.h"
#include "launch/connection.h"
#include "launch/guard.h"
#include "launch/nodes.h"

namespace fsdp::launch {
namespace {

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

// Rank 0 listens on the master port; fail before starting ranks if it can't.
void check_master_port(const Options& options) {
  if (options.node_rank == 0 && options.master_port != 0) {
    check_port_is_free(options.master_port, "the master port, where rank 0 listens");
  }
}

// Writes what is left, until the reader is gone or a signal arrives. Waits for a stuck reader, but
// only for a second if a signal `interrupted` the run already.
void flush(Writer& writer, Signals& signals, bool interrupted) {
  writer.write_some();
  while (writer.pending() > 0) {
    pollfd fds[] = {{signals.fd(), POLLIN, 0}, {writer.fd(), POLLOUT, 0}};
    if (poll(fds, 2, interrupted ? 1000 : -1) == 0) return;
    while (int signal = signals.next()) {
      if (signal != SIGCHLD) return;
    }
    writer.write_some();
  }
}

}  // namespace

int run(const Options& options) {
  open_standard_streams();
  Guard guard;
  check_log_dir(options.log_dir);
  check_master_port(options);
  Nodes nodes(options);  // until all have joined, signals end this process as usual
  Signals signals;

  Writer out_writer(STDOUT_FILENO), err_writer(STDERR_FILENO);
  // If both streams are the same file, one queue keeps their order.
  bool same = same_file(STDOUT_FILENO, STDERR_FILENO);
  Screen out(out_writer, has_colour(STDOUT));
  Screen err(err_writer, has_colour(STDERR));
  Screens screens{out, same ? out : err};
  auto say = [&](const std::string& text) { screens.err.say(text); };

  Verdict verdict;
  bool interrupted = false;
  for (int restart = 0;; ++restart) {
    nodes.begin(restart, options.master_port != 0 ? nodes.plan().master_port : free_port());
    Attempt attempt(options, nodes, signals, guard, screens);
    verdict = attempt.run();
    interrupted = attempt.interrupted();
    // Ranks that exited with 0 after a signal to end haven't failed.
    if (verdict.failure && verdict.failure->kind == FailureKind::kInterrupted &&
        attempt.all_clean())
      verdict.failure.reset();
    if (!verdict.failure) break;
    const Failure& failure = *verdict.failure;
    bool already_said = failure.kind == FailureKind::kInterrupted ||
                        (failure.kind == FailureKind::kOutput && failure.signal == SIGPIPE);
    if (!already_said) {
      std::string error = screens.err.colour() ? "\x1b[31merror\x1b[0m" : "error";
      say(formatted("fsdp: {}: {}", error,
                    report(failure, options.nnodes, attempt.stopped_ranks(),
                           options.command.front(), options.log_dir)));
    }
    int limit = nodes.plan().max_restarts;
    if (!verdict.restart) {
      if (limit > 0 && restart == limit)
        say(formatted("fsdp: giving up after restart {}.\n", limit));
      break;
    }
    say(formatted("fsdp: restart {} of {}.\n", restart + 1, limit));
  }
  flush(out_writer, signals, interrupted);
  flush(err_writer, signals, interrupted);
  return verdict.failure ? verdict.failure->exit_code() : 0;
}

}  // namespace fsdp::launch
