#include "launch/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/format.h"
#include "base/sockets.h"
#include "fsdp/error.h"

namespace fsdp::launch {
namespace {

constexpr std::chrono::seconds kSend{5};
constexpr int kReads = 64;
constexpr size_t kMostOfStranger = 256;  // bytes at a time; a handshake has fewer

[[noreturn]] void fail_port(int port, const std::string& what, int problem) {
  throw Error(formatted("port {} ({}) can't be used on this machine: {}.", port, what,
                        std::strerror(problem)),
              problem == EACCES
                  ? "ports below 1024 need privileges; choose a higher one."
                  : "another run may be using it: ss -ltnp shows who listens. Choose another "
                    "port. On one node, without --master, the launcher finds a free one.");
}

FileDescriptor bound(int port, const std::string& what) {
  int problem = 0;
  FileDescriptor socket = sockets::bind_tcp(port, problem);
  if (!socket) fail_port(port, what, problem);
  return socket;
}

}  // namespace

HeldPort::HeldPort(int port, const std::string& what) {
  // Two sockets can bind while neither listens; only listen() tells whether another does.
  if (port != 0) listen_on(port, what);
  socket_ = bound(port, what);
  number_ = sockets::port_of(socket_);
}

FileDescriptor listen_on(int port, const std::string& what) {
  FileDescriptor socket = bound(port, what);
  if (listen(socket.get(), 128) != 0) fail_port(port, what, errno);
  return socket;
}

Connection::Connection(FileDescriptor socket, std::string peer, Handshake::Role role,
                       const std::string& secret)
    : socket_(std::move(socket)),
      peer_(std::move(peer)),
      handshake_(std::make_unique<Handshake>(role, secret, "launchers")) {
  send_all(handshake_->outgoing());
}

std::optional<Connection> Connection::open(const std::string& host, int port, double seconds,
                                           const std::string& secret, std::string& problem) {
  const auto limit = std::chrono::duration<double>(seconds);
  FileDescriptor socket = sockets::connect_tcp(
      host, port,
      std::chrono::steady_clock::now() +
          std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit),
      problem);
  if (!socket) return std::nullopt;
  std::string peer = sockets::peer_of(socket);
  return Connection(std::move(socket), std::move(peer), Handshake::Role::kCaller, secret);
}

std::optional<Connection> Connection::accept(const FileDescriptor& listener,
                                             const std::string& secret) {
  int problem = 0;
  auto [socket, peer] = sockets::accept_from(listener, problem);
  if (!socket) return std::nullopt;
  return Connection(std::move(socket), std::move(peer), Handshake::Role::kListener, secret);
}

void Connection::send_all(std::string_view bytes) {
  const auto deadline = std::chrono::steady_clock::now() + kSend;
  // After another problem, receive() first reads what the peer sent before it left, then closes.
  if (is_open() && sockets::send_all(socket_, bytes, deadline) == ETIMEDOUT) socket_.close();
}

void Connection::send_line(std::string line) {
  send_all(line += '\n');
}

void Connection::receive() {
  char buffer[16 * 1024];
  // Returns now and then although more has come: poll() tells again, and others have their turn.
  for (int reads = 0; is_open() && reads < kReads; ++reads) {
    const size_t most = handshake_ ? kMostOfStranger : sizeof buffer;
    const ssize_t got = recv(fd(), buffer, most, 0);
    if (got > 0) {
      last_heard_ = std::chrono::steady_clock::now();
      received_.append(buffer, static_cast<size_t>(got));
      if (handshake_) shake_hands();
      if (received_.size() > kLongest && received_.find('\n') == std::string::npos) {
        problem_ = formatted("sent a message of more than {} bytes", kLongest);
        socket_.close();
      }
    } else if (got < 0 && errno == EINTR) {
      continue;
    } else if (got < 0 && errno == EAGAIN) {
      return;
    } else {
      socket_.close();
    }
  }
}

void Connection::close(const std::string& problem) {
  problem_ = problem;
  socket_.close();
}

void Connection::shake_hands() {
  handshake_->take(received_);
  send_all(handshake_->outgoing());
  problem_ = handshake_->problem();
  if (!problem_.empty()) socket_.close();
  if (handshake_->done()) handshake_.reset();
}

std::optional<Message> Connection::next() {
  const size_t end = handshake_ ? std::string::npos : received_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  const std::string line = received_.substr(0, end);
  received_.erase(0, end + 1);
  try {
    return decode(line);
  } catch (const Error& error) {
    problem_ = "broke the protocol: " + error.message();
    problem_.pop_back();  // its full stop
    received_.clear();
    socket_.close();
    return std::nullopt;
  }
}

}  // namespace fsdp::launch
