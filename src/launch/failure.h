// Failure: why a run ends before all ranks exited with 0. The first one decides; it is told to
// every node, and shown on every node in the same words.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace fsdp::launch {

struct Failure {
  enum Kind {
    kRank,   // a rank exited with a code or was killed by a signal; the only kind that restarts
    kStart,  // a rank could not be started
    kNode,   // a launcher vanished
    kInterrupted,  // a launcher was told to end
    kOutput,       // nobody reads our output any more, or it cannot be written
  };
  Kind kind = kRank;
  int node = 0;
  int rank = -1;        // kRank, kStart
  int pid = 0;          // kRank
  int code = 0;         // exit code of the rank or, for the other kinds, of the launchers
  int signal = 0;       // what killed the rank or interrupted the launcher; 0: nothing
  std::string message;  // kStart, kNode, kOutput: what happened
  std::string hint;     // kStart, kNode, kOutput
  std::vector<std::string> last_lines;  // kRank

  int exit_code() const;  // what the launchers return: the code, or 128 + the signal
};

std::string signal_name(int signal);  // "SIGKILL"; "signal 42" where it has no name

// "rank 3 (pid 1234) exited with code 7"; names the node when there is more than one.
std::string describe(const Failure& failure, int nnodes);

// The block at the end of a run, without "fsdp: error: ": what happened, the last lines, the hint.
// `others` ranks were ended because of it (0: not mentioned).
std::string report(const Failure& failure, int nnodes, int others, const std::string& program,
                   const std::string& log_dir);

void to_json(nlohmann::json& json, const Failure& failure);
void from_json(const nlohmann::json& json, Failure& failure);

}  // namespace fsdp::launch
