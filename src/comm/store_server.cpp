#include "comm/store_server.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/format.h"
#include "base/handshake.h"
#include "base/log.h"
#include "base/refusals.h"
#include "base/sockets.h"
#include "comm/store_table.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint64_t kStop = 0, kListener = 1;  // what an event is about; peers follow
constexpr size_t kReadBytes = 64 << 10;
constexpr int kAcceptAtOnce = 16;
constexpr milliseconds kPauseWithoutDescriptors{100};

struct StorePeer {
  FileDescriptor socket;
  std::string name;                    // for the log
  std::optional<Handshake> handshake;  // of a stranger
  std::string in, out;                 // received and not yet read; not yet sent
  size_t sent = 0;                     // of `out`
  bool writable_wanted = false;
  std::optional<StoreRequest> waiting;  // for a key
  std::multimap<std::string, uint64_t>::iterator waits_at;
  std::optional<Clock::time_point> deadline;  // of the handshake or the wait
};

// What the server's thread has to itself.
class StoreLoop {
 public:
  StoreLoop(StoreServerOptions options, int stop)
      : options_(std::move(options)),
        most_strangers_(128 + 2 * static_cast<size_t>(options_.ranks)),
        most_peers_(64 + 16 * static_cast<size_t>(options_.ranks)),
        epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    watch(EPOLL_CTL_ADD, stop, kStop, EPOLLIN);
    watch(EPOLL_CTL_ADD, options_.listener.get(), kListener, EPOLLIN);
  }

  void run();

 private:
  void watch(int operation, int fd, uint64_t id, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    epoll_ctl(epoll_.get(), operation, fd, &event);
  }
  int milliseconds_to_wait() const;
  void accept_some();
  void admit(sockets::Accepted accepted);
  void pause_listening();
  void serve(uint64_t id, uint32_t events);
  bool read_from(StorePeer& peer);
  bool advance(uint64_t id, StorePeer& peer);
  bool shake_hands(uint64_t id, StorePeer& peer);
  bool take_request(uint64_t id, StorePeer& peer);
  void try_to_answer(uint64_t id, StorePeer& peer);
  void wake_waiters_of(const std::string& key);
  void stop_waiting(StorePeer& peer);
  bool flush(uint64_t id, StorePeer& peer);
  void set_deadline(uint64_t id, StorePeer& peer, std::optional<Clock::time_point> when);
  void pass_deadlines();
  void refuse(uint64_t id, const std::string& why);
  void close(uint64_t id);

  StoreServerOptions options_;
  const size_t most_strangers_, most_peers_;
  FileDescriptor epoll_;
  StoreTable table_;
  uint64_t next_id_ = kListener + 1;
  std::map<uint64_t, StorePeer> peers_;
  std::set<uint64_t> strangers_;  // the oldest first
  std::set<std::pair<Clock::time_point, uint64_t>> deadlines_;
  std::multimap<std::string, uint64_t> waiters_;    // of a key
  std::optional<Clock::time_point> listens_again_;  // after it ran out of descriptors
  Refusals refusals_{"a connection to the store"};
};

void StoreLoop::run() {
  for (;;) {
    epoll_event events[64];
    const int count = epoll_wait(epoll_.get(), events, std::size(events), milliseconds_to_wait());
    if (count < 0 && errno != EINTR)
      throw Error(formatted("the store can't wait for its connections: {}.", std::strerror(errno)),
                  "raise the limit on descriptors (ulimit -n).");
    for (int i = 0; i < count; ++i) {
      const uint64_t id = events[i].data.u64;
      if (id == kStop) return;
      if (id == kListener)
        accept_some();
      else
        serve(id, events[i].events);
    }
    pass_deadlines();
  }
}

int StoreLoop::milliseconds_to_wait() const {
  std::optional<Clock::time_point> next = listens_again_;
  if (!deadlines_.empty() && (!next || deadlines_.begin()->first < *next))
    next = deadlines_.begin()->first;
  if (!next) return -1;
  const auto left = std::chrono::ceil<milliseconds>(*next - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

// A few at a time: those who are here and said something have their turn before they have to make
// room for more.
void StoreLoop::accept_some() {
  for (int i = 0; i < kAcceptAtOnce; ++i) {
    int problem = 0;
    auto accepted = sockets::accept_from(options_.listener, problem);
    if (accepted.socket)
      admit(std::move(accepted));
    else if (problem == EAGAIN)
      return;
    else if (problem == EMFILE || problem == ENFILE || problem == ENOBUFS || problem == ENOMEM)
      return pause_listening();
    // Else that one is gone already.
  }
}

void StoreLoop::admit(sockets::Accepted accepted) {
  const uint64_t id = next_id_++;
  if (options_.one_user) {
    const auto owner = sockets::owner_of(accepted.socket);
    accepted.peer = formatted("process {} of user {}", owner.pid, owner.user);
    if (owner.user != geteuid()) return refusals_.add(accepted.peer, "belongs to another user");
  }
  if (peers_.size() - strangers_.size() >= most_peers_)
    return refusals_.add(accepted.peer, formatted("is one of more than {}", most_peers_));
  if (strangers_.size() >= most_strangers_)
    refuse(*strangers_.begin(), "said nothing while many others connected");
  StorePeer& peer = peers_[id];
  peer.socket = std::move(accepted.socket);
  peer.name = std::move(accepted.peer);
  peer.handshake.emplace(Handshake::Role::kListener, options_.secret, options_.context);
  strangers_.insert(id);
  set_deadline(id, peer, Clock::now() + options_.patience);
  watch(EPOLL_CTL_ADD, peer.socket.get(), id, EPOLLIN);
}

// Without descriptors nobody can be accepted, and the listener would stay ready.
void StoreLoop::pause_listening() {
  if (!strangers_.empty()) refuse(*strangers_.begin(), "held a descriptor, and none were left");
  watch(EPOLL_CTL_MOD, options_.listener.get(), kListener, 0);
  listens_again_ = Clock::now() + kPauseWithoutDescriptors;
}

void StoreLoop::serve(uint64_t id, uint32_t events) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return;  // closed since the event
  StorePeer& peer = found->second;
  const bool ended = !(events & EPOLLIN) && events & (EPOLLHUP | EPOLLERR);
  if (ended || (events & EPOLLIN && !read_from(peer))) return close(id);
  if (advance(id, peer) && events & EPOLLOUT) flush(id, peer);
}

// False: the peer is gone. A stranger can't fill our memory: what it may send is a few bytes.
bool StoreLoop::read_from(StorePeer& peer) {
  const size_t most = peer.handshake ? 256 : kReadBytes, had = peer.in.size();
  peer.in.resize(had + most);
  const ssize_t got = recv(peer.socket.get(), peer.in.data() + had, most, 0);
  peer.in.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
}

// Does what the received bytes ask for. False: the peer is closed.
bool StoreLoop::advance(uint64_t id, StorePeer& peer) {
  if (peer.handshake && !shake_hands(id, peer)) return false;
  if (peer.handshake) return true;
  while (!peer.in.empty()) {
    if (peer.waiting || !peer.out.empty()) {
      refuse(id, "asked again without waiting for its answer");
      return false;
    }
    const size_t before = peer.in.size();
    if (!take_request(id, peer)) return false;
    if (peer.in.size() == before) return true;  // the rest is still to come
    if (!flush(id, peer)) return false;
  }
  return true;
}

bool StoreLoop::shake_hands(uint64_t id, StorePeer& peer) {
  peer.handshake->take(peer.in);
  peer.out += peer.handshake->outgoing();
  if (!peer.handshake->problem().empty()) {
    refuse(id, std::string(peer.handshake->problem()));
    return false;
  }
  if (!flush(id, peer)) return false;
  if (!peer.handshake->done()) return true;
  peer.handshake.reset();
  strangers_.erase(id);
  set_deadline(id, peer, std::nullopt);
  return true;
}

bool StoreLoop::take_request(uint64_t id, StorePeer& peer) {
  bool too_long = false;
  const auto text = take_message(peer.in, too_long);
  if (!text && !too_long) return true;
  auto request = too_long ? std::nullopt : decode_request(*text);
  if (!request) {
    refuse(id, too_long ? formatted("sent a message of more than {} bytes", kMostMessage)
                        : "sent a message that isn't of the store");
    return false;
  }
  peer.waiting = std::move(request);
  peer.waits_at = waiters_.end();
  const uint64_t wait_ms = std::min<uint64_t>(peer.waiting->wait_ms, 1ull << 40);
  set_deadline(id, peer, Clock::now() + milliseconds(static_cast<int64_t>(wait_ms)));
  std::optional<std::string> key;
  if (sets_a_key(peer.waiting->call)) key = peer.waiting->fields[0];
  try_to_answer(id, peer);
  if (key) wake_waiters_of(*key);
  return true;
}

// Answers the peer's request, or lets it wait for the first key that isn't there.
void StoreLoop::try_to_answer(uint64_t id, StorePeer& peer) {
  if (const auto answer = table_.answer(*peer.waiting)) {
    stop_waiting(peer);
    set_deadline(id, peer, std::nullopt);
    peer.out += encode(*answer);
    return;
  }
  if (peer.waits_at != waiters_.end()) waiters_.erase(peer.waits_at);
  peer.waits_at = waiters_.emplace(*table_.missing_key(peer.waiting->fields), id);
}

void StoreLoop::stop_waiting(StorePeer& peer) {
  if (!peer.waiting) return;
  if (peer.waits_at != waiters_.end()) waiters_.erase(peer.waits_at);
  peer.waits_at = waiters_.end();
  peer.waiting.reset();
}

void StoreLoop::wake_waiters_of(const std::string& key) {
  std::vector<uint64_t> ids;
  const auto [first, last] = waiters_.equal_range(key);
  for (auto waiter = first; waiter != last; ++waiter) ids.push_back(waiter->second);
  if (ids.empty() || table_.missing_key({key})) return;
  for (const uint64_t id : ids) {
    StorePeer& peer = peers_.at(id);
    try_to_answer(id, peer);
    if (!peer.waiting) flush(id, peer);
  }
}

// Sends what the peer takes; the rest when it takes more. False: the peer is closed.
bool StoreLoop::flush(uint64_t id, StorePeer& peer) {
  while (peer.sent < peer.out.size()) {
    const ssize_t sent = send(peer.socket.get(), peer.out.data() + peer.sent,
                              peer.out.size() - peer.sent, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) break;
    if (sent < 0) {
      close(id);
      return false;
    }
    peer.sent += static_cast<size_t>(sent);
  }
  const bool left = peer.sent < peer.out.size();
  if (!left) {
    peer.out.clear();
    peer.sent = 0;
  }
  if (left != peer.writable_wanted) {
    peer.writable_wanted = left;
    watch(EPOLL_CTL_MOD, peer.socket.get(), id, left ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }
  return true;
}

void StoreLoop::set_deadline(uint64_t id, StorePeer& peer, std::optional<Clock::time_point> when) {
  if (peer.deadline) deadlines_.erase({*peer.deadline, id});
  peer.deadline = when;
  if (when) deadlines_.insert({*when, id});
}

void StoreLoop::pass_deadlines() {
  const auto now = Clock::now();
  if (listens_again_ && *listens_again_ <= now) {
    listens_again_.reset();
    watch(EPOLL_CTL_MOD, options_.listener.get(), kListener, EPOLLIN);
  }
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const uint64_t id = deadlines_.begin()->second;
    StorePeer& peer = peers_.at(id);
    if (peer.handshake) {
      refuse(id, formatted("said nothing for {} s", options_.patience.count() / 1000));
      continue;
    }
    stop_waiting(peer);
    set_deadline(id, peer, std::nullopt);
    peer.out += encode(StoreAnswer{StoreAnswer::kTimeout, {}});
    flush(id, peer);
  }
}

void StoreLoop::refuse(uint64_t id, const std::string& why) {
  refusals_.add(peers_.at(id).name, why);
  close(id);
}

void StoreLoop::close(uint64_t id) {
  StorePeer& peer = peers_.at(id);
  stop_waiting(peer);
  set_deadline(id, peer, std::nullopt);
  strangers_.erase(id);
  // A child of this process may have a copy of the descriptor, so closing it wouldn't be enough.
  watch(EPOLL_CTL_DEL, peer.socket.get(), id, 0);
  shutdown(peer.socket.get(), SHUT_RDWR);
  peers_.erase(id);
}

}  // namespace

StoreServer::StoreServer(StoreServerOptions options)
    : stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_)
    throw Error(formatted("the store can't be started: {}.", std::strerror(errno)),
                "raise the limit on descriptors (ulimit -n).");
  // The process's signals are for its other threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([options = std::move(options), stop = stop_.get()]() mutable {
    pthread_setname_np(pthread_self(), "fsdp store");
    try {
      StoreLoop(std::move(options), stop).run();
    } catch (const std::exception& failure) {  // out of memory: the others see that it is gone
      log::error(failure);
    }
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

StoreServer::~StoreServer() {
  eventfd_write(stop_.get(), 1);
  thread_.join();  // Ends: its loop sees the event, and nothing in it blocks
}

}  // namespace fsdp::comm
