// Model: a sharded model, and its lock. All of its state is in an Engine (engine.h), which only the
// holder of the lock can reach:
//
//   shard::Locked model = shard::lock(sharded);  // or unit->owner.lock()->lock()
//   model->gatherer.reshard(unit);
//
// Rules: The lock is recursive, because hooks of the user may call back. Never run a backward while
// holding it: on a GPU gradients arrive in a thread of autograd's. Never hold it for two models at
// once. An optimizer's own state is guarded by the lock of its model. The rules for all locks are
// in base/mutex.h.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "fsdp/world.h"

namespace fsdp {
class Sharded;
struct ShardOptions;
}  // namespace fsdp

namespace fsdp::shard {

struct Engine;  // engine.h
class Model;
class Unit;

// While alive, no other thread reaches the model's state.
class Locked {
 public:
  explicit Locked(Model& model);
  explicit Locked(std::shared_ptr<Model> model);  // which stays alive, too
  Engine& operator*() const { return *engine_; }
  Engine* operator->() const { return engine_; }
  void unlock() { lock_.unlock(); }
  void lock() { lock_.lock(); }

 private:
  std::shared_ptr<Model> model_;  // may be null
  std::unique_lock<std::recursive_mutex> lock_;
  Engine* engine_;
};

class Model : public std::enable_shared_from_this<Model> {
 public:
  Model(World world, at::Device device, ShardOptions options);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const World& world() const;
  at::Device device() const;
  Locked lock() { return Locked(*this); }

  // The model that took its units over (bottom-up use); null: none.
  std::shared_ptr<Model> successor() const { return successor_.load(); }
  // Takes over all units of another model.
  void take_over(const std::shared_ptr<Model>& other);

  void add(std::shared_ptr<Unit> unit);
  void seal();  // the units are complete
  // Throws failures that the communicators found in the background. Without the lock: it must find
  // a hang even while another thread holds it.
  void check_communicators() const;

 private:
  friend class Locked;

  std::recursive_mutex mutex_;
  std::unique_ptr<Engine> engine_;
  std::vector<Communicator> communicators_;  // of all units
  std::atomic<std::shared_ptr<Model>> successor_;
};

// The model behind a handle: its last successor, if it was taken over.
std::shared_ptr<Model> live(const std::shared_ptr<Model>& model);
std::shared_ptr<Model> model_of(const Sharded& sharded);
inline Locked lock(const Sharded& sharded) {
  return Locked(model_of(sharded));
}

}  // namespace fsdp::shard
