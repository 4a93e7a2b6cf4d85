// Attempt: ranks that die are replaced while the others stay.
//
// A rank whose status says that it recovers notices the death of another one by a failed
// collective, or learns of it from its launcher: another host's processes can't be seen. It lets go
// of the world and reports the restart it waits for. Meanwhile the launcher starts the
// replacements, under the number and the port of that restart. When all ranks of all nodes wait
// (nodes.h), it announces both to those that stay. A rank that doesn't let go in time is killed and
// replaced, too. If a rank dies while all of them join the new world, everything restarts as usual.
// How long they may take for that is up to their own timeouts.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <set>

#include "base/format.h"
#include "launch/attempt.h"

namespace fsdp::launch {
namespace {

constexpr std::chrono::seconds kStuck{30};  // after SIGKILL: in the kernel

}  // namespace

// Whether this node's ranks do their part in it.
bool Attempt::can_replace() const {
  if (stopping_ || replacing_ == Replacing::kJoining) return false;
  bool anyone_stays = nodes_.plan().nodes() > 1;
  for (const auto& rank : ranks_) {
    if (rank.process.exit && (ended_well(rank) || rank.fresh)) return false;
    if (!rank.fresh && !rank.status.read().recovers) return false;
    anyone_stays |= !rank.process.exit;
  }
  return anyone_stays;
}

void Attempt::lost(Rank& rank, Failure failure) {
  if (replacing_ == Replacing::kAsked) return;
  if (!can_replace()) return nodes_.failed(failure);
  read_rest(rank);
  failure.last_lines = rank.last_lines.lines();
  if (replacing_ == Replacing::kLettingGo) return replace(failure);
  replacing_ = Replacing::kAsked;  // until node 0 decides or counts as lost
  nodes_.ask_to_replace(failure);
}

// Starts ranks that have exited again. `failure`: of one of them, or of another node's.
void Attempt::replace(const Failure& failure) {
  std::vector<int> dead;
  std::set<int> all = {failure.rank};
  for (size_t local = 0; local < ranks_.size(); ++local) {
    Rank& rank = ranks_[local];
    if (!rank.process.exit) continue;
    read_rest(rank);
    dead.push_back(static_cast<int>(local));
    all.insert(rank.rank);
  }
  std::string who;
  for (int rank : all) who += formatted("{}{}", who.empty() ? "" : ", ", rank);
  say_failure(failure);
  say(formatted("fsdp: restart {} of {}: {} replaced, the others stay.\n", nodes_.plan().restart,
                nodes_.plan().max_restarts,
                all.size() == 1 ? formatted("rank {} is", who) : formatted("ranks {} are", who)));
  for (int local : dead) {
    Rank& rank = ranks_[local];
    guard_.forget(rank.process.pid);
    release(rank.process);
    Rank next;
    next.rank = rank.rank;
    next.prefix = rank.prefix;
    next.fresh = true;
    rank = std::move(next);
  }
  start_ranks(dead);
}

// Once per pass of the loop: follows the stages of all nodes.
void Attempt::watch_replacing() {
  if (stopping_ || nodes_.failure()) {
    replacing_ = Replacing::kNo;
    return;
  }
  if (replacing_ == Replacing::kJoining && nodes_.stage() != Stage::kJoining) end_replacing();
  if (replacing_ < Replacing::kLettingGo && nodes_.stage() == Stage::kLettingGo) begin_replacing();
  if (replacing_ == Replacing::kLettingGo && nodes_.stage() == Stage::kLettingGo) watch_waiting();
  if (replacing_ == Replacing::kLettingGo && nodes_.stage() == Stage::kJoining) announce_start();
  if (replacing_ == Replacing::kJoining && all_joined()) nodes_.reached();
}

void Attempt::begin_replacing() {
  if (!can_replace()) return nodes_.failed(nodes_.replaced());
  replacing_ = Replacing::kLettingGo;
  replacing_since_ = Clock::now();
  for (auto& rank : ranks_)
    if (!rank.process.exit) rank.status.tell_to_let_go(nodes_.plan().restart);
  replace(nodes_.replaced());
}

void Attempt::watch_waiting() {
  bool all_wait = true;
  const auto waited = Clock::now() - replacing_since_;
  for (auto& rank : ranks_) {
    if (rank.fresh) continue;
    // It finished without the dead rank, which had done its part: nobody waits for the others.
    if (rank.process.exit && ended_well(rank)) return nodes_.failed(nodes_.replaced());
    const rank_status::Status status = rank.status.read();
    if (!rank.process.exit && status.waits_for == nodes_.plan().restart) continue;
    all_wait = false;
    if (rank.process.exit) continue;  // notice_exits() replaces it, too
    const std::chrono::duration<double> grace(status.grace_s > 0 ? status.grace_s
                                                                 : rank_status::default_grace(0));
    if (waited >= grace + kStuck) return nodes_.failed(nodes_.replaced());
    if (waited >= grace) signal_group(rank.process, SIGKILL);
  }
  if (all_wait) nodes_.reached();
}

void Attempt::announce_start() {
  replacing_ = Replacing::kJoining;
  for (size_t local = 0; local < ranks_.size(); ++local) {
    if (ranks_[local].fresh) continue;
    rank_status::Start start{.attempt = nodes_.plan().restart, .variables = ""};
    const auto ours = [](const char*) { return true; };  // those that users may set stay
    for (const auto& [name, value] :
         rank_variables(nodes_.plan(), nodes_.plan().node, static_cast<int>(local), 1, ours))
      start.variables += formatted("{}={}\n", name, value);
    ranks_[local].status.announce(start);
  }
}

bool Attempt::all_joined() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
    return rank.status.read().joined == nodes_.plan().restart;
  });
}

void Attempt::end_replacing() {
  replacing_ = Replacing::kNo;
  for (auto& rank : ranks_) rank.fresh = false;
  const std::chrono::duration<double> took = Clock::now() - replacing_since_;
  say(formatted("fsdp: all ranks have joined again after {:.1f} s.\n", took.count()));
}

}  // namespace fsdp::launch
