// Nodes: how the launchers of a run find each other, and how each learns what happens at the
// others.
//
// Node 0's launcher listens on the control port; the others connect to it and say how many ranks
// they bring. When all are there, node 0 sends everybody the Plan. The connections then stay open
// as a lifeline: a failure is told at once and passed on to all; a connection that ends is a
// failure, too. When a node's ranks are all gone it says so, and when all nodes have, node 0 sends
// the Verdict: finished, start again, or give up. With one node there is nobody to talk to and node
// 0 decides alone.
//
// Messages are JSON objects, one a line:
//   to node 0:    hello {version, nnodes, node, nproc}    failed {failure}    ended {failure?}
//   from node 0:  plan {...}  refused {message, hint}     failed {failure}    verdict {restart,
//   failure?}
#pragma once

#include <poll.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/connection.h"
#include "launch/environment.h"
#include "launch/failure.h"
#include "launch/options.h"

namespace fsdp::launch {

struct Verdict {
  bool restart = false;
  std::optional<Failure> failure;  // none: every rank of every node exited with 0
};

class Nodes {
 public:
  // Waits until the launchers of all nodes are there. Throws an Error that names the missing ones
  // after options.rendezvous_s, or says what the nodes disagree about.
  explicit Nodes(const Options& options);

  const Plan& plan() const { return plan_; }

  // Before each start; `restart` is 0 for the first.
  void begin(int restart, int master_port);

  // To be polled for reading; receive() then takes what came.
  void watch(std::vector<pollfd>& fds) const;
  void receive();

  // The first failure that this node knows of, its own or another's.
  const std::optional<Failure>& failure() const { return failure_; }
  // A failure on this node, as soon as it is known. Only the first counts, but one that gives up
  // counts over one that would start again.
  void failed(const Failure& failure);
  // All ranks of this node are gone. If it was a rank of this node that failed first, `last_lines`
  // are now complete.
  void ended(const std::vector<std::string>& last_lines);
  // Do not wait for the others any longer: the failure that is known decides.
  void stop_waiting();

  const std::optional<Verdict>& verdict() const { return verdict_; }

 private:
  struct Peer {
    Connection connection;
    bool ended = false;  // its ranks are gone, or it is
    bool lost = false;   // it is gone
  };

  void gather();  // node 0
  void join();    // the others
  void wait_for_all(FileDescriptor listener);
  void admit(Connection& connection, const nlohmann::json& hello);
  std::string missing() const;
  bool would_restart() const;
  void fail(const Failure& failure, int told_by);
  void lost(int node);
  bool take_plan(const nlohmann::json& message);  // false: it was something else
  void take(int node, const nlohmann::json& message);
  void decide();  // node 0: once all have ended

  const Options& options_;
  Plan plan_;
  std::map<int, Peer> peers_;  // node 0: all others; the others: node 0
  std::optional<Failure> failure_;
  std::optional<Verdict> verdict_;
  bool ended_ = false;
};

}  // namespace fsdp::launch
