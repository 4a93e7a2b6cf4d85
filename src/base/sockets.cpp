#include "base/sockets.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

namespace fsdp::sockets {
namespace {

constexpr int kBacklog = 4096;                  // the system's own limit may be lower
constexpr std::chrono::seconds kPerAddress{2};  // then a host's next one is tried

void set_option(const FileDescriptor& socket, int level, int name, int value) {
  setsockopt(socket.get(), level, name, &value, sizeof value);
}

FileDescriptor new_socket(int family) {
  return FileDescriptor(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

bool await(const FileDescriptor& socket, short events, Deadline deadline) {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd waiting{socket.get(), events, 0};
    const int most = 1000 * 1000;  // milliseconds; a deadline may be further away than an int
    const int ready =
        poll(&waiting, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, most)));
    if (ready > 0) return true;
    if (ready == 0 && left.count() <= most) return false;
    if (ready < 0 && errno != EINTR) return true;  // the call that follows reports it
  }
}

std::string name_of(const sockaddr* address, socklen_t size) {
  char host[NI_MAXHOST] = "?";
  getnameinfo(address, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  std::string name = host;
  return name.starts_with("::ffff:") ? name.substr(7) : name;
}

// 0 or an errno.
int connect_before(const FileDescriptor& socket, const sockaddr* address, socklen_t size,
                   Deadline deadline) {
  if (connect(socket.get(), address, size) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  if (!await_writable(socket, deadline)) return ETIMEDOUT;
  int problem = 0;
  socklen_t length = sizeof problem;
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &problem, &length);
  return problem;
}

struct UnixAddress {
  sockaddr_un address = {};
  socklen_t size = 0;
};

UnixAddress unix_address(const std::string& name) {
  UnixAddress made;
  made.address.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof made.address.sun_path - 1);
  std::memcpy(made.address.sun_path + 1, name.data(), length);  // it begins with a zero
  made.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return made;
}

}  // namespace

FileDescriptor bind_tcp(int port, int& problem) {
  for (const int family : {AF_INET6, AF_INET}) {
    FileDescriptor socket = new_socket(family);
    if (!socket) {
      problem = errno;
      continue;
    }
    set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);  // don't wait for old connections to expire
    sockaddr_storage address = {};
    socklen_t size;
    if (family == AF_INET6) {
      set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);
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
    if (bind(socket.get(), reinterpret_cast<sockaddr*>(&address), size) == 0) return socket;
    problem = errno;
    if (problem == EADDRINUSE || problem == EACCES) break;  // IPv4 would fail alike
  }
  return {};
}

int port_of(const FileDescriptor& socket) {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  // Both families store the port at the same offset.
  return ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
}

FileDescriptor connect_tcp(const std::string& host, int port, Deadline deadline,
                           std::string& problem) {
  addrinfo wanted = {};
  wanted.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const char* node = host == "localhost" ? nullptr : host.c_str();  // null: this host, no look-up
  const int why = getaddrinfo(node, std::to_string(port).c_str(), &wanted, &list);
  if (why != 0) {
    problem = gai_strerror(why);
    return {};
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(list, freeaddrinfo);
  for (const addrinfo* address = list; address; address = address->ai_next) {
    FileDescriptor socket = new_socket(address->ai_family);
    const Deadline limit = std::min(deadline, std::chrono::steady_clock::now() + kPerAddress);
    const int failed =
        socket ? connect_before(socket, address->ai_addr, address->ai_addrlen, limit) : errno;
    if (failed == 0) {
      keep_alive(socket);
      return socket;
    }
    problem = std::strerror(failed);
  }
  return {};
}

std::string peer_of(const FileDescriptor& socket) {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  return getpeername(socket.get(), where, &size) == 0 ? name_of(where, size) : "?";
}

// Connecting a datagram socket sends nothing: it only chooses the route.
std::string own_address_towards(const std::string& host) {
  addrinfo wanted = {};
  wanted.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(host.c_str(), "9", &wanted, &list) != 0) return "";
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(list, freeaddrinfo);
  for (const addrinfo* there = list; there; there = there->ai_next) {
    const FileDescriptor socket(::socket(there->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage address = {};
    socklen_t size = sizeof address;
    auto* own = reinterpret_cast<sockaddr*>(&address);
    if (socket && connect(socket.get(), there->ai_addr, there->ai_addrlen) == 0 &&
        getsockname(socket.get(), own, &size) == 0)
      return name_of(own, size);
  }
  return "";
}

void keep_alive(const FileDescriptor& socket) {
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 4);
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
}

FileDescriptor listen_unix(const std::string& name, int& problem) {
  FileDescriptor socket = new_socket(AF_UNIX);
  const UnixAddress at = unix_address(name);
  if (socket && bind(socket.get(), reinterpret_cast<const sockaddr*>(&at.address), at.size) == 0 &&
      listen(socket.get(), kBacklog) == 0)
    return socket;
  problem = errno;
  return {};
}

FileDescriptor connect_unix(const std::string& name, int& problem) {
  FileDescriptor socket = new_socket(AF_UNIX);
  const UnixAddress at = unix_address(name);
  if (socket && connect(socket.get(), reinterpret_cast<const sockaddr*>(&at.address), at.size) == 0)
    return socket;
  problem = errno;
  return {};
}

Owner owner_of(const FileDescriptor& unix_socket) {
  ucred known = {};
  socklen_t size = sizeof known;
  if (getsockopt(unix_socket.get(), SOL_SOCKET, SO_PEERCRED, &known, &size) != 0)
    return {0, static_cast<unsigned>(-1)};
  return {known.pid, known.uid};
}

Accepted accept_from(const FileDescriptor& listener, int& problem) {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  Accepted accepted;
  accepted.socket =
      FileDescriptor(accept4(listener.get(), where, &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!accepted.socket) {
    problem = errno;
  } else if (address.ss_family != AF_UNIX) {
    keep_alive(accepted.socket);
    accepted.peer = name_of(where, size);
  }
  return accepted;
}

bool await_readable(const FileDescriptor& socket, Deadline deadline) {
  return await(socket, POLLIN, deadline);
}

bool await_writable(const FileDescriptor& socket, Deadline deadline) {
  return await(socket, POLLOUT, deadline);
}

int send_all(const FileDescriptor& socket, std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0)
      bytes.remove_prefix(static_cast<size_t>(sent));
    else if (errno == EAGAIN) {
      if (!await_writable(socket, deadline)) return ETIMEDOUT;
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

int receive_some(const FileDescriptor& socket, std::string& into, size_t most, Deadline deadline) {
  const size_t had = into.size();
  into.resize(had + most);
  int problem = 0;
  ssize_t got = -1;
  while (got < 0 && problem == 0) {
    got = recv(socket.get(), into.data() + had, most, 0);
    if (got == 0) problem = ECONNRESET;
    if (got >= 0 || errno == EINTR) continue;
    problem = errno;
    if (problem == EAGAIN) problem = await_readable(socket, deadline) ? 0 : ETIMEDOUT;
  }
  into.resize(had + static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return problem;
}

}  // namespace fsdp::sockets
