// Waits on a c10d store that can name the missing ranks, and store calls that always return.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <semaphore>
#include <string>

#include "comm/shm/group.h"

namespace fsdp::comm {

using Store = c10::intrusive_ptr<c10d::Store>;

// Waits until all keys are set; false at the timeout. It polls: a store's own wait blocks its
// connection, logs a stack trace when it times out, and can't say which key is missing. Throws an
// Error if the store is gone or `trouble` knows why a key will never come.
bool await_keys(const Store& store, const std::vector<std::string>& keys,
                std::chrono::milliseconds timeout, const std::string& what,
                const std::function<std::string()>& trouble = {});

// Waits until key PREFIX/r is set for every r below `size`; the Error names the missing ranks.
// `what` begins the message: "rank 0: joining the world".
void await_ranks(const Store& store, const std::string& prefix, int size,
                 std::chrono::milliseconds timeout, const std::string& what,
                 const std::function<std::string()>& trouble = {});

// A store whose calls always return: within a few seconds, or with an exception. c10d's own calls
// wait forever on a store whose process is stopped, and must not block a watchdog. After a failed
// call no other is tried: c10d logs a stack trace for each, which would bury the error that
// matters.
class BoundedStore {
 public:
  explicit BoundedStore(Store store) : state_(std::make_shared<State>(std::move(store))) {}

  void give_up() { state_->gone = true; }  // its process is known to be dead

  void set(const std::string& key, const std::string& value);
  void set_if_absent(const std::string& key, const std::string& value);
  std::optional<std::string> get(const std::string& key);  // nullopt: not set
  bool has(const std::vector<std::string>& keys);
  bool gone() const { return state_->gone; }  // the connection is lost; no call will succeed
  int64_t add(const std::string& key, int64_t amount);
  void erase(const std::string& key);

 private:
  struct State {
    Store store;
    std::binary_semaphore free{1};    // taken while a call is running
    std::atomic<bool> silent{false};  // the running call took too long; don't try others
    std::atomic<bool> gone{false};
    explicit State(Store given) : store(std::move(given)) {}
  };
  template <typename Result>
  Result call(std::function<Result(c10d::Store&)> body);
  std::shared_ptr<State> state_;
};

shm::Exchange exchange_over(Store store, const std::string& what,
                            std::function<std::string()> trouble);

}  // namespace fsdp::comm
