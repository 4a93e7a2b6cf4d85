// Runtime: the engine's process-wide state. Everything else belongs to a model, a communicator or a
// thread (thread_state.h). docs/architecture.md lists what other rooms keep for the process.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace fsdp::shard {

class Model;
class TapeHooks;
struct Group;

struct Runtime {
  // The sharded models; see registry.h.
  struct {
    Mutex mutex;
    std::vector<std::pair<const Model*, std::weak_ptr<Model>>> all FSDP_GUARDED_BY(mutex);
    std::vector<std::shared_ptr<Model>> parked FSDP_GUARDED_BY(mutex);
    // Devices and backends whose exit handlers come later.
    std::set<std::string> leave_at_exit FSDP_GUARDED_BY(mutex);
    std::atomic<int> count{0};  // of `all`; read without the mutex
  } models;

  // Communicators that models with the same default mesh share; see build.cpp.
  struct {
    Mutex mutex;
    std::vector<std::pair<std::string, std::weak_ptr<Group>>> known FSDP_GUARDED_BY(mutex);
  } groups;

  // Bytes that autograd keeps for backward; see saved_activations.h.
  struct Held {
    int64_t times = 0, bytes = 0;
  };
  struct {
    std::atomic<bool> counting{false};  // read without the mutex, like in_host
    std::atomic<int64_t> in_host{0};
    Mutex mutex;
    std::unordered_map<const void*, Held> storages FSDP_GUARDED_BY(mutex);
    int64_t now FSDP_GUARDED_BY(mutex) = 0;
    int64_t most FSDP_GUARDED_BY(mutex) = 0;
  } saved;

  // The tape of deferred_init; see deferred.cpp.
  struct {
    // Guards every storage's last record, and the process's generators while their states are
    // replaced.
    std::recursive_mutex mutex;
    std::atomic<uint64_t> last_number{0};
  } tape;

  std::atomic<TapeHooks*> tape_hooks{nullptr};  // null: recomputation isn't in use
};

Runtime& runtime();  // never destroyed: models and threads may outlive static destructors

}  // namespace fsdp::shard
