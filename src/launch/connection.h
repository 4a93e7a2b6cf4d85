// TCP between launchers: ports, and a connection that carries messages, one per line, once both
// sides have proven the run's secret.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/handshake.h"
#include "launch/messages.h"
#include "launch/processes.h"

namespace fsdp::launch {

// A TCP port that is held for a program of ours: while this lives, the system gives it to nobody
// who asks for a free one, and a program that sets SO_REUSEADDR can listen on it.
class HeldPort {
 public:
  // `port` 0: any free one. Throws if it is taken; `what` says in the error what the port is for.
  HeldPort(int port, const std::string& what);
  int number() const { return number_; }

 private:
  FileDescriptor socket_;
  int number_ = 0;
};

// A socket that accepts connections on `port` of all addresses; throws if the port is taken.
FileDescriptor listen_on(int port, const std::string& what);

class Connection {
 public:
  Connection() = default;
  // `socket` is connected. `secret` is the run's, "" if it has none.
  Connection(FileDescriptor socket, std::string peer, Handshake::Role role,
             const std::string& secret);

  // Tries once, for at most `seconds`; on failure `problem` has the reason. The other side hasn't
  // proven anything yet.
  static std::optional<Connection> open(const std::string& host, int port, double seconds,
                                        const std::string& secret, std::string& problem);
  static std::optional<Connection> accept(const FileDescriptor& listener,
                                          const std::string& secret);

  // Whether the other side knows the secret. Until then it can make receive() read a few bytes, and
  // nothing else.
  bool is_trusted() const { return !handshake_; }

  // Closes the connection if the peer accepts nothing for some seconds or is gone.
  void send(const Message& message) { send_line(encode(message)); }
  void send_line(std::string line);

  // Reads what has arrived, without blocking. Closes the connection at the end of the stream or if
  // the peer doesn't follow the protocol; problem() then says why, if the peer is to blame.
  void receive();
  // The oldest received message; also works after the connection closed. Closes it if the message
  // can't be read.
  std::optional<Message> next();
  const std::string& problem() const { return problem_; }

  // When the last bytes arrived.
  std::chrono::steady_clock::time_point last_heard() const { return last_heard_; }

  void close() { socket_.close(); }
  void close(const std::string& problem);
  bool is_open() const { return static_cast<bool>(socket_); }
  int fd() const { return socket_.get(); }
  const std::string& peer() const { return peer_; }  // its address, for messages

 private:
  static constexpr size_t kLongest = 1 << 20;  // bytes per message
  void send_all(std::string_view bytes);
  void shake_hands();

  FileDescriptor socket_;
  std::string peer_;
  std::unique_ptr<Handshake> handshake_;  // until it is done
  std::string received_;
  std::string problem_;
  std::chrono::steady_clock::time_point last_heard_ = std::chrono::steady_clock::now();
};

}  // namespace fsdp::launch
