// Nodes: how the launchers of a run exchange events once they have met (launch/meeting.h).
//
// Their connections stay open: a failure is sent to all nodes at once, and a lost connection is a
// failure too. A node whose ranks have all exited reports it. When all nodes have, node 0 sends the
// Verdict: finished, restart, or give up. With one node, node 0 decides alone.
//
// A node whose rank dies may ask to have it replaced while all others stay (replace.cpp). Node 0
// then tells all nodes to let their ranks go of the world, under the number and the port of the
// next restart. When all ranks wait, it tells the nodes to let them join. Any failure meanwhile is
// one as usual: all ranks end.
#pragma once

#include <poll.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/connection.h"
#include "launch/environment.h"
#include "launch/failure.h"
#include "launch/meeting.h"
#include "launch/messages.h"
#include "launch/options.h"

namespace fsdp::launch {

class Nodes {
 public:
  // Waits until the launchers of all nodes have joined (meeting.h). A spare waits until it is
  // needed.
  explicit Nodes(const Options& options);
  ~Nodes();

  const Plan& plan() const { return plan_; }
  bool dismissed() const { return dismissed_; }  // the run ended while it waited for a place

  // Before each start; `restart` is 0 for the first.
  void begin(int restart, int master_port);
  // After a verdict to restart: waits for nodes that were lost, and takes the next plan. Throws as
  // the constructor does. `interrupted` returns a signal that ends the waiting, or 0; so does this.
  int meet_again(const Interrupted& interrupted);

  // Adds the descriptors to poll for reading; receive() then handles what arrived. It also has to
  // be called every tick().
  void watch(std::vector<pollfd>& fds) const;
  std::optional<std::chrono::milliseconds> tick() const;
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

  // Asks to replace the ranks of this node that died: soon stage() is kLettingGo, or the failure is
  // one of the run.
  void ask_to_replace(const Failure& failure);
  Stage stage() const { return stage_; }
  const Failure& replaced() const { return replaced_; }  // at a stage: its cause
  // All ranks of this node have done what the stage is for.
  void reached();

 private:
  struct Peer {
    Connection connection;
    bool ended = false;    // its ranks have exited, or it was lost
    bool lost = false;     // its connection is closed
    bool reached = false;  // the end of the stage
  };

  using Clock = std::chrono::steady_clock;

  void take(Met met);
  bool first() const { return plan_.node == 0; }
  void beat();
  void decide_alone();
  bool would_restart() const;
  void fail(const Failure& failure, int from);
  void kill_from(int from);
  void send_to_others(const Message& message, int from);
  void lost(int node);
  void take(int node, const Message& message);
  void decide();  // node 0: sends the verdict once all have ended
  void grant(const ReplaceRequest& request);
  void let_go(const LetGo& order);
  void enter(Stage stage);
  void heard(int node, const Reached& reached);
  void advance();  // to the next stage, once all nodes are at the end of this one

  const Options& options_;
  Plan plan_;
  std::map<int, Peer> peers_;  // on node 0 all others; on the others node 0
  std::optional<Failure> failure_;
  std::optional<Verdict> verdict_;
  std::unique_ptr<Gathering> gathering_;  // node 0, if there are several
  Clock::time_point begun_, last_beat_;
  Stage stage_ = Stage::kNone;
  Failure replaced_;
  std::optional<HeldPort> port_;  // node 0: for rank 0, since ranks were replaced
  bool reached_ = false;          // this node: the end of the stage
  bool ended_ = false;
  bool killing_ = false;
  bool dismissed_ = false;
};

}  // namespace fsdp::launch
