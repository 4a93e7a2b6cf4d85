#include "base/trusted_stream.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <list>
#include <utility>
#include <vector>

#include "base/format.h"
#include "base/handshake.h"
#include "base/refusals.h"
#include "base/sockets.h"
#include "fsdp/error.h"

namespace fsdp::base {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kMostStrangers = 64;
constexpr std::chrono::seconds kStrangerTime{5};  // to prove the secret
constexpr size_t kMostOfStranger = 256;           // bytes at a time; a handshake has fewer
constexpr size_t kPiece = 1 << 20;
constexpr size_t kLongestMessage = 1 << 20;
constexpr milliseconds kBetweenTries{50};

// Waits until one of `waiting` is ready, or the time. The first is the stop's.
bool poll_until(std::vector<pollfd>& waiting, Clock::time_point until) {
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
    const int ready = poll(waiting.data(), waiting.size(),
                           static_cast<int>(std::clamp<int64_t>(left, 0, 60'000)));
    if (waiting[0].revents != 0) throw Stopped{};
    if (ready > 0) return true;
    if (ready == 0 && left <= 60'000) return false;
  }
}

void pause(const StreamTerms& terms, milliseconds time) {
  std::vector<pollfd> waiting = {{terms.stop.fd(), POLLIN, 0}};
  poll_until(waiting, Clock::now() + time);
}

[[noreturn]] void fail(const std::string& peer, const std::string& what) {
  throw Error(formatted("the connection to the host at {} {}.", peer, what),
              "see whether that host and the network between the hosts are up.");
}

// Who has connected and hasn't proven the secret yet.
struct Stranger {
  FileDescriptor socket;
  std::string peer;
  Handshake handshake;
  std::string received = {};
  Clock::time_point until = Clock::now() + kStrangerTime;
};

// Takes what has arrived, without waiting. "", or why the stranger is refused.
std::string hear(Stranger& stranger) {
  const int problem =
      sockets::receive_some(stranger.socket, stranger.received, kMostOfStranger, Clock::now());
  if (problem == ECONNRESET) return "closed the connection";
  if (problem != 0 && problem != ETIMEDOUT) return std::strerror(problem);
  stranger.handshake.take(stranger.received);
  if (!stranger.handshake.problem().empty()) return stranger.handshake.problem();
  if (sockets::send_all(stranger.socket, stranger.handshake.outgoing(), Clock::now()) != 0)
    return "takes no answer";
  return "";
}

void accept_one(const FileDescriptor& listener, const StreamTerms& terms,
                std::list<Stranger>& strangers) {
  int problem = 0;
  auto accepted = sockets::accept_from(listener, problem);
  if (strangers.size() >= kMostStrangers || (!accepted.socket && !strangers.empty()))
    strangers.pop_front();  // the oldest makes room
  if (accepted.socket)
    strangers.push_back({std::move(accepted.socket), accepted.peer,
                         Handshake(Handshake::Role::kListener, terms.secret, terms.context)});
  else if (problem != EAGAIN)
    pause(terms, kBetweenTries);  // no descriptor is left
}

}  // namespace

StopEvent::StopEvent() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_)
    throw Error(formatted("can't make an event: eventfd: {}.", std::strerror(errno)),
                "raise the limit on descriptors (ulimit -n).");
}

void StopEvent::set() noexcept {
  eventfd_write(event_.get(), 1);
}

bool StopEvent::is_set() const {
  pollfd state{event_.get(), POLLIN, 0};
  return poll(&state, 1, 0) > 0;
}

TrustedStream::TrustedStream(FileDescriptor socket, std::string received, const StreamTerms& terms)
    : socket_(std::move(socket)),
      peer_(sockets::peer_of(socket_)),
      received_(std::move(received)),
      terms_(terms) {}

TrustedStream TrustedStream::accept(const FileDescriptor& listener, const StreamTerms& terms) {
  std::list<Stranger> strangers;  // the oldest first
  Refusals refusals("a host that wants to send copies");
  for (;;) {
    std::vector<pollfd> waiting = {{terms.stop.fd(), POLLIN, 0}, {listener.get(), POLLIN, 0}};
    for (const auto& stranger : strangers) waiting.push_back({stranger.socket.get(), POLLIN, 0});
    poll_until(waiting, strangers.empty() ? Clock::now() + kStrangerTime : strangers.front().until);
    auto ready = waiting.begin() + 2;
    for (auto one = strangers.begin(); one != strangers.end(); ++ready) {
      std::string problem = ready->revents != 0 ? hear(*one) : "";
      if (one->handshake.done())
        return {std::move(one->socket), std::move(one->received), terms};
      if (problem.empty() && Clock::now() >= one->until) problem = "said nothing";
      if (!problem.empty()) refusals.add(one->peer, problem);
      one = problem.empty() ? std::next(one) : strangers.erase(one);
    }
    if (waiting[1].revents != 0) accept_one(listener, terms, strangers);
  }
}

TrustedStream TrustedStream::connect(const std::string& host, int port, const StreamTerms& terms) {
  const auto until = Clock::now() + terms.limit;
  std::string problem;
  do {
    FileDescriptor socket = sockets::connect_tcp(host, port, until, problem);
    Handshake handshake(Handshake::Role::kCaller, terms.secret, terms.context);
    TrustedStream stream(std::move(socket), "", terms);
    try {
      while (stream.socket_) {
        stream.send(handshake.outgoing());
        if (handshake.done()) return stream;
        stream.receive_text(/*patience=*/false);
        handshake.take(stream.received_);
        if (handshake.problem().empty()) continue;
        problem = "what listens there " + handshake.problem();
        break;
      }
    } catch (const Error& error) {
      problem = error.message();
    }
    pause(terms, kBetweenTries);
  } while (Clock::now() < until);
  fail(formatted("{}:{}", host, port), "couldn't be made: " + problem);
}

void TrustedStream::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const std::string_view piece = bytes.substr(0, kPiece);
    std::vector<pollfd> waiting = {{terms_.stop.fd(), POLLIN, 0}, {socket_.get(), POLLOUT, 0}};
    if (!poll_until(waiting, Clock::now() + terms_.limit)) fail(peer_, "takes no more data");
    const ssize_t sent = ::send(socket_.get(), piece.data(), piece.size(), MSG_NOSIGNAL);
    if (sent > 0)
      bytes.remove_prefix(static_cast<size_t>(sent));
    else if (errno != EAGAIN && errno != EINTR)
      fail(peer_, formatted("failed: {}", std::strerror(errno)));
  }
}

void TrustedStream::await_bytes(bool patience) {
  std::vector<pollfd> waiting = {{terms_.stop.fd(), POLLIN, 0}, {socket_.get(), POLLIN, 0}};
  while (!poll_until(waiting, Clock::now() + terms_.limit))
    if (!patience) fail(peer_, "is silent");
}

size_t TrustedStream::read(char* into, size_t most) {
  const ssize_t got = recv(socket_.get(), into, most, 0);
  if (got == 0) fail(peer_, "was closed");
  if (got < 0 && errno != EAGAIN && errno != EINTR)
    fail(peer_, formatted("failed: {}", std::strerror(errno)));
  return static_cast<size_t>(std::max<ssize_t>(got, 0));
}

void TrustedStream::receive_text(bool patience) {
  char text[4096];
  await_bytes(patience);
  received_.append(text, read(text, sizeof text));
}

std::string TrustedStream::line(bool patience) {
  size_t end;
  while ((end = received_.find('\n')) == std::string::npos) {
    if (received_.size() > kLongestMessage) fail(peer_, "carries a line that doesn't end");
    receive_text(patience);
  }
  std::string line = received_.substr(0, end);
  received_.erase(0, end + 1);
  return line;
}

void TrustedStream::receive(int64_t size, const std::function<void(const char*, size_t)>& use) {
  const auto here = static_cast<size_t>(
      std::min<int64_t>(size, static_cast<int64_t>(received_.size())));
  use(received_.data(), here);
  received_.erase(0, here);
  size -= static_cast<int64_t>(here);
  std::vector<char> piece(static_cast<size_t>(std::min<int64_t>(size, kPiece)));
  while (size > 0) {
    await_bytes(/*patience=*/false);
    const size_t most = static_cast<size_t>(std::min<int64_t>(size, kPiece));
    const size_t got = read(piece.data(), most);
    use(piece.data(), got);
    size -= static_cast<int64_t>(got);
  }
}

}  // namespace fsdp::base
