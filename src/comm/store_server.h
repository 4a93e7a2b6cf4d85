// StoreServer: the store of a world, in a thread of rank 0's process. The others ask it through
// StoreClient (comm/store_client.h).
//
// Who connects is a stranger until a handshake (base/handshake.h) proves the run's secret; over a
// Unix socket its process must belong to our user as well. Strangers have a few seconds and a few
// bytes, and the oldest makes room if there are too many. The thread never waits for a single peer
// and looks up no names, so nobody who connects, or stays silent, can stop the others.
#pragma once

#include <chrono>
#include <string>
#include <thread>

#include "base/file_descriptor.h"

namespace fsdp::comm {

struct StoreServerOptions {
  FileDescriptor listener;  // listens already
  bool one_user = false;    // the listener is a Unix socket; only our own user may connect
  std::string secret;
  std::string context;                       // of the handshake
  int ranks = 1;                             // how many connections to expect
  std::chrono::milliseconds patience{5000};  // for a stranger's handshake
};

class StoreServer {
 public:
  explicit StoreServer(StoreServerOptions options);
  ~StoreServer();  // ends all connections
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  FileDescriptor stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace fsdp::comm
