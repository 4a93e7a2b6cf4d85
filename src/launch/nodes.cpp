#include "launch/nodes.h"

#include <algorithm>

#include "base/exit_code.h"
#include "base/format.h"

namespace fsdp::launch {

namespace {

using namespace std::chrono_literals;

constexpr auto kBeat = 2s;     // between signs of life
constexpr auto kSilence = 8s;  // without one: dead, stopped or cut off

int never() {
  return 0;
}

}  // namespace

Nodes::Nodes(const Options& options) : options_(options) {
  Met met{.plan = first_plan(options)};
  if (options.nnodes > 1 && options.node_rank == 0) {
    gathering_ = std::make_unique<Gathering>(options);
    gathering_->gather(met, never);
  } else if (options.nnodes > 1) {
    join(options, met, never);
  }
  take(std::move(met));
}

Nodes::~Nodes() = default;

void Nodes::take(Met met) {
  plan_ = std::move(met.plan);
  dismissed_ = met.dismissed;
  peers_.clear();
  for (auto& [node, connection] : met.connections) peers_[node].connection = std::move(connection);
}

int Nodes::meet_again(const Interrupted& interrupted) {
  Met met{.plan = plan_};
  met.plan.restart = plan_.restart + 1;
  met.plan.master_port = options_.master_port;  // ranks that were replaced had another one
  for (auto& [node, peer] : peers_)
    if (!peer.lost) met.connections[node] = std::move(peer.connection);
  int signal = 0;
  const auto look = [&] { return signal != 0 ? signal : signal = interrupted(); };
  if (gathering_)
    gathering_->gather(met, look);
  else if (options_.nnodes > 1)
    join(options_, met, look);
  take(std::move(met));
  return signal;
}

void Nodes::begin(int restart, int master_port) {
  plan_.restart = restart;
  plan_.master_port = master_port;
  failure_.reset();
  verdict_.reset();
  ended_ = killing_ = false;
  enter(Stage::kNone);
  port_.reset();
  begun_ = Clock::now();  // while launchers meet, they are silent
  for (auto& [node, peer] : peers_) peer.ended = peer.lost;
}

void Nodes::watch(std::vector<pollfd>& fds) const {
  for (const auto& [node, peer] : peers_) {
    if (peer.connection.is_open()) fds.push_back({peer.connection.fd(), POLLIN, 0});
  }
  if (gathering_) gathering_->watch(fds);
}

std::optional<std::chrono::milliseconds> Nodes::tick() const {
  if (peers_.empty()) return std::nullopt;
  return 500ms;
}

void Nodes::beat() {
  const auto now = Clock::now();
  if (now - last_beat_ < kBeat) return;
  last_beat_ = now;
  send_to_others(Beat{}, plan_.node);
}

void Nodes::receive() {
  beat();
  if (gathering_) gathering_->hear_strangers();
  for (auto& [node, peer] : peers_) {
    if (peer.lost || verdict_) continue;
    peer.connection.receive();
    // Messages after a verdict belong to the next start; they wait for begin().
    while (!verdict_) {
      auto message = peer.connection.next();
      if (!message) break;
      take(node, *message);
    }
    const auto heard = std::max(begun_, peer.connection.last_heard());
    if (peer.connection.is_open() && Clock::now() - heard > kSilence)
      peer.connection.close(formatted("gave no sign of life for {} s", kSilence.count()));
    if (!peer.connection.is_open() && !verdict_) lost(node);
  }
}

void Nodes::take(int node, const Message& message) {
  if (const auto* notice = std::get_if<FailureNotice>(&message)) {
    fail(notice->failure, node);
  } else if (std::holds_alternative<KillOrder>(message)) {
    kill_from(node);
  } else if (const auto* end = std::get_if<EndNotice>(&message); end && first()) {
    peers_[node].ended = true;
    if (end->last_lines && failure_ && failure_->node == node)
      failure_->last_lines = *end->last_lines;
    decide();
  } else if (const auto* verdict = std::get_if<Verdict>(&message); verdict && !first()) {
    verdict_ = *verdict;
  } else if (const auto* request = std::get_if<ReplaceRequest>(&message); request && first()) {
    grant(*request);
  } else if (const auto* order = std::get_if<LetGo>(&message); order && !first()) {
    let_go(*order);
  } else if (const auto* reached = std::get_if<Reached>(&message)) {
    heard(node, *reached);
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
    gone.code = kExitLostRank;
    const Connection& connection = peers_[node].connection;
    gone.message = formatted("the launcher of node {} ({}) is gone", node, connection.peer());
    if (!connection.problem().empty()) gone.message += ": it " + connection.problem();
    gone.hint = "it was killed, or its machine or the network is down; see its last output.";
    failure_.reset();
    fail(gone, node);
  }
  if (first()) {
    decide();
  } else if (ended_) {
    decide_alone();
  }
}

bool Nodes::would_restart() const {
  return failure_ && plan_.restart < plan_.max_restarts &&
         (failure_->kind == FailureKind::kRank || failure_->kind == FailureKind::kNode);
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
  kill_from(plan_.node);
}

void Nodes::failed(const Failure& failure) {
  fail(failure, plan_.node);
}

void Nodes::ended(const std::vector<std::string>& last_lines) {
  ended_ = true;
  bool ours = failure_ && failure_->kind == FailureKind::kRank && failure_->node == plan_.node &&
              failure_->last_lines.empty();  // a rank that can't be replaced was read to its end
  if (ours) failure_->last_lines = last_lines;
  if (first()) {
    decide();
    return;
  }
  EndNotice notice;
  if (ours) notice.last_lines = last_lines;
  peers_[0].connection.send(notice);
  if (!peers_[0].connection.is_open()) decide_alone();
}

void Nodes::stop_waiting() {
  if (!verdict_) verdict_ = Verdict{false, failure_};
}

// Node 0 is lost, but may come back.
void Nodes::decide_alone() {
  if (!verdict_) verdict_ = Verdict{would_restart(), failure_};
}

void Nodes::decide() {
  bool all = ended_ && std::all_of(peers_.begin(), peers_.end(),
                                   [](const auto& entry) { return entry.second.ended; });
  if (!all || verdict_) return;
  verdict_ = Verdict{would_restart(), failure_};
  send_to_others(*verdict_, plan_.node);
}

// --- ranks that are replaced ---

void Nodes::ask_to_replace(const Failure& failure) {
  const ReplaceRequest request{plan_.restart, failure};
  if (first())
    grant(request);
  else
    peers_[0].connection.send(request);
}

void Nodes::grant(const ReplaceRequest& request) {
  if (failure_ || verdict_) return;
  // Ranks died on two nodes at once: the order of the first request is on its way to the second.
  if (stage_ == Stage::kLettingGo && request.restart == plan_.restart - 1) return;
  const bool complete = !ended_ && std::none_of(peers_.begin(), peers_.end(),
                                                [](const auto& peer) { return peer.second.ended; });
  const bool fits = stage_ == Stage::kNone && request.restart == plan_.restart;
  if (!fits || !complete || plan_.restart >= plan_.max_restarts)
    return fail(request.failure, plan_.node);
  // A new port: the store of the world before may still listen on the old one.
  port_.emplace(0, "a free port for rank 0");
  const LetGo order{plan_.restart + 1, port_->number(), request.failure};
  send_to_others(order, plan_.node);
  let_go(order);
}

void Nodes::let_go(const LetGo& order) {
  if (failure_ || verdict_) return;  // node 0 learns of it, and ends all ranks
  const bool fits = stage_ == Stage::kNone && order.restart == plan_.restart + 1 &&
                    order.master_port > 0 && order.master_port < 65536;
  if (!fits) return peers_[0].connection.close("sent an order that doesn't fit");
  plan_.restart = order.restart;
  plan_.master_port = order.master_port;
  replaced_ = order.failure;
  enter(Stage::kLettingGo);
}

void Nodes::enter(Stage stage) {
  stage_ = stage;
  reached_ = false;
  for (auto& [node, peer] : peers_) peer.reached = false;
}

void Nodes::reached() {
  if (reached_ || failure_ || verdict_) return;
  reached_ = true;
  if (first())
    advance();
  else
    peers_[0].connection.send(Reached{plan_.restart, stage_});
}

void Nodes::heard(int node, const Reached& reached) {
  if (failure_ || reached.restart != plan_.restart || reached.stage != stage_) return;
  peers_[node].reached = true;
  advance();
}

void Nodes::advance() {
  const bool all = std::all_of(peers_.begin(), peers_.end(),
                               [](const auto& peer) { return peer.second.reached; });
  if (!reached_ || !all) return;
  if (first()) send_to_others(Reached{plan_.restart, stage_}, plan_.node);
  enter(stage_ == Stage::kLettingGo ? Stage::kJoining : Stage::kNone);
}

}  // namespace fsdp::launch
