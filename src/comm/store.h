// Waits on the store that can name the missing ranks, and calls of it that return soon.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/shm/group.h"

namespace fsdp::comm {

using Store = c10::intrusive_ptr<c10d::Store>;

// Waits until all keys are set; false at the timeout. Throws an Error if the store is gone or
// `trouble` knows why a key will never come. `sign`: a text that changes while those who will set
// the keys make progress; each change starts the timeout anew.
bool await_keys(const Store& store, const std::vector<std::string>& keys,
                std::chrono::milliseconds timeout, const std::string& what,
                const std::function<std::string()>& trouble = {},
                const std::function<std::string()>& sign = {});

// Sets a key, or waits for one and returns its value. An Error that begins with `what` after the
// timeout, or if the store is gone.
void put(const Store& store, const std::string& key, const std::string& value,
         std::chrono::milliseconds timeout, const std::string& what);
std::string fetch(const Store& store, const std::string& key, std::chrono::milliseconds timeout,
                  const std::string& what, const std::function<std::string()>& trouble = {});

// Waits until key PREFIX/r is set for every r below `size`; the Error names the missing ranks.
// `what` begins the message: "rank 0: joining the world".
void await_ranks(const Store& store, const std::string& prefix, int size,
                 std::chrono::milliseconds timeout, const std::string& what,
                 const std::function<std::string()>& trouble = {});

// A store for watchdogs: each call returns within two seconds, or with an exception, even if the
// store's process is stopped. While that doesn't answer, calls give up sooner.
class BoundedStore {
 public:
  explicit BoundedStore(const Store& store);

  void set(const std::string& key, const std::string& value);
  void set_if_absent(const std::string& key, const std::string& value);
  std::optional<std::string> get(const std::string& key);  // nullopt: not set
  int64_t add(const std::string& key, int64_t amount);
  void erase(const std::string& key);

 private:
  template <typename Call>
  auto ask(const Call& call);

  Store patient_, brief_;
  std::atomic<bool> silent_{false};
};

shm::Exchange exchange_over(Store store, const std::string& what,
                            std::function<std::string()> trouble);

}  // namespace fsdp::comm
