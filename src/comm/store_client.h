// StoreClient: a rank's view of the store that rank 0's process holds (comm/store_server.h), as a
// c10d::Store.
//
// Calls from several threads run side by side, each on a connection of its own: a call takes an
// idle one or opens another, so a long wait holds up nobody. Every call ends: with its answer, at
// its deadline, or at once if the store's process is gone.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "base/exit_code.h"
#include "base/file_descriptor.h"
#include "base/sockets.h"
#include "comm/store_message.h"
#include "comm/store_server.h"

namespace fsdp::comm {

// The process that holds the store is gone, or refuses us: no call will succeed.
struct StoreGone : CodedError {
  StoreGone(const std::string& message, const std::string& hint)
      : CodedError(kExitLostRank, message, hint) {}
};
// It doesn't answer, because it is stopped, starved, or cut off.
struct StoreSilent : CodedError {
  StoreSilent(const std::string& message, const std::string& hint)
      : CodedError(kExitLostRank, message, hint) {}
};
// It answers, but the keys weren't set in time.
struct StoreTimeout : CodedError {
  StoreTimeout(const std::string& message, const std::string& hint)
      : CodedError(kExitLostRank, message, hint) {}
};

// Where the store listens, and how to prove that we belong to it.
struct StoreAddress {
  std::string unix_name;  // "": TCP
  std::string host;
  int port = 0;
  std::string secret;
  std::string context;  // of the handshake

  std::string text() const;  // for messages
};

class StoreClient : public c10d::Store {
 public:
  using Deadline = sockets::Deadline;

  // Connects, and tries again until `timeout` while nobody listens, and for `distrust` if what
  // listens isn't this run's store: that of an earlier run may be about to end. `server`: the store
  // itself, in rank 0's process; it lives as long as a client there does. `rank` is for errors.
  static c10::intrusive_ptr<StoreClient> connect(
      StoreAddress address, std::shared_ptr<StoreServer> server, int rank,
      std::chrono::milliseconds timeout,
      std::chrono::milliseconds distrust = std::chrono::seconds(10));

  // Shares the connections, but has a timeout of its own.
  c10::intrusive_ptr<c10d::Store> clone() override;

  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }
  std::vector<std::string> listKeys() override;

 private:
  struct Shared;

 public:
  StoreClient(std::shared_ptr<Shared> shared, std::chrono::milliseconds timeout);

 private:
  std::vector<std::string> ask(StoreRequest request, std::chrono::milliseconds limit);
  std::vector<std::string> ask_for_keys(StoreCall call, const std::vector<std::string>& keys,
                                        std::chrono::milliseconds wait);

  std::shared_ptr<Shared> shared_;
};

}  // namespace fsdp::comm
