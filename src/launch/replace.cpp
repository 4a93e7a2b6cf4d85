// Attempt: ranks that die are replaced while the others stay.
//
// A rank whose status says that it recovers notices the death of another one by a failed
// collective. It lets go of the world and reports the attempt it waits for. The launcher starts the
// replacements at once, under the number and the port of the next restart, and announces both to
// the others when all of them wait. A rank that doesn't let go in time is killed and replaced, too.
// If a rank dies while all of them join the new world, everything restarts as usual.
#include <algorithm>
#include <chrono>
#include <csignal>

#include "base/format.h"
#include "launch/attempt.h"

namespace fsdp::launch {

// Only with one node: others would have to be told.
bool Attempt::can_replace() const {
  const Plan& plan = nodes_.plan();
  const bool more = replacing_ == Replacing::kLettingGo || plan.restart < plan.max_restarts;
  if (plan.nodes() > 1 || stopping_ || !more || replacing_ == Replacing::kJoining) return false;
  int staying = 0;
  for (const auto& rank : ranks_) {
    if (rank.process.exit) {
      if (ended_well(rank) || rank.fresh) return false;
      continue;
    }
    if (!rank.fresh && !rank.status.read().recovers) return false;
    ++staying;
  }
  return staying > 0;
}

void Attempt::replace(Failure failure) {
  std::vector<int> dead;
  std::string who;
  for (size_t local = 0; local < ranks_.size(); ++local) {
    Rank& rank = ranks_[local];
    if (!rank.process.exit) continue;
    dead.push_back(static_cast<int>(local));
    who += formatted("{}{}", who.empty() ? "" : ", ", rank.rank);
    for (int stream : {0, 1}) {
      read_stream(rank, stream, 1024 * 1024);
      std::string rest = rank.streams[stream].splitter.take_rest();
      if (!rest.empty()) show(rank, stream, rest);
    }
    if (rank.rank == failure.rank) failure.last_lines = rank.last_lines.lines();
  }
  say_failure(failure);
  if (replacing_ == Replacing::kNo) {
    replacing_ = Replacing::kLettingGo;
    replacing_since_ = Clock::now();
    replaced_failure_ = failure;
    if (options_.master_port == 0) port_.emplace(0, "a free port for rank 0");
    nodes_.begin(nodes_.plan().restart + 1, port_ ? port_->number() : nodes_.plan().master_port);
  }
  say(formatted("fsdp: restart {} of {}: {} {} replaced, the others stay.\n",
                nodes_.plan().restart, nodes_.plan().max_restarts,
                dead.size() == 1 ? "rank" : "ranks", who + (dead.size() == 1 ? " is" : " are")));
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

// Once per pass of the loop.
void Attempt::watch_replacing() {
  if (stopping_ || nodes_.failure()) replacing_ = Replacing::kNo;
  if (replacing_ == Replacing::kJoining && all_joined()) {
    replacing_ = Replacing::kNo;
    for (auto& rank : ranks_) rank.fresh = false;
    const std::chrono::duration<double> took = Clock::now() - replacing_since_;
    say(formatted("fsdp: all ranks have joined again after {:.1f} s.\n", took.count()));
  }
  if (replacing_ != Replacing::kLettingGo) return;
  bool all_wait = true;
  for (auto& rank : ranks_) {
    if (rank.fresh) continue;
    // It finished without the dead rank, which had done its part: nobody waits for the others.
    if (rank.process.exit) return nodes_.failed(replaced_failure_);
    const rank_status::Status status = rank.status.read();
    if (status.waits_for == nodes_.plan().restart) continue;
    all_wait = false;
    const double grace = status.grace_s > 0 ? status.grace_s : rank_status::default_grace(0);
    if (Clock::now() - replacing_since_ < std::chrono::duration<double>(grace)) continue;
    signal_group(rank.process, SIGKILL);  // notice_exits() finds it
  }
  if (all_wait) announce_start();
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

}  // namespace fsdp::launch
