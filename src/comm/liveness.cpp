#include "comm/liveness.h"

#include <unistd.h>

#include <charconv>
#include <exception>

#include "base/format.h"
#include "base/rank_status.h"
#include "comm/store.h"
#include "comm/store_client.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

constexpr std::chrono::seconds kBeat{1};
constexpr std::chrono::seconds kSilence{8};  // without a beat: dead, stopped or cut off

std::string key(const char* what, int rank) {
  return formatted("{}/{}", what, rank);
}

struct ProcessKey {
  int pid;
  std::string host;
};

ProcessKey read_process(const std::string& text, const std::string& key) {
  ProcessKey read{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), read.pid);
  if (problem != std::errc() || read.pid <= 0 || end == text.data() + text.size() || *end != ' ')
    throw Error(formatted("the store's key {} says \"{}\", not which process that is.", key, text),
                "all ranks must run the same version of fsdp.");
  read.host = end + 1;
  return read;
}

}  // namespace

Liveness::Liveness(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                   std::chrono::milliseconds timeout)
    : store_(store), rank_(rank), timeout_(timeout), peers_(size), beats_(size) {
  std::string host = host_identity();
  store->set(key("process", rank), formatted("{} {}", getpid(), host));
  const std::string joining = formatted("rank {}: joining the world", rank);
  await_ranks(store, "process", size, timeout, joining);
  for (int r = 0; r < size; ++r) {
    const std::string text = fetch(store, key("process", r), timeout, joining);
    Peer& peer = peers_[r];
    const auto [pid, where] = read_process(text, key("process", r));
    peer.here = where == host;
    if (peer.here) peer.process = Process(pid);
    beats_[r].changed = std::chrono::steady_clock::now();
    one_host_ &= peer.here;
  }
  if (!one_host_) heart_ = std::thread([this] { beat(); });
}

Liveness::~Liveness() {
  const bool stays = rank_status::current().recovers;  // it only leaves this world
  if (std::uncaught_exceptions() > 0 && !stays) rank_status::set_failing();
  {
    Lock lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (heart_.joinable()) heart_.join();  // Ends: its calls of the store are bounded
  try {
    store_.set(key("ended", rank_), "");
    store_.add("endings", 1);  // last: the store may go once every rank has done this
    if (rank_ == 0 && std::uncaught_exceptions() == 0) hold_store();
  } catch (const std::exception&) {  // the process with the store ended before us
  }
}

// The others use the store until they end, so it must outlive them.
void Liveness::hold_store() {
  auto deadline = std::chrono::steady_clock::now() + timeout_;
  auto somebody_runs = [&] {
    if (store_.add("endings", 0) >= static_cast<int64_t>(peers_.size())) return false;
    for (size_t r = 1; r < peers_.size(); ++r)
      if (!peers_[r].here || peers_[r].process.alive()) return true;
    return false;
  };
  // Ends: at the deadline.
  while (somebody_runs() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

void Liveness::beat() {
  Lock lock(mutex_);
  for (uint64_t count = 1; !stopping_; ++count) {
    lock.unlock();
    try {
      store_.set(key("beat", rank_), std::to_string(count));
    } catch (const std::exception&) {  // the store is gone or stopped; trouble() reports it
    }
    lock.lock();
    stop_.wait_for(lock, kBeat, [&]() FSDP_REQUIRES(mutex_) { return stopping_; });
  }
}

std::string Liveness::trouble(const std::vector<int>& ranks) {
  for (int r : ranks) {
    Peer& peer = peers_[r];
    if (r != rank_ && peer.here && !peer.process.alive())
      return formatted("rank {} died (process {} is gone)", r, peer.process.pid());
  }
  // Before the store: that may be on the host that is gone.
  if (rank_status::told_to_let_go()) return "a rank of this run died, as the launcher says";
  try {
    if (auto failure = store_.get("failure")) return *failure;
    if (store_.add("endings", 0) > 0)
      for (int r : ranks)
        if (r != rank_ && store_.get(key("ended", r)))
          return formatted("rank {} left (an exception or a normal end)", r);
    for (int r : ranks) {
      if (r == rank_ || peers_[r].here) continue;
      auto now = std::chrono::steady_clock::now();
      std::string beat = store_.get(key("beat", r)).value_or("");
      Lock lock(mutex_);
      Beat& known = beats_[r];
      if (beat != known.last)
        known = {beat, now};
      else if (now - known.changed > kSilence)
        return formatted(
            "rank {} has given no sign of life for {} s (dead, stopped, or its host is cut off)", r,
            kSilence.count());
    }
  } catch (const StoreGone&) {
    if (!peers_[0].here) return "rank 0 is gone, and the rendezvous store with it";
  } catch (const std::exception&) {
    // No answer from the store. Its process may be stopped and continue later; the timeout decides.
  }
  return "";
}

std::string Liveness::condition(int rank) const {
  const Peer& peer = peers_[rank];
  if (!peer.here) return "";
  return peer.process.stopped() ? "stopped by a signal" : "";
}

void Liveness::fail(const std::string& why) noexcept {
  try {
    store_.set_if_absent("failure", formatted("rank {} failed: {}", rank_, why));
  } catch (const std::exception&) {
  }
}

void Liveness::post(const std::string& communicator, const std::string& text) noexcept {
  try {
    store_.set(formatted("posted/{}/{}", communicator, rank_), text);
  } catch (const std::exception&) {
  }
}

std::string Liveness::posted(const std::string& communicator, int rank) noexcept {
  try {
    return store_.get(formatted("posted/{}/{}", communicator, rank)).value_or("");
  } catch (const std::exception&) {
    return "";
  }
}

std::string Liveness::who_is_missing(const std::string& communicator, const std::vector<int>& ranks,
                                     const std::string& expected) {
  // A stopped process explains the hang; the others may only be waiting for it.
  std::string stopped, silent;
  for (int r : ranks) {
    if (r == rank_) continue;
    const std::string who = formatted("rank {}", r), state = condition(r);
    if (!state.empty())
      stopped += (stopped.empty() ? "" : ", ") + who + " (" + state + ")";
    else if (stopped.empty() && posted(communicator, r) != expected)
      silent += (silent.empty() ? "" : ", ") + who;
  }
  if (!stopped.empty()) return stopped;
  return silent.empty() ? "an unknown rank: every rank waits in this call, so a message was lost"
                        : silent;
}

}  // namespace fsdp::comm
