// A store in this process for tests, its clients, and raw connections to it.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/handshake.h"
#include "base/secret.h"
#include "base/sha256.h"
#include "base/sockets.h"
#include "comm/store_client.h"
#include "comm/store_server.h"

namespace fsdp::comm {

enum class Transport { kUnix, kTcp };

inline sockets::Deadline in_a_minute() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(1);
}

inline FileDescriptor listen_for_test(Transport transport, StoreAddress& address) {
  int problem = 0;
  FileDescriptor listener;
  if (transport == Transport::kUnix) {
    address.unix_name = "fsdp-test-" + to_hex(secret::random_bytes(16));
    listener = sockets::listen_unix(address.unix_name, problem);
  } else {
    listener = sockets::bind_tcp(0, problem);
    EXPECT_EQ(listen(listener.get(), 64), 0);
    address.host = "localhost";
    address.port = sockets::port_of(listener);
  }
  EXPECT_TRUE(listener) << problem;
  return listener;
}

class StoreForTest {
 public:
  StoreForTest(Transport transport, const std::string& secret,
               std::chrono::milliseconds patience = std::chrono::seconds(60)) {
    address_.secret = secret;
    address_.context = "a test";
    StoreServerOptions options;
    options.listener = listen_for_test(transport, address_);
    options.one_user = transport == Transport::kUnix;
    options.secret = secret;
    options.context = address_.context;
    options.ranks = 2;
    options.patience = patience;
    server_ = std::make_shared<StoreServer>(std::move(options));
  }

  const StoreAddress& address() const { return address_; }
  c10::intrusive_ptr<StoreClient> client() const {
    return StoreClient::connect(address_, nullptr, 1, std::chrono::minutes(1));
  }
  void end() { server_.reset(); }

  // Connected, and nothing said yet.
  FileDescriptor stranger() const {
    std::string why;
    int problem = 0;
    FileDescriptor socket =
        address_.unix_name.empty()
            ? sockets::connect_tcp(address_.host, address_.port, in_a_minute(), why)
            : sockets::connect_unix(address_.unix_name, problem);
    EXPECT_TRUE(socket) << why << problem;
    return socket;
  }

  // A connection that has proven the secret.
  FileDescriptor insider() const {
    FileDescriptor socket = stranger();
    Handshake handshake(Handshake::Role::kCaller, address_.secret, address_.context);
    std::string received;
    for (;;) {
      EXPECT_EQ(sockets::send_all(socket, handshake.outgoing(), in_a_minute()), 0);
      if (handshake.done()) return socket;
      EXPECT_EQ(sockets::receive_some(socket, received, 256, in_a_minute()), 0);
      handshake.take(received);
      EXPECT_EQ(handshake.problem(), "");
    }
  }

 private:
  StoreAddress address_;
  std::shared_ptr<StoreServer> server_;
};

// Whether the other side closes the connection, whatever it sends before.
inline bool is_dropped(const FileDescriptor& socket) {
  std::string ignored;
  int problem = 0;
  while (problem == 0) problem = sockets::receive_some(socket, ignored, 4096, in_a_minute());
  return problem == ECONNRESET || problem == EPIPE;
}

// Shakes hands, then never answers.
class SilentStore {
 public:
  explicit SilentStore(Transport transport)
      : listener_(listen_for_test(transport, address_)), thread_([this] { run(); }) {}
  ~SilentStore() {
    shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }
  c10::intrusive_ptr<StoreClient> client() const {
    return StoreClient::connect(address_, nullptr, 1, std::chrono::minutes(1));
  }

 private:
  void run() {
    std::vector<FileDescriptor> kept;
    for (;;) {
      int problem = 0;
      if (!sockets::await_readable(listener_, in_a_minute())) return;
      auto accepted = sockets::accept_from(listener_, problem);
      if (!accepted.socket) return;
      Handshake handshake(Handshake::Role::kListener, address_.secret, address_.context);
      std::string received;
      while (!handshake.done() && problem == 0) {
        problem = sockets::receive_some(accepted.socket, received, 256, in_a_minute());
        handshake.take(received);
        if (problem == 0)
          problem = sockets::send_all(accepted.socket, handshake.outgoing(), in_a_minute());
      }
      kept.push_back(std::move(accepted.socket));
    }
  }

  StoreAddress address_;
  FileDescriptor listener_;
  std::thread thread_;
};

}  // namespace fsdp::comm
