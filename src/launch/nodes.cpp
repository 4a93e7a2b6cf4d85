#include "launch/nodes.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "base/format.h"
#include "base/log.h"
#include "fsdp/error.h"

namespace fsdp::launch {
namespace {

using Clock = std::chrono::steady_clock;

Clock::time_point after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

int milliseconds_until(Clock::time_point when) {
  auto left = std::chrono::ceil<std::chrono::milliseconds>(when - Clock::now()).count();
  return static_cast<int>(std::clamp<long long>(left, 0, 1000));
}

// Logs what the launcher waits for: after 3 s, then every 30 s.
class WaitLog {
 public:
  void say(const std::string& text) {
    if (Clock::now() < next_) return;
    next_ = after(30);
    log::info(text);
  }

 private:
  Clock::time_point next_ = after(3);
};

std::string random_id() {
  std::random_device source;
  return formatted("{:08x}{:08x}", source(), source());
}

std::string seconds(double value) {
  return formatted("{:g} s", value);
}

Refusal refusal(const Error& failure) {
  return {failure.message(), failure.hint()};
}

}  // namespace

Nodes::Nodes(const Options& options) : options_(options) {
  plan_.run_id = random_id();
  plan_.nprocs.assign(options.nnodes, 0);
  plan_.nprocs[options.node_rank] = options.nproc;
  plan_.master_host = options.master_host.empty() ? "127.0.0.1" : options.master_host;
  plan_.master_port = options.master_port;
  plan_.max_restarts = options.max_restarts;
  plan_.grace_s = options.grace_s;
  if (options.nnodes == 1) return;
  if (options.node_rank == 0) {
    gather();
  } else {
    join();
  }
}

std::string Nodes::missing() const {
  std::string nodes;
  for (int node = 1; node < options_.nnodes; ++node) {
    if (!peers_.count(node)) nodes += (nodes.empty() ? "" : ", ") + std::to_string(node);
  }
  return nodes;
}

// Takes over the connection of a node that sent hello. Throws if that node can't belong to this
// run, so that a mistake in one command line ends all launchers at once instead of after the
// timeout.
void Nodes::admit(Connection& connection, const Hello& hello) {
  const auto [version, nnodes, node, nproc] = hello;
  if (version != kMessageVersion) {
    throw Error(
        formatted("the launcher at {} has another version than node 0's.", connection.peer()),
        "install the same fsdp on all nodes.");
  }
  if (nnodes != options_.nnodes) {
    throw Error(
        formatted("the nodes' flags differ: node 0 has --nnodes {}, node {} ({}) has --nnodes {}.",
                  options_.nnodes, node, connection.peer(), nnodes),
        "start all nodes with the same --nnodes.");
  }
  if (auto other = peers_.find(node); other != peers_.end()) {
    throw Error(formatted("two launchers have --node-rank {}: at {} and at {}.", node,
                          other->second.connection.peer(), connection.peer()),
                "pass a different --node-rank on every node.");
  }
  if (node < 1 || node >= nnodes || nproc < 1 || nproc > kMostRanksPerNode) connection.close();
  if (!connection.is_open()) return;
  plan_.nprocs[node] = nproc;
  peers_[node].connection = std::move(connection);
}

void Nodes::gather() {
  FileDescriptor listener =
      listen_on(options_.control_port,
                "where node 0's launcher listens; --control-port, or the master port + 1");
  try {
    wait_for_all(std::move(listener));
  } catch (const Error& failure) {
    for (auto& [node, peer] : peers_) peer.connection.send(refusal(failure));
    throw;
  }
  for (auto& [node, peer] : peers_) peer.connection.send(plan_);
}

void Nodes::wait_for_all(FileDescriptor listener) {
  auto deadline = after(options_.rendezvous_s);
  WaitLog log;
  std::vector<Connection> strangers;  // connected, no hello yet
  while (static_cast<int>(peers_.size()) < options_.nnodes - 1) {
    std::string port = std::to_string(options_.control_port);
    log.say(formatted("waiting for node {} on port {}.", missing(), port));
    if (Clock::now() >= deadline) {
      throw Error(
          formatted("node {} didn't join within {}.", missing(), seconds(options_.rendezvous_s)),
          formatted("start fsdp run there with the same --nnodes and --master, and check that port "
                    "{} is open between the nodes. --rendezvous-timeout waits longer.",
                    port));
    }
    std::vector<pollfd> fds = {{listener.get(), POLLIN, 0}};
    for (const auto& stranger : strangers) fds.push_back({stranger.fd(), POLLIN, 0});
    for (const auto& [node, peer] : peers_) fds.push_back({peer.connection.fd(), POLLIN, 0});
    poll(fds.data(), fds.size(), milliseconds_until(deadline));

    if (fds[0].revents) {
      if (auto connection = Connection::accept(listener))
        strangers.push_back(std::move(*connection));
    }
    for (auto& stranger : strangers) {
      stranger.receive();
      auto message = stranger.next();
      if (!message) continue;
      const auto* hello = std::get_if<Hello>(&*message);
      if (!hello) {
        stranger.close();  // not a launcher
        continue;
      }
      try {
        admit(stranger, *hello);
      } catch (const Error& failure) {
        stranger.send(refusal(failure));
        throw;
      }
    }
    std::erase_if(strangers, [](const Connection& stranger) { return !stranger.is_open(); });
    for (auto& [node, peer] : peers_) peer.connection.receive();
    std::erase_if(peers_, [](const auto& entry) {  // a node that gave up waiting may rejoin
      return !entry.second.connection.is_open();
    });
  }
}

void Nodes::join() {
  auto deadline = after(options_.rendezvous_s);
  WaitLog log;
  std::string where = formatted("{}:{}", options_.master_host, options_.control_port);
  std::string problem = "the timeout is 0";
  const Hello hello{.nnodes = options_.nnodes, .node = options_.node_rank, .nproc = options_.nproc};
  Connection connection;
  while (Clock::now() < deadline) {
    if (!connection.is_open()) {
      auto opened = Connection::open(options_.master_host, options_.control_port, 2, problem);
      if (opened) {
        connection = std::move(*opened);
        connection.send(hello);
      } else {
        log.say(formatted("waiting for node 0 at {} ({}).", where, problem));
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
      }
      continue;
    }
    log.say("connected to node 0; waiting for the other nodes.");
    pollfd ready{connection.fd(), POLLIN, 0};
    poll(&ready, 1, milliseconds_until(deadline));
    connection.receive();
    if (auto message = connection.next(); message && take_plan(*message)) {
      peers_[0].connection = std::move(connection);
      return;
    }
    if (!connection.is_open()) {  // node 0's launcher ended, or another program has the port
      problem = "it closed the connection";
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
  }
  if (connection.is_open()) {
    throw Error(formatted("not all nodes joined within {}.", seconds(options_.rendezvous_s)),
                "node 0's launcher names the missing ones. --rendezvous-timeout waits longer.");
  }
  throw Error(formatted("node 0's launcher did not answer at {} within {}: {}.", where,
                        seconds(options_.rendezvous_s), problem),
              "check that fsdp run --node-rank 0 runs there with the same --master, and that the "
              "port is open between the nodes. --rendezvous-timeout waits longer.");
}

bool Nodes::take_plan(const Message& message) {
  if (const auto* refused = std::get_if<Refusal>(&message))
    throw Error(refused->message, refused->hint);
  const auto* plan = std::get_if<Plan>(&message);
  if (!plan || static_cast<int>(plan->nprocs.size()) != options_.nnodes) return false;
  const std::string master_host = plan_.master_host;
  plan_ = *plan;
  plan_.master_host = master_host;
  return true;
}

void Nodes::begin(int restart, int master_port) {
  plan_.restart = restart;
  plan_.master_port = master_port;
  failure_.reset();
  verdict_.reset();
  ended_ = killing_ = false;
  for (auto& [node, peer] : peers_) peer.ended = peer.lost;
}

void Nodes::watch(std::vector<pollfd>& fds) const {
  for (const auto& [node, peer] : peers_) {
    if (peer.connection.is_open()) fds.push_back({peer.connection.fd(), POLLIN, 0});
  }
}

void Nodes::receive() {
  for (auto& [node, peer] : peers_) {
    if (peer.lost || verdict_) continue;
    peer.connection.receive();
    // Messages after a verdict belong to the next start; they wait for begin().
    while (!verdict_) {
      auto message = peer.connection.next();
      if (!message) break;
      take(node, *message);
    }
    if (!peer.connection.is_open() && !verdict_) lost(node);
  }
}

void Nodes::take(int node, const Message& message) {
  const bool first = options_.node_rank == 0;
  if (const auto* notice = std::get_if<FailureNotice>(&message)) {
    fail(notice->failure, node);
  } else if (std::holds_alternative<KillOrder>(message)) {
    kill_from(node);
  } else if (const auto* end = std::get_if<EndNotice>(&message); end && first) {
    peers_[node].ended = true;
    if (end->last_lines && failure_ && failure_->node == node)
      failure_->last_lines = *end->last_lines;
    decide();
  } else if (const auto* verdict = std::get_if<Verdict>(&message); verdict && !first) {
    verdict_ = *verdict;
  }
}

// Handles a lost connection to the launcher of `node`. If the run is being given up anyway, the
// launchers just end in this order.
void Nodes::lost(int node) {
  peers_[node].ended = peers_[node].lost = true;
  bool giving_up = failure_ && failure_->kind != FailureKind::kRank;
  if (!giving_up) {
    Failure gone;
    gone.kind = FailureKind::kNode;
    gone.node = node;
    gone.code = 1;
    const Connection& connection = peers_[node].connection;
    gone.message = formatted("the launcher of node {} ({}) is gone", node, connection.peer());
    if (!connection.problem().empty()) gone.message += ": " + connection.problem();
    gone.hint = "it was killed, or its machine or the network is down; see its last output.";
    failure_.reset();
    fail(gone, node);
  }
  if (options_.node_rank == 0) {
    decide();
  } else if (ended_) {
    stop_waiting();
  }
}

bool Nodes::would_restart() const {
  return failure_ && failure_->kind == FailureKind::kRank && plan_.restart < plan_.max_restarts;
}

void Nodes::send_to_others(const Message& message, int from) {
  for (auto& [node, peer] : peers_) {
    if (node != from && peer.connection.is_open()) peer.connection.send(message);
  }
}

void Nodes::fail(const Failure& failure, int from) {
  bool counts = !failure_ || (would_restart() && failure.kind != FailureKind::kRank);
  if (!counts || verdict_) return;
  failure_ = failure;
  send_to_others(FailureNotice{failure}, from);
}

void Nodes::kill_from(int from) {
  if (killing_ || !failure_ || verdict_) return;
  killing_ = true;
  send_to_others(KillOrder{}, from);
}

void Nodes::kill() {
  kill_from(options_.node_rank);
}

void Nodes::failed(const Failure& failure) {
  fail(failure, options_.node_rank);
}

void Nodes::ended(const std::vector<std::string>& last_lines) {
  ended_ = true;
  bool ours =
      failure_ && failure_->kind == FailureKind::kRank && failure_->node == options_.node_rank;
  if (ours) failure_->last_lines = last_lines;
  if (options_.node_rank == 0) {
    decide();
    return;
  }
  EndNotice notice;
  if (ours) notice.last_lines = last_lines;
  peers_[0].connection.send(notice);
  if (!peers_[0].connection.is_open()) stop_waiting();
}

void Nodes::stop_waiting() {
  if (!verdict_) verdict_ = Verdict{false, failure_};
}

void Nodes::decide() {
  bool all = ended_ && std::all_of(peers_.begin(), peers_.end(),
                                   [](const auto& entry) { return entry.second.ended; });
  if (!all || verdict_) return;
  verdict_ = Verdict{would_restart(), failure_};
  send_to_others(*verdict_, options_.node_rank);
}

}  // namespace fsdp::launch
