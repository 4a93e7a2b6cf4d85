#include "launch/meeting.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "base/format.h"
#include "base/log.h"
#include "base/refusals.h"
#include "base/secret.h"
#include "base/sha256.h"
#include "fsdp/error.h"
#include "launch/messages.h"

namespace fsdp::launch {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kStrangerSeconds = 10;  // from a connection to its hello
constexpr double kDistrustSeconds = 10;  // for what listens in node 0's place
constexpr double kDecisionSeconds = 10;  // for node 0's plan, beyond the time that it waits
constexpr size_t kMostStrangers = 64;    // and one per node
constexpr const char* kSilent = "what listens there doesn't answer";

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

std::string seconds(double value) {
  return formatted("{:g} s", value);
}

std::string without_full_stop(std::string text) {
  if (text.ends_with('.')) text.pop_back();
  return text;
}

}  // namespace

Plan first_plan(const Options& options) {
  Plan plan;
  plan.run_id = to_hex(secret::random_bytes(16));
  plan.node = options.node_rank;
  plan.nprocs.assign(options.nnodes, 0);
  if (options.node_rank >= 0) plan.nprocs[options.node_rank] = options.nproc;
  plan.master_host = options.master_host.empty() ? "127.0.0.1" : options.master_host;
  plan.master_port = options.master_port;
  plan.max_restarts = options.max_restarts;
  plan.grace_s = options.grace_s;
  return plan;
}

// --- node 0 ---

Gathering::Gathering(const Options& options)
    : options_(options),
      listener_(
          listen_on(options_.control_port,
                    "where node 0's launcher listens; --control-port, or the master port + 1")) {}

Gathering::~Gathering() {
  try {
    hear_strangers();
  } catch (const std::exception&) {  // who hasn't been heard gives up by itself
  }
  for (auto& stranger : strangers_)
    if (stranger.hello) stranger.connection.send(Verdict{});
}

void Gathering::gather(Met& met, const Interrupted& interrupted) {
  met.plan.nprocs.resize(options_.nnodes);  // whoever was missed may come back
  try {
    wait_for_all(met, interrupted);
  } catch (const Error& failure) {
    for (auto& [node, peer] : met.connections)
      peer.send(Refusal{failure.message(), failure.hint()});
    throw;
  }
  if (interrupted() != 0) return;
  for (auto& [node, peer] : met.connections) {
    Plan theirs = met.plan;
    theirs.node = node;
    peer.send(theirs);
  }
}

std::string Gathering::missing(const Met& met) const {
  std::string nodes;
  for (int node = 1; node < met.plan.nodes(); ++node) {
    if (!met.connections.count(node)) nodes += (nodes.empty() ? "" : ", ") + std::to_string(node);
  }
  return nodes;
}

Error Gathering::nodes_are_missing(const Met& met) const {
  const std::string refused = refusals_.summary();
  return {formatted("node {} didn't join within {}{}.", missing(met),
                    seconds(options_.rendezvous_s), refused.empty() ? "" : "; refused: " + refused),
          formatted("start fsdp run there with the same --nnodes and --master, and check that port "
                    "{} is open between the nodes. --rendezvous-timeout waits longer.",
                    options_.control_port)};
}

void Gathering::wait_for_all(Met& met, const Interrupted& interrupted) {
  const auto deadline = after(options_.rendezvous_s);
  WaitLog log;
  auto& peers = met.connections;
  for (;;) {
    hear_strangers();
    for (auto& [node, peer] : peers) peer.receive();
    // A node that gave up waiting may rejoin.
    std::erase_if(peers, [](const auto& entry) { return !entry.second.is_open(); });
    admit(met);
    const int here = static_cast<int>(peers.size()) + 1;
    if (here == met.plan.nodes() || interrupted() != 0) return;
    log.say(formatted("waiting for node {} on port {}.", missing(met), options_.control_port));
    if (Clock::now() >= deadline) {
      if (here < options_.least_nodes) throw nodes_are_missing(met);
      log::warn(formatted("node {} didn't join within {}: going on with {} of {} nodes.",
                          missing(met), seconds(options_.rendezvous_s), here, met.plan.nodes()));
      return close_ranks(met);
    }
    wait_for_news(met, deadline);
  }
}

void Gathering::wait_for_news(const Met& met, Clock::time_point deadline) const {
  std::vector<pollfd> fds;
  watch(fds);
  auto wake = deadline;
  for (const auto& stranger : strangers_)
    if (!stranger.hello) wake = std::min(wake, stranger.until);
  for (const auto& [node, peer] : met.connections) fds.push_back({peer.fd(), POLLIN, 0});
  poll(fds.data(), fds.size(), milliseconds_until(wake));
}

void Gathering::watch(std::vector<pollfd>& fds) const {
  fds.push_back({listener_.get(), POLLIN, 0});
  for (const auto& stranger : strangers_) fds.push_back({stranger.connection.fd(), POLLIN, 0});
}

void Gathering::hear_strangers() {
  accept_strangers();
  for (auto& stranger : strangers_) hear(stranger);
  std::erase_if(strangers_, [](const auto& one) { return !one.connection.is_open(); });
}

// If there are too many, or no descriptor is left, the oldest stranger makes room.
void Gathering::accept_strangers() {
  pollfd ready{listener_.get(), POLLIN, 0};
  while (poll(&ready, 1, 0) > 0) {
    auto connection = Connection::accept(listener_, options_.secret);
    const size_t most = kMostStrangers + 2 * static_cast<size_t>(options_.nnodes);
    if (!strangers_.empty() && (!connection || strangers_.size() >= most)) {
      const auto silent = std::find_if(strangers_.begin(), strangers_.end(),
                                       [](const auto& one) { return !one.hello; });
      const auto oldest = silent == strangers_.end() ? strangers_.begin() : silent;
      refusals_.add(oldest->connection.peer(), "said nothing while others connected");
      strangers_.erase(oldest);
    }
    if (!connection) return;
    strangers_.push_back({std::move(*connection), after(kStrangerSeconds)});
  }
}

// Reads what a stranger says, until it has said hello.
void Gathering::hear(Stranger& stranger) {
  Connection& connection = stranger.connection;
  connection.receive();
  if (stranger.hello) return;
  const auto message = connection.next();
  std::string problem = connection.problem();
  if (message) {
    if (const auto* hello = std::get_if<Hello>(&*message)) {
      stranger.hello = *hello;
      return;
    }
    problem = "sent another message before its hello";
  } else if (problem.empty() && connection.is_open() && Clock::now() >= stranger.until) {
    problem = "said nothing for " + seconds(kStrangerSeconds);
  }
  if (problem.empty()) return;
  refusals_.add(connection.peer(), problem);
  connection.close();
}

// Gives places to those that have said hello. One that doesn't fit is told why: it knows the
// secret, so it is a mistake in its command line.
void Gathering::admit(Met& met) {
  for (auto& stranger : strangers_) {
    if (!stranger.hello) continue;
    if (const auto why = objection(met, stranger)) {
      refusals_.add(stranger.connection.peer(),
                    "doesn't fit: " + without_full_stop(why->message()));
      stranger.connection.send(Refusal{why->message(), why->hint()});
      stranger.connection.close();
    } else if (const int node = stranger.hello->node;
               node != kSpareNode && !met.connections.contains(node)) {
      admit(met, node, stranger);
    }
  }
  for (auto& stranger : strangers_) {  // spares; not for nodes that are about to join at first
    int node = 1;
    while (met.connections.contains(node)) ++node;
    if (met.plan.restart > 0 && stranger.hello && stranger.connection.is_open() &&
        node < met.plan.nodes())
      admit(met, node, stranger);
  }
  std::erase_if(strangers_, [](const auto& one) { return !one.connection.is_open(); });
}

void Gathering::admit(Met& met, int node, Stranger& stranger) {
  met.plan.nprocs[node] = stranger.hello->nproc;
  met.plan.restart = std::max(met.plan.restart, stranger.hello->restart);
  met.connections[node] = std::move(stranger.connection);
}

std::optional<Error> Gathering::objection(const Met& met, const Stranger& stranger) const {
  const auto& [version, nnodes, node, nproc, restart] = *stranger.hello;
  const std::string& where = stranger.connection.peer();
  if (version != kMessageVersion)
    return Error(formatted("the launcher at {} has another version than node 0's.", where),
                 "install the same fsdp on all nodes.");
  if (nnodes != options_.nnodes)
    return Error(
        formatted("the nodes' flags differ: node 0 has --nnodes {}, node {} ({}) has --nnodes {}.",
                  options_.nnodes, node, where, nnodes),
        "start all nodes with the same --nnodes.");
  const bool numbered = (node >= 1 && node < nnodes) || node == kSpareNode;
  if (!numbered || nproc < 1 || nproc > kMostRanksPerNode || restart < 0)
    return Error(formatted("the launcher at {} wants to be node {} of {} with {} ranks.", where,
                           node, nnodes, nproc),
                 "install the same fsdp on all nodes.");
  const auto other = met.connections.find(node);
  if (other != met.connections.end() && met.plan.restart == 0)
    return Error(formatted("two launchers have --node-rank {}: at {} and at {}.", node,
                           other->second.peer(), where),
                 "pass a different --node-rank on every node.");
  return std::nullopt;
}

// Goes on with the nodes that are here, under new numbers.
void Gathering::close_ranks(Met& met) const {
  std::vector<int> nprocs = {met.plan.nprocs[0]};
  std::map<int, Connection> connections;
  for (auto& [node, connection] : met.connections) {
    connections[static_cast<int>(nprocs.size())] = std::move(connection);
    nprocs.push_back(met.plan.nprocs[node]);
  }
  met.connections = std::move(connections);
  met.plan.nprocs = std::move(nprocs);
}

// --- the others ---

namespace {

bool take_plan(const Message& message, const Options& options, Plan& plan) {
  if (const auto* refused = std::get_if<Refusal>(&message))
    throw Error(refused->message, refused->hint);
  const auto* sent = std::get_if<Plan>(&message);
  if (!sent || sent->nodes() > options.nnodes || sent->node < 1 || sent->node >= sent->nodes())
    return false;
  const std::string master_host = plan.master_host;
  plan = *sent;
  plan.master_host = master_host;
  return true;
}

// A launcher's wait for node 0's plan.
struct Joining {
  const Options& options;
  Met& met;
  const Interrupted& interrupted;
  bool knows_us = false;  // node 0, from the start before
  WaitLog log = {};
  Clock::time_point deadline = after(options.rendezvous_s);

  bool spare() const { return met.plan.node == kSpareNode; }
  // A spare, or a node of an earlier start, whose place may be taken by now.
  bool waits_for_a_place() const { return spare() || met.plan.restart > 0; }
  void extend_deadline();
  std::string talk(Connection& connection);
  void take_messages(Connection& connection, bool& done);
};

void Joining::take_messages(Connection& connection, bool& done) {
  while (!done) {
    const auto message = connection.next();
    if (!message) return;
    met.dismissed = waits_for_a_place() && std::holds_alternative<Verdict>(*message);
    done = met.dismissed || take_plan(*message, options, met.plan);
  }
}

// Node 0 knows us, and decides how long to wait for the others.
void Joining::extend_deadline() {
  deadline = std::max(deadline, after(options.rendezvous_s + kDecisionSeconds));
}

// Waits until node 0's launcher has proven the secret and sent its plan. Returns "", or why it has
// not.
std::string Joining::talk(Connection& connection) {
  const auto patience = std::min(deadline, after(kStrangerSeconds));
  bool greeted = std::exchange(knows_us, false), done = false;
  if (greeted) extend_deadline();
  while (connection.is_open() && Clock::now() < deadline && interrupted() == 0) {
    if (connection.is_trusted() && !greeted) {
      connection.send(Hello{.nnodes = options.nnodes,
                            .node = met.plan.node,
                            .nproc = options.nproc,
                            .restart = met.plan.restart});
      greeted = true;
      extend_deadline();
      if (spare()) log::info("connected to node 0 as a spare.");
    }
    if (!greeted && Clock::now() >= patience) return kSilent;
    if (greeted && waits_for_a_place()) extend_deadline();  // Ends: with the run, or with node 0
    if (greeted && !spare())
      log.say(met.plan.restart > 0 ? "connected to node 0; waiting for the next start."
                                   : "connected to node 0; waiting for the other nodes.");
    pollfd ready{connection.fd(), POLLIN, 0};
    poll(&ready, 1, milliseconds_until(greeted ? deadline : patience));
    connection.receive();
    take_messages(connection, done);
    if (done) return "";
  }
  if (interrupted() != 0) return "";
  if (!connection.problem().empty()) return "what listens there " + connection.problem();
  if (!connection.is_open()) return "it closed the connection";
  if (!greeted) return kSilent;
  throw Error(formatted("not all nodes joined within {}.", seconds(options.rendezvous_s)),
              "node 0's launcher names the missing ones. --rendezvous-timeout waits longer.");
}

}  // namespace

void join(const Options& options, Met& met, const Interrupted& interrupted) {
  Joining joining{options, met, interrupted};
  const std::string where = formatted("{}:{}", options.master_host, options.control_port);
  std::string problem = "the timeout is 0", distrust;
  std::optional<Clock::time_point> distrusted;  // what listens there isn't this run's launcher
  std::optional<Connection> connection;
  if (const auto known = met.connections.find(0); known != met.connections.end()) {
    connection = std::move(known->second);
    met.connections.clear();
    joining.knows_us = connection->is_open();
  }
  while (Clock::now() < joining.deadline && !(distrusted && Clock::now() >= *distrusted)) {
    if (!joining.knows_us)
      connection =
          Connection::open(options.master_host, options.control_port, 2, options.secret, problem);
    if (connection) {
      problem = joining.talk(*connection);
      if (problem.empty()) {
        met.connections[0] = std::move(*connection);
        return;
      }
      // It may be the launcher of an earlier run that is about to end.
      if (!connection->problem().empty()) {
        if (!distrusted) distrusted = after(kDistrustSeconds);
        distrust = problem;
      }
    }
    if (interrupted() != 0) return;
    joining.log.say(formatted("waiting for node 0 at {} ({}).", where, problem));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // Ends: deadline
  }
  if (distrusted)
    throw Error(formatted("node 0's launcher isn't at {}: {}.", where, distrust),
                "give every node the same FSDP_SECRET, FSDP_SECRET_FILE or --secret-file, and "
                "install the same fsdp. See docs/security.md.");
  throw Error(formatted("node 0's launcher did not answer at {} within {}: {}.", where,
                        seconds(options.rendezvous_s), problem),
              "check that fsdp run --node-rank 0 runs there with the same --master, and that the "
              "port is open between the nodes. --rendezvous-timeout waits longer.");
}

}  // namespace fsdp::launch
