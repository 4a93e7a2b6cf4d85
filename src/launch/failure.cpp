#include "launch/failure.h"

#include <csignal>
#include <cstring>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/printable.h"

namespace fsdp::launch {
namespace {

std::string log_of(const Failure& failure, const std::string& log_dir) {
  if (log_dir.empty()) return "run with --log-dir DIR to keep the full output of every rank.";
  return formatted("its full output is in {}/rank-{}.log.", log_dir, failure.rank);
}

std::string hint_for(const Failure& failure, const std::string& program,
                     const std::string& log_dir) {
  if (failure.kind != FailureKind::kRank) return failure.hint;
  switch (failure.signal) {
    case SIGKILL:
      return "the kernel kills a process this way when memory runs out (see dmesg), and so do "
             "batch systems at their limits.";
    case SIGSEGV:
    case SIGBUS:
    case SIGABRT:
    case SIGILL:
    case SIGFPE:
      return formatted(
          "run that rank in a debugger to see where: fsdp run ... -- sh -c 'test $RANK = {} && "
          "exec "
          "gdb -batch -ex run -ex bt --args \"$0\" \"$@\" || exec \"$0\" \"$@\"' {} ...",
          failure.rank, program);
    case SIGTERM:
    case SIGINT:
    case SIGHUP:
      return "something outside the run ended this rank.";
    default:
      return log_of(failure, log_dir);
  }
}

}  // namespace

int Failure::exit_code() const {
  if (signal != 0) return kExitSignal + signal;
  return code != 0 ? code : kExitFailed;
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name ? formatted("SIG{}", name) : formatted("signal {}", signal);
}

std::string describe(const Failure& failure, int nnodes) {
  std::string node = nnodes > 1 ? formatted(" on node {}", failure.node) : "";
  switch (failure.kind) {
    case FailureKind::kRank: {
      std::string who = formatted("rank {} (pid {}){}", failure.rank, failure.pid, node);
      if (failure.signal == 0) return formatted("{} exited with code {}", who, failure.code);
      return formatted("{} was killed by signal {} ({})", who, failure.signal,
                       signal_name(failure.signal));
    }
    case FailureKind::kInterrupted:
      return "interrupted" + node + " by " + signal_name(failure.signal);
    case FailureKind::kStart:
      return failure.message + node;
    default:
      return failure.message;
  }
}

std::string report(const Failure& failure, int nnodes, int others, const std::string& program,
                   const std::string& log_dir) {
  std::string text = describe(failure, nnodes) + ".\n";
  if (failure.kind == FailureKind::kRank) {
    text += failure.last_lines.empty() ? "  It printed nothing.\n" : "  Its last lines:\n";
    for (const auto& line : failure.last_lines) text += "    " + line + "\n";
  }
  if (others > 0) {
    text += formatted("  {} other rank{} ended{}", others, others == 1 ? " was" : "s were",
                      nnodes > 1 ? " on this node.\n" : ".\n");
  }
  std::string hint = hint_for(failure, program, log_dir);
  if (!hint.empty()) text += "  HINT: " + hint + "\n";
  return printable(text);  // ranks and other nodes may have sent anything
}

}  // namespace fsdp::launch
