// Options: what `fsdp run` was asked for, checked once, before anything starts.
#pragma once

#include <string>
#include <vector>

namespace fsdp::launch {

struct Options {
  std::vector<std::string> command;  // program and its arguments, as they will be executed
  int nproc = 1;                     // ranks on this node
  int nnodes = 1;
  int node_rank = 0;
  std::string master_host;  // empty: 127.0.0.1 (one node only)
  int master_port = 0;      // 0: a free one for each start (one node only)
  int control_port = 0;     // where node 0's launcher listens for the others; used with nnodes > 1
  int max_restarts = 0;
  double grace_s = 10;            // between SIGTERM and SIGKILL
  double interrupt_grace_s = -1;  // the same where we were told to end; negative: as grace_s
  double rendezvous_s = 300;      // for all launchers to find each other
  std::string log_dir;            // empty: no logs
  enum Prefix { kAuto, kAlways, kNever } prefix = kAuto;
};

inline constexpr int kMostRanksPerNode = 4096;
inline constexpr int kDefaultMasterPort = 29500;  // torchrun's

// "8", "auto" (GPUs where there are some, else cores), "gpu" or "cpu".
int parse_nproc(const std::string& text);

// "2", or torchrun's "2:2".
int parse_nnodes(const std::string& text);

// A TCP port, 1 to 65535; `flag` is named in the error.
int parse_port(const std::string& text, const std::string& flag);

// "host:port", "host" (port stays 0) or "[::1]:port".
struct Endpoint {
  std::string host;
  int port = 0;
};
Endpoint parse_endpoint(const std::string& text, const std::string& flag);

// What to execute for `program args`: a module (torchrun's -m) or a .py file that is not executable
// by itself goes to Python ($PYTHON_EXEC, else python3), unbuffered; anything else runs as given.
std::vector<std::string> command_for(std::vector<std::string> program, bool module, bool no_python);

// Fills in what follows from the rest (master port, control port); throws an Error with a hint
// where the options contradict each other.
void complete(Options& options);

}  // namespace fsdp::launch
