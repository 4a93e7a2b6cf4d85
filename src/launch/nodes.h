// Nodes: how the launchers of a run find each other and exchange events.
//
// Node 0's launcher listens on the control port. The others connect to it and send their number of
// ranks. When all have joined, node 0 sends the Plan to all. The connections stay open: a failure
// is sent to all nodes at once, and a lost connection is a failure too. A node whose ranks have all
// exited reports it. When all nodes have, node 0 sends the Verdict: finished, restart, or give up.
// With one node, node 0 decides alone.
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
#include "launch/messages.h"
#include "launch/options.h"

namespace fsdp::launch {

class Nodes {
 public:
  // Waits until the launchers of all nodes have joined. Throws an Error that names the missing ones
  // after options.rendezvous_s, or one that says where the nodes' flags differ.
  explicit Nodes(const Options& options);

  const Plan& plan() const { return plan_; }

  // Before each start; `restart` is 0 for the first.
  void begin(int restart, int master_port);

  // Adds the descriptors to poll for reading; receive() then handles what arrived.
  void watch(std::vector<pollfd>& fds) const;
  void receive();

  // The first failure that this node knows of, its own or another node's.
  const std::optional<Failure>& failure() const { return failure_; }
  // Reports a failure on this node. Only the first counts, except that a failure that gives up
  // replaces one that would restart.
  void failed(const Failure& failure);
  // Tells all nodes to kill their ranks without waiting for the grace: a second signal arrived.
  void kill();
  bool killing() const { return killing_; }  // some node called kill()
  // Reports that all ranks of this node have exited. `last_lines` are complete now; they count if
  // a rank of this node failed first.
  void ended(const std::vector<std::string>& last_lines);
  // Stops waiting for the other nodes: the failure known so far becomes the verdict.
  void stop_waiting();

  const std::optional<Verdict>& verdict() const { return verdict_; }

 private:
  struct Peer {
    Connection connection;
    bool ended = false;  // its ranks have exited, or it was lost
    bool lost = false;   // its connection is closed
  };

  void gather();  // node 0
  void join();    // the others
  void wait_for_all(FileDescriptor listener);
  void admit(Connection& connection, const Hello& hello);
  std::string missing() const;
  bool would_restart() const;
  void fail(const Failure& failure, int from);
  void kill_from(int from);
  void send_to_others(const Message& message, int from);
  void lost(int node);
  bool take_plan(const Message& message);  // false: not a plan
  void take(int node, const Message& message);
  void decide();  // node 0: sends the verdict once all have ended

  const Options& options_;
  Plan plan_;
  std::map<int, Peer> peers_;  // on node 0 all others; on the others node 0
  std::optional<Failure> failure_;
  std::optional<Verdict> verdict_;
  bool ended_ = false;
  bool killing_ = false;
};

}  // namespace fsdp::launch
