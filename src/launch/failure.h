// Failure: why a run ends before all ranks have exited with 0. The first one counts. It is sent to
// every node, and every node shows the same text.
#pragma once

#include <string>
#include <vector>

namespace fsdp::launch {

enum class FailureKind {
  kRank,         // a rank exited with a code or was killed; this kind and kNode restart
  kStart,        // a rank couldn't be started
  kNode,         // the connection to a launcher was lost
  kInterrupted,  // a launcher received a signal to end
  kOutput,       // the reader of our output is gone, or a write failed
};

struct Failure {
  FailureKind kind = FailureKind::kRank;
  int node = 0;
  int rank = -1;        // kRank, kStart
  int pid = 0;          // kRank
  int code = 0;         // exit code of the rank or, for the other kinds, of the launchers
  int signal = 0;       // what killed the rank or interrupted the launcher; 0: none
  std::string message;  // kStart, kNode, kOutput: what happened
  std::string hint;     // kStart, kNode, kOutput
  std::vector<std::string> last_lines;  // kRank

  int exit_code() const;  // of the launchers: the code, or 128 + the signal
};

std::string signal_name(int signal);  // "SIGKILL"; "signal 42" if it has no name

// "rank 3 (pid 1234) exited with code 7"; names the node if there are several.
std::string describe(const Failure& failure, int nnodes);

// The report at the end of a run, without "fsdp: error: ": what happened, the last lines, the hint.
// `others`: ranks that were ended because of it; 0: not mentioned.
std::string report(const Failure& failure, int nnodes, int others, const std::string& program,
                   const std::string& log_dir);

}  // namespace fsdp::launch
