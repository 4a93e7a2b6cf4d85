#include "shard/host_updates.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <optional>

#include "base/format.h"
#include "base/log.h"
#include "fsdp/error.h"
#include "shard/device_stream.h"
#include "shard/tensor_access.h"

namespace fsdp::shard {

void HostUpdate::run(const std::function<void()>& work) noexcept {
  std::exception_ptr failure;
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  Lock lock(mutex_);
  failure_ = failure;
  done_ = true;
  done_changed_.notify_all();
}

void HostUpdate::wait(const std::string& unit, std::chrono::milliseconds limit) {
  Lock lock(mutex_);
  if (!done_changed_.wait_for(lock, limit, [&]() FSDP_REQUIRES(mutex_) { return done_; }))
    throw Error(formatted("unit \"{}\": its update on the CPU did not finish in {} s.", unit,
                          limit.count() / 1000),
                "its gradient may not have arrived (docs/hangs.md), or FSDP_TIMEOUT is too short "
                "for this CPU.");
  if (!failure_) return;
  try {
    std::rethrow_exception(std::exchange(failure_, nullptr));
  } catch (const std::exception& error) {
    throw Error(formatted("unit \"{}\": its update on the CPU failed: {}", unit, log::plain(error)),
                "its parameters and states may be partly updated; load a checkpoint.");
  }
}

HostUpdates::~HostUpdates() {
  {
    Lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();  // Ends: with the updates it was given
}

std::shared_ptr<HostUpdate> HostUpdates::add(HostWork work) {
  auto update = std::make_shared<HostUpdate>();
  Lock lock(mutex_);
  waiting_.emplace_back(update, std::move(work));
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  changed_.notify_all();
  return update;
}

namespace {

// A failed query (the device is lost) counts as true; the work itself then reports the failure.
bool can_start(const HostWork& work) {
  try {
    return !work.can_start || work.can_start();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

void HostUpdates::loop() {
  at::NoGradGuard no_grad;
  Unseen unseen;
  std::optional<c10::DeviceGuard> on;  // else querying an event creates a context on GPU 0
  if (has_streams(device_)) on.emplace(device_);
  while (true) {
    Lock lock(mutex_);
    // Ends: close().
    changed_.wait(lock, [&]() FSDP_REQUIRES(mutex_) { return closed_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    auto next = waiting_.end();
    for (auto entry = waiting_.begin(); entry != waiting_.end(); ++entry) {
      const HostWork& work = entry->second;
      if (next != waiting_.end() && next->second.wanted <= work.wanted) continue;
      if (can_start(work)) next = entry;
    }
    if (next == waiting_.end())
      next = std::min_element(waiting_.begin(), waiting_.end(), [](const auto& a, const auto& b) {
        return a.second.arrival < b.second.arrival;
      });
    auto [update, work] = std::move(*next);
    waiting_.erase(next);
    lock.unlock();
    // Free its tensors before it counts as done: make_states() checks whether they are in use.
    update->run([&run = work.run] { std::exchange(run, nullptr)(); });
    work = {};
  }
}

}  // namespace fsdp::shard
