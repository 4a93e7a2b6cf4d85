// The thread that updates offloaded flats in host memory (offload.h).
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/mutex.h"

namespace fsdp::shard {

// The update of one flat, as handed to the thread.
class HostUpdate {
 public:
  // Throws the update's exception as an Error, or an Error if it takes longer than `limit`.
  void wait(const std::string& unit, std::chrono::milliseconds limit);
  void run(const std::function<void()>& work) noexcept;

 private:
  Mutex mutex_;
  Condition done_changed_;
  bool done_ FSDP_GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ FSDP_GUARDED_BY(mutex_);
};

struct HostWork {
  std::function<void()> run;
  // Whether its inputs have arrived; empty: they have. Called with the mutex of HostUpdates held.
  std::function<bool()> can_start = {};
  uint64_t arrival = 0;  // order in which gradients arrive
  size_t wanted = 0;     // order in which forward needs the flats
};

// Runs updates one after the other in a thread of its own, which starts with the first update. Of
// the updates that can start, the one forward needs first runs next; if none can start, the one
// whose gradient arrives next.
class HostUpdates {
 public:
  explicit HostUpdates(at::Device device = at::kCPU) : device_(device) {}
  ~HostUpdates();  // waits for the last update
  HostUpdates(const HostUpdates&) = delete;
  HostUpdates& operator=(const HostUpdates&) = delete;

  std::shared_ptr<HostUpdate> add(HostWork work);

 private:
  void loop();

  const at::Device device_;  // of the events that updates wait for
  Mutex mutex_;
  Condition changed_;
  std::deque<std::pair<std::shared_ptr<HostUpdate>, HostWork>> waiting_ FSDP_GUARDED_BY(mutex_);
  bool closed_ FSDP_GUARDED_BY(mutex_) = false;
  std::thread thread_ FSDP_GUARDED_BY(mutex_);
};

}  // namespace fsdp::shard
