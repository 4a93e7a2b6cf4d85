#include "launch/failure.h"

#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/format.h"

namespace fsdp::launch {
namespace {

std::string log_of(const Failure& failure, const std::string& log_dir) {
  if (log_dir.empty()) return "run with --log-dir DIR to keep the full output of every rank.";
  return formatted("its full output is in {}/rank-{}.log.", log_dir, failure.rank);
}

std::string hint_for(const Failure& failure, const std::string& program,
                     const std::string& log_dir) {
  if (failure.kind != Failure::kRank) return failure.hint;
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
  if (signal != 0) return 128 + signal;
  return code != 0 ? code : 1;
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name ? formatted("SIG{}", name) : formatted("signal {}", signal);
}

std::string describe(const Failure& failure, int nnodes) {
  std::string node = nnodes > 1 ? formatted(" on node {}", failure.node) : "";
  switch (failure.kind) {
    case Failure::kRank: {
      std::string who = formatted("rank {} (pid {}){}", failure.rank, failure.pid, node);
      if (failure.signal == 0) return formatted("{} exited with code {}", who, failure.code);
      return formatted("{} was killed by signal {} ({})", who, failure.signal,
                       signal_name(failure.signal));
    }
    case Failure::kInterrupted:
      return "interrupted" + node + " by " + signal_name(failure.signal);
    case Failure::kStart:
      return failure.message + node;
    default:
      return failure.message;
  }
}

std::string report(const Failure& failure, int nnodes, int others, const std::string& program,
                   const std::string& log_dir) {
  std::string text = describe(failure, nnodes) + ".\n";
  if (failure.kind == Failure::kRank) {
    text += failure.last_lines.empty() ? "  It printed nothing.\n" : "  Its last lines:\n";
    for (const auto& line : failure.last_lines) text += "    " + line + "\n";
  }
  if (others > 0) {
    text += formatted("  {} other rank{} ended{}", others, others == 1 ? " was" : "s were",
                      nnodes > 1 ? " on this node.\n" : ".\n");
  }
  std::string hint = hint_for(failure, program, log_dir);
  if (!hint.empty()) text += "  HINT: " + hint + "\n";
  return text;
}

void to_json(nlohmann::json& json, const Failure& failure) {
  json = {{"kind", static_cast<int>(failure.kind)},
          {"node", failure.node},
          {"rank", failure.rank},
          {"pid", failure.pid},
          {"code", failure.code},
          {"signal", failure.signal},
          {"message", failure.message},
          {"hint", failure.hint},
          {"last_lines", failure.last_lines}};
}

void from_json(const nlohmann::json& json, Failure& failure) {
  int kind = json.at("kind").get<int>();
  failure.kind = kind >= Failure::kRank && kind <= Failure::kOutput
                     ? static_cast<Failure::Kind>(kind)
                     : Failure::kNode;
  json.at("node").get_to(failure.node);
  json.at("rank").get_to(failure.rank);
  json.at("pid").get_to(failure.pid);
  json.at("code").get_to(failure.code);
  json.at("signal").get_to(failure.signal);
  json.at("message").get_to(failure.message);
  json.at("hint").get_to(failure.hint);
  json.at("last_lines").get_to(failure.last_lines);
}

}  // namespace fsdp::launch
