// TCP between launchers: ports, and a connection that carries JSON objects, one a line.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "launch/processes.h"

namespace fsdp::launch {

// A TCP port of this machine that nobody uses right now.
int free_port();

// Throws when `port` is taken on this machine; `what` says whose it should be.
void check_port_is_free(int port, const std::string& what);

// A socket that accepts connections on `port` of all addresses; throws when it is taken.
FileDescriptor listen_on(int port, const std::string& what);

class Connection {
 public:
  Connection() = default;
  // `socket` is connected. The system is told to notice within half a minute when the other machine
  // is gone without a word.
  Connection(FileDescriptor socket, std::string peer);

  // Tries once, for at most `seconds`; on failure `problem` says why.
  static std::optional<Connection> open(const std::string& host, int port, double seconds,
                                        std::string& problem);
  static std::optional<Connection> accept(const FileDescriptor& listener);

  // A peer that takes nothing for some seconds, or is gone, is not waited for: the connection
  // closes, as it does in receive().
  void send(const nlohmann::json& message);

  // Reads what is there, without blocking. Closes at the end of the stream, or when the peer sends
  // what is not ours.
  void receive();
  std::optional<nlohmann::json> next();  // a received message; those before the end come first

  void close() { socket_.close(); }
  bool is_open() const { return static_cast<bool>(socket_); }
  int fd() const { return socket_.get(); }
  const std::string& peer() const { return peer_; }  // its address, for people

 private:
  static constexpr size_t kLongest = 1 << 20;  // bytes of a message
  FileDescriptor socket_;
  std::string peer_;
  std::string received_;
};

}  // namespace fsdp::launch
