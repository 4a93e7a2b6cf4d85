// Options: the flags of `fsdp run`, checked once, before anything starts.
#pragma once

#include <string>
#include <vector>

namespace fsdp::launch {

struct Options {
  std::vector<std::string> command;  // program and its arguments, as executed
  int nproc = 1;                     // ranks on this node
  int nnodes = 1;
  int least_nodes = 1;  // with so many a run goes on if others are lost for good
  int node_rank = 0;    // kSpareNode: the number of one that is lost
  std::string master_host;  // empty: 127.0.0.1 (one node only)
  int master_port = 0;      // 0: a free one for each start (one node only)
  int control_port = 0;     // where node 0's launcher listens for the others; only if nnodes > 1
  int max_restarts = 0;
  // Seconds between SIGTERM and SIGKILL; node 0's is used on all nodes. 0: 10 after a failure;
  // after a signal to the launcher what the ranks ask for, or 30.
  double grace_s = 0;
  double rendezvous_s = 300;  // for all launchers to find each other
  std::string log_dir;        // empty: no logs
  std::string secret;         // of the run (base/secret.h); empty: several nodes have none
  enum Prefix { kAuto, kAlways, kNever } prefix = kAuto;
};

inline constexpr int kMostRanksPerNode = 4096;
inline constexpr int kDefaultMasterPort = 29500;  // torchrun's

// "8", "auto" (GPUs if there are any, else cores), "gpu" or "cpu".
int parse_nproc(const std::string& text);

inline constexpr int kSpareNode = -1;

// "2", or torchrun's "1:2": at least one, at most two.
struct NodeCount {
  int least, most;
};
NodeCount parse_nnodes(const std::string& text);

// A TCP port, 1 to 65535; `flag` is named in the error.
int parse_port(const std::string& text, const std::string& flag);

// "host:port", "host" (port stays 0) or "[::1]:port".
struct Endpoint {
  std::string host;
  int port = 0;
};
Endpoint parse_endpoint(const std::string& text, const std::string& flag);

// The command to execute for `program args`. A module (torchrun's -m) or a .py file without the
// executable bit runs in unbuffered Python ($PYTHON_EXEC, else python3); anything else runs as
// given.
std::vector<std::string> command_for(std::vector<std::string> program, bool module, bool no_python);

// Fills in the ports that follow from the other options; throws an Error with a hint if options
// contradict each other.
void complete(Options& options);

}  // namespace fsdp::launch
