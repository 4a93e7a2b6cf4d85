// Mutex, Lock, Condition: std::mutex, std::unique_lock and std::condition_variable with the
// annotations of clang's thread-safety analysis. tools/check-alone runs the analysis where clang is
// installed; other compilers see no annotations.
//
// The rules for locks in src:
//
// 1. A mutex is a Mutex, and what it guards says so: FSDP_GUARDED_BY on data, FSDP_REQUIRES on
//    functions and lambdas whose caller holds it. What an annotation can't express, such as a field
//    of an item guarded by its queue's mutex, says so in a comment. Three mutexes are of other
//    types: a model's, which is recursive and hands out what it guards (Locked, shard/model.h);
//    that of deferred_init's tape, which is recursive too (shard/runtime.h); and LibTorch's own
//    (of generators, autograd nodes and works), which are taken last.
// 2. Clang doesn't check constructors and destructors: no other thread uses the object then.
// 3. A thread that takes several locks takes them along these arrows, and never two of one kind:
//
//      recomputed region ─► the one around it ─► model, offloaded region
//      model ─► state on disk: flat ─► store ─► ring ─► queue of pieces
//        └────► communicators: groups ─► mesh ─► world
//      offloaded region ─► offloaded storage ─► host pool, residents, shared lists
//      memory of an shm group ─► mappings of the process
//
//    Every other mutex is a leaf: its holder takes no other Mutex and no model's lock. Leaves may
//    be taken with any of the above held. One exception goes against an arrow: operators of a
//    gather reach the regions that its thread records. So a thread must not record a region while
//    another runs the backward of regions that it recorded.
// 4. A holder of a model's lock waits for collectives, updates on the host and background saves. So
//    their threads never take a model's lock.
// 5. Functions of the caller (an item's `done`, hooks, deleters) run with no Mutex held, except
//    those whose comment says so.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/namespace.h"

#ifdef __clang__
#define FSDP_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define FSDP_THREAD_SAFETY(attribute)
#endif

#define FSDP_CAPABILITY(name) FSDP_THREAD_SAFETY(capability(name))
#define FSDP_SCOPED_CAPABILITY FSDP_THREAD_SAFETY(scoped_lockable)
#define FSDP_GUARDED_BY(mutex) FSDP_THREAD_SAFETY(guarded_by(mutex))
#define FSDP_PT_GUARDED_BY(mutex) FSDP_THREAD_SAFETY(pt_guarded_by(mutex))  // what it points to
#define FSDP_REQUIRES(...) FSDP_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define FSDP_EXCLUDES(...) FSDP_THREAD_SAFETY(locks_excluded(__VA_ARGS__))  // the caller hasn't it
#define FSDP_ACQUIRE(...) FSDP_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define FSDP_RELEASE(...) FSDP_THREAD_SAFETY(release_capability(__VA_ARGS__))

namespace fsdp::base {

class FSDP_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

 private:
  friend class Lock;
  friend class Unlocked;
  std::mutex mutex_;
};

// Holds the mutex while alive, except between unlock() and lock().
class FSDP_SCOPED_CAPABILITY Lock {
 public:
  explicit Lock(Mutex& mutex) FSDP_ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~Lock() FSDP_RELEASE() {}
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() FSDP_ACQUIRE() { lock_.lock(); }
  void unlock() FSDP_RELEASE() { lock_.unlock(); }

 private:
  friend class Condition;
  std::unique_lock<std::mutex> lock_;
};

// Releases a mutex while alive, in a function that a Lock's owner calls.
class FSDP_SCOPED_CAPABILITY Unlocked {
 public:
  explicit Unlocked(Mutex& mutex) FSDP_RELEASE(mutex) : mutex_(mutex.mutex_) { mutex_.unlock(); }
  ~Unlocked() FSDP_RELEASE() { mutex_.lock(); }  // clang's word for the end of any scope
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::mutex& mutex_;
};

// The lock is held when a wait begins and when it returns. A predicate says
// FSDP_REQUIRES: [&]() FSDP_REQUIRES(mutex_) { return done_; }
class Condition {
 public:
  void wait(Lock& lock) { condition_.wait(lock.lock_); }

  template <typename Predicate>
  void wait(Lock& lock, Predicate predicate) {
    condition_.wait(lock.lock_, std::move(predicate));
  }

  // Whether the predicate holds; false: the limit has passed.
  template <typename Duration, typename Predicate>
  bool wait_for(Lock& lock, Duration limit, Predicate predicate) {
    return condition_.wait_for(lock.lock_, limit, std::move(predicate));
  }

  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace fsdp::base
