// How the launchers of a run find each other, at first and before each restart.
//
// Node 0's launcher listens on the control port. The others connect, both sides prove the run's
// secret, and each says hello with its number of ranks. When all have joined, node 0 sends the Plan
// to all. Who doesn't prove the secret, or doesn't fit into the run, is refused and logged; node 0
// goes on waiting. A launcher that doesn't fit is told why, and ends.
//
// Before a restart, nodes that were lost are waited for. A launcher that was cut off connects
// again; one that died is started again with the same command, node 0's as well. A spare takes the
// place of a lost node at once, and so does a launcher whose number is taken. If too few come, the
// run goes on with fewer nodes, as far as options.least_nodes allows. Node 0's timeout decides.
#pragma once

#include <poll.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/refusals.h"
#include "fsdp/error.h"
#include "launch/connection.h"
#include "launch/environment.h"
#include "launch/options.h"

namespace fsdp::launch {

struct Met {
  Plan plan;
  std::map<int, Connection> connections = {};  // by node: on node 0 all others, else node 0
  bool dismissed = false;                      // the run ended while this one waited for a place
};
// Whether something ends the waiting: a signal, or 0.
using Interrupted = std::function<int()>;

Plan first_plan(const Options& options);

// Node 0's side.
class Gathering {
 public:
  explicit Gathering(const Options& options);
  ~Gathering();  // spares that wait learn that the run is over
  Gathering(const Gathering&) = delete;
  Gathering& operator=(const Gathering&) = delete;

  // Waits until all nodes have joined, and sends them the plan, which has the number of the next
  // start. Throws an Error that names the missing nodes after options.rendezvous_s.
  void gather(Met& met, const Interrupted& interrupted);
  // During a start: launchers may come back, and spares wait.
  void hear_strangers();
  void watch(std::vector<pollfd>& fds) const;  // what to poll for them

 private:
  using Clock = std::chrono::steady_clock;
  struct Stranger {
    Connection connection;
    Clock::time_point until;          // for its hello
    std::optional<Hello> hello = {};  // of a launcher that waits for a place
  };

  void wait_for_all(Met& met, const Interrupted& interrupted);
  void wait_for_news(const Met& met, Clock::time_point deadline) const;
  void accept_strangers();
  void hear(Stranger& stranger);
  void admit(Met& met);
  void admit(Met& met, int node, Stranger& stranger);
  std::optional<Error> objection(const Met& met, const Stranger& stranger) const;
  std::string missing(const Met& met) const;
  Error nodes_are_missing(const Met& met) const;
  void close_ranks(Met& met) const;

  const Options& options_;
  FileDescriptor listener_;
  std::deque<Stranger> strangers_;  // the oldest first
  Refusals refusals_{"a launcher"};
};

// The others' side: connects to node 0 unless it is connected, and takes the plan. Throws an Error
// if node 0 can't be reached for options.rendezvous_s, or one that says why it refused this one. A
// spare waits as long as the run lasts, and so does a node whose place was taken.
void join(const Options& options, Met& met, const Interrupted& interrupted);

}  // namespace fsdp::launch
