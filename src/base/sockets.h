// Sockets between the processes of a run: TCP between hosts, and Unix sockets between processes of
// one user on one host. Nothing here looks up the name of a peer, which can take many seconds.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"
#include "base/namespace.h"

namespace fsdp::sockets {

using Deadline = std::chrono::steady_clock::time_point;

// All descriptors are non-blocking and close on exec. Those that may be empty are if the call
// failed; `problem` then has the errno, or a text.

// Bound to `port` (0: a free one) of all addresses, IPv6 and IPv4 if the machine has both, but not
// listening. While it is open, the system gives the port to nobody who asks for a free one; a
// program that names it and sets SO_REUSEADDR can still listen on it.
FileDescriptor bind_tcp(int port, int& problem);
int port_of(const FileDescriptor& socket);

// Tries every address of `host` once.
FileDescriptor connect_tcp(const std::string& host, int port, Deadline deadline,
                           std::string& problem);
std::string peer_of(const FileDescriptor& socket);  // its address, in digits
// The address of this machine, in digits, from which it would reach `host`; "": it can't.
std::string own_address_towards(const std::string& host);
void keep_alive(const FileDescriptor& socket);  // notices within half a minute if a host is gone

// `name` is in Linux's abstract namespace: it is no file, and the kernel forgets it with the
// process. Processes see each other's only in one network namespace.
FileDescriptor listen_unix(const std::string& name, int& problem);
FileDescriptor connect_unix(const std::string& name, int& problem);

// The process at the other end: of a listener it is the one that began to listen.
struct Owner {
  int pid = 0;
  unsigned user = 0;
};
Owner owner_of(const FileDescriptor& unix_socket);

struct Accepted {
  FileDescriptor socket;
  std::string peer;  // its address, in digits; "" for a Unix socket
};
Accepted accept_from(const FileDescriptor& listener, int& problem);

// Waits until the socket can be read or written; false at the deadline.
bool await_readable(const FileDescriptor& socket, Deadline deadline);
bool await_writable(const FileDescriptor& socket, Deadline deadline);

// Sends all bytes; 0 or an errno (ETIMEDOUT at the deadline). Never raises SIGPIPE.
int send_all(const FileDescriptor& socket, std::string_view bytes, Deadline deadline);
// Appends what has arrived, at most `most` bytes, after waiting for the first of them; 0 or an
// errno (ETIMEDOUT at the deadline, ECONNRESET at the end of the stream).
int receive_some(const FileDescriptor& socket, std::string& into, size_t most, Deadline deadline);

}  // namespace fsdp::sockets
