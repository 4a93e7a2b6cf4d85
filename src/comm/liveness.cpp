#include "comm/liveness.h"

#include <unistd.h>

#include "comm/store.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

constexpr std::chrono::seconds kBeat{1};
constexpr std::chrono::seconds kSilence{8};  // without a beat: dead, stopped or cut off

std::string key(const char* what, int rank) { return std::string(what) + "/" + std::to_string(rank); }

}  // namespace

Liveness::Liveness(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                   std::chrono::milliseconds timeout)
    : store_(std::move(store)), rank_(rank), peers_(size) {
  std::string host = host_identity();
  store_->set(key("process", rank), std::to_string(getpid()) + " " + host);
  await_ranks(*store_, "process", size, timeout,
              "rank " + std::to_string(rank) + ": joining the world");
  for (int r = 0; r < size; ++r) {
    std::string text = store_->get_to_str(key("process", r));
    Peer& peer = peers_[r];
    peer.here = text.substr(text.find(' ') + 1) == host;
    if (peer.here) peer.process = Process(std::stoi(text));
    peer.changed = std::chrono::steady_clock::now();
    one_host_ &= peer.here;
  }
  if (!one_host_) heart_ = std::thread([this] { beat(); });
}

Liveness::~Liveness() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (heart_.joinable()) heart_.join();
  try {
    store_->set(key("ended", static_cast<int>(store_->add("endings", 1))), std::to_string(rank_));
  } catch (const std::exception&) {  // rank 0, which holds the store, ended before us
  }
}

void Liveness::beat() {
  std::unique_lock lock(mutex_);
  for (uint64_t count = 1; !stopping_; ++count) {
    lock.unlock();
    try {
      store_->set(key("beat", rank_), std::to_string(count));
    } catch (const std::exception&) {
      return;  // the store is gone; trouble() says so to who waits
    }
    lock.lock();
    stop_.wait_for(lock, kBeat, [&] { return stopping_; });
  }
}

std::string Liveness::trouble(const std::vector<int>& ranks) {
  for (int r : ranks) {
    Peer& peer = peers_[r];
    if (r != rank_ && peer.here && !peer.process.alive())
      return "rank " + std::to_string(r) + " died (process " +
             std::to_string(peer.process.pid()) + " is gone)";
  }
  try {
    if (store_->check({"failure"})) return store_->get_to_str("failure");
    for (int64_t n = store_->add("endings", 0); n > 0; --n) {
      int ended = std::stoi(store_->get_to_str(key("ended", static_cast<int>(n))));
      for (int r : ranks)
        if (r == ended && r != rank_)
          return "rank " + std::to_string(r) + " left (an exception or a normal end)";
    }
    std::lock_guard lock(mutex_);
    for (int r : ranks) {
      Peer& peer = peers_[r];
      if (r == rank_ || peer.here) continue;
      auto now = std::chrono::steady_clock::now();
      std::string beat = store_->check({key("beat", r)}) ? store_->get_to_str(key("beat", r)) : "";
      if (beat != peer.last_beat) peer.last_beat = beat, peer.changed = now;
      else if (now - peer.changed > kSilence)
        return "rank " + std::to_string(r) + " has given no sign of life for " +
               std::to_string(kSilence.count()) + " s (dead, stopped, or its host is cut off)";
    }
  } catch (const std::exception&) {
    return "the store of the rendezvous is gone: the process that holds it (rank 0, or torchrun's "
           "agent) died";
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
    store_->compareSet("failure", "", "rank " + std::to_string(rank_) + " failed: " + why);
  } catch (const std::exception&) {
  }
}

void Liveness::post(const std::string& communicator, const std::string& text) noexcept {
  try {
    store_->set("posted/" + communicator + "/" + std::to_string(rank_), text);
  } catch (const std::exception&) {
  }
}

std::string Liveness::posted(const std::string& communicator, int rank) noexcept {
  try {
    std::string where = "posted/" + communicator + "/" + std::to_string(rank);
    return store_->check({where}) ? store_->get_to_str(where) : "";
  } catch (const std::exception&) {
    return "";
  }
}

}  // namespace fsdp::comm
