// Small uses of a c10d store: waiting for other ranks in a way that can say who is missing.
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

// Waits until all keys are there; false at the timeout. Polls: a store's own wait holds its
// connection, logs a stack trace when it times out, and cannot say which key it was.
// Error where the store is gone or `trouble` knows why a key will never come.
bool await_keys(const Store& store, const std::vector<std::string>& keys,
                std::chrono::milliseconds timeout, const std::string& what,
                const std::function<std::string()>& trouble = {});

// Waits until key PREFIX/r is set for every r below `size`; Error names the ranks that are missing.
// `what` begins the message: "rank 0: joining the world".
void await_ranks(const Store& store, const std::string& prefix, int size,
                 std::chrono::milliseconds timeout, const std::string& what,
                 const std::function<std::string()>& trouble = {});

// A store whose calls return: each within some seconds or with an exception. c10d's own calls wait
// for ever on a store whose process is stopped, and must not take a watchdog with them. After a
// call has failed no other is tried: c10d logs a stack trace for each, which would bury the error
// that matters.
class BoundedStore {
 public:
  explicit BoundedStore(Store store) : state_(std::make_shared<State>(std::move(store))) {}

  void give_up() { state_->gone = true; }  // its process is known to be dead

  void set(const std::string& key, const std::string& value);
  void set_if_absent(const std::string& key, const std::string& value);
  std::optional<std::string> get(const std::string& key);  // nullopt: not there
  bool has(const std::vector<std::string>& keys);
  bool gone() const { return state_->gone; }  // the connection is lost; nothing will be answered
  int64_t add(const std::string& key, int64_t amount);
  void erase(const std::string& key);

 private:
  struct State {
    Store store;
    std::binary_semaphore free{1};    // taken while a call has not returned
    std::atomic<bool> silent{false};  // and that took too long: others need not try
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
