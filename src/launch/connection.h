// TCP between launchers: ports, and a connection that carries messages, one per line.
#pragma once

#include <optional>
#include <string>

#include "launch/messages.h"
#include "launch/processes.h"

namespace fsdp::launch {

// A TCP port of this machine that is free right now.
int free_port();

// Throws if `port` is taken on this machine; `what` says in the error what the port is for.
void check_port_is_free(int port, const std::string& what);

// A socket that accepts connections on `port` of all addresses; throws if the port is taken.
FileDescriptor listen_on(int port, const std::string& what);

class Connection {
 public:
  Connection() = default;
  // `socket` is connected. Sets the keep-alive so that the system notices within half a minute if
  // the other machine disappears.
  Connection(FileDescriptor socket, std::string peer);

  // Tries once, for at most `seconds`; on failure `problem` has the reason.
  static std::optional<Connection> open(const std::string& host, int port, double seconds,
                                        std::string& problem);
  static std::optional<Connection> accept(const FileDescriptor& listener);

  // Closes the connection if the peer accepts nothing for some seconds or is gone.
  void send(const Message& message) { send_line(encode(message)); }
  void send_line(std::string line);

  // Reads what has arrived, without blocking. Closes the connection at the end of the stream or if
  // the peer doesn't follow the protocol.
  void receive();
  // The oldest received message; also works after the connection closed. Closes it if the message
  // can't be read; problem() then says why.
  std::optional<Message> next();
  const std::string& problem() const { return problem_; }

  void close() { socket_.close(); }
  bool is_open() const { return static_cast<bool>(socket_); }
  int fd() const { return socket_.get(); }
  const std::string& peer() const { return peer_; }  // its address, for messages

 private:
  static constexpr size_t kLongest = 1 << 20;  // bytes per message
  FileDescriptor socket_;
  std::string peer_;
  std::string received_;
  std::string problem_;
};

}  // namespace fsdp::launch
