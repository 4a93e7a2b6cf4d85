#include "launch/connection.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::launch {
namespace {

void set_option(int fd, int level, int name, int value) {
  setsockopt(fd, level, name, &value, sizeof value);
}

// Binds to `port` of all addresses, IPv6 and IPv4 if the machine has both. Returns 0 or an errno.
int bind_everywhere(int port, FileDescriptor& socket_out) {
  int problem = 0;
  for (int family : {AF_INET6, AF_INET}) {
    FileDescriptor fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) {
      problem = errno;
      continue;
    }
    set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);  // don't wait for old connections to expire
    sockaddr_storage address = {};
    socklen_t size;
    if (family == AF_INET6) {
      set_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
      auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
      v6.sin6_family = AF_INET6;
      v6.sin6_addr = in6addr_any;
      v6.sin6_port = htons(static_cast<uint16_t>(port));
      size = sizeof v6;
    } else {
      auto& v4 = reinterpret_cast<sockaddr_in&>(address);
      v4.sin_family = AF_INET;
      v4.sin_addr.s_addr = htonl(INADDR_ANY);
      v4.sin_port = htons(static_cast<uint16_t>(port));
      size = sizeof v4;
    }
    if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0) {
      socket_out = std::move(fd);
      return 0;
    }
    problem = errno;
    if (problem == EADDRINUSE || problem == EACCES) break;  // IPv4 would fail alike
  }
  return problem;
}

[[noreturn]] void fail_port(int port, const std::string& what, int problem) {
  throw Error(formatted("port {} ({}) can't be used on this machine: {}.", port, what,
                        std::strerror(problem)),
              problem == EACCES
                  ? "ports below 1024 need privileges; choose a higher one."
                  : "another run may be using it: ss -ltnp shows who listens. Choose another "
                    "port. On one node, without --master, the launcher finds a free one.");
}

std::string name_of(const sockaddr* address, socklen_t size) {
  char host[NI_MAXHOST] = "?";
  getnameinfo(address, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  std::string name = host;
  return name.starts_with("::ffff:") ? name.substr(7) : name;
}

// Connects within `milliseconds`; 0 or an errno.
int connect_within(int fd, const addrinfo& address, int milliseconds) {
  if (connect(fd, address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd ready{fd, POLLOUT, 0};
  if (poll(&ready, 1, milliseconds) <= 0) return ETIMEDOUT;
  int problem = 0;
  socklen_t size = sizeof problem;
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &problem, &size);
  return problem;
}

}  // namespace

int free_port() {
  FileDescriptor fd;
  if (int problem = bind_everywhere(0, fd)) fail_port(0, "any free port", problem);
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
  // Both families store the port at the same offset.
  return ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
}

void check_port_is_free(int port, const std::string& what) {
  listen_on(port, what);
}

FileDescriptor listen_on(int port, const std::string& what) {
  FileDescriptor fd;
  if (int problem = bind_everywhere(port, fd)) fail_port(port, what, problem);
  // With SO_REUSEADDR two sockets can bind while neither listens; the second listen() fails.
  if (listen(fd.get(), 128) != 0) fail_port(port, what, errno);
  return fd;
}

Connection::Connection(FileDescriptor socket, std::string peer)
    : socket_(std::move(socket)), peer_(std::move(peer)) {
  set_option(fd(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd(), IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(fd(), IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(fd(), IPPROTO_TCP, TCP_KEEPCNT, 4);
  set_option(fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);
  set_option(fd(), IPPROTO_TCP, TCP_NODELAY, 1);
}

std::optional<Connection> Connection::open(const std::string& host, int port, double seconds,
                                           std::string& problem) {
  addrinfo wanted = {};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  int why = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &list);
  if (why != 0) {
    problem = gai_strerror(why);
    return std::nullopt;
  }
  std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(list, freeaddrinfo);
  for (const addrinfo* address = list; address; address = address->ai_next) {
    FileDescriptor fd(socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int failed = fd ? connect_within(fd.get(), *address, static_cast<int>(seconds * 1000)) : errno;
    if (failed == 0)
      return Connection(std::move(fd), name_of(address->ai_addr, address->ai_addrlen));
    problem = std::strerror(failed);
  }
  return std::nullopt;
}

std::optional<Connection> Connection::accept(const FileDescriptor& listener) {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  FileDescriptor fd(accept4(listener.get(), where, &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd) return std::nullopt;
  return Connection(std::move(fd), name_of(where, size));
}

void Connection::send_line(std::string line) {
  line += '\n';
  size_t done = 0;
  while (is_open() && done < line.size()) {
    ssize_t sent = ::send(fd(), line.data() + done, line.size() - done, MSG_NOSIGNAL);
    if (sent >= 0) {
      done += sent;
    } else if (errno == EAGAIN) {
      pollfd ready{fd(), POLLOUT, 0};
      if (poll(&ready, 1, 5000) <= 0) socket_.close();
    } else if (errno != EINTR) {
      return;  // receive() first reads what the peer sent before it left, then closes
    }
  }
}

void Connection::receive() {
  char buffer[16 * 1024];
  while (is_open()) {
    ssize_t got = recv(fd(), buffer, sizeof buffer, 0);
    if (got > 0) {
      received_.append(buffer, got);
      if (received_.size() > kLongest && received_.find('\n') == std::string::npos) socket_.close();
    } else if (got < 0 && errno == EINTR) {
      continue;
    } else if (got < 0 && errno == EAGAIN) {
      return;
    } else {
      socket_.close();
    }
  }
}

std::optional<Message> Connection::next() {
  const size_t end = received_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  const std::string line = received_.substr(0, end);
  received_.erase(0, end + 1);
  try {
    return decode(line);
  } catch (const Error& error) {
    problem_ = error.message();
    problem_.pop_back();  // its full stop
    received_.clear();
    socket_.close();
    return std::nullopt;
  }
}

}  // namespace fsdp::launch
