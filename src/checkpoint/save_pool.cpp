#include "checkpoint/save_pool.h"

#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <chrono>

#include "base/host_memory.h"
#include "fsdp/out_of_memory.h"
#include "shard/device_stream.h"
#include "shard/pinned_memory.h"

namespace fsdp::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kSlotsPerArea = 8;
constexpr int64_t kKeptFree = int64_t{2} << 30;  // bytes of the device
constexpr int64_t kDeviceArea = 64 << 20;        // bytes per allocation there
constexpr int kPause = 4;  // grow() pauses this many times as long as it has worked

int64_t slots_for(int64_t bytes) {
  return (bytes + SavePool::kSlot - 1) / SavePool::kSlot;
}

}  // namespace

SavePool::SavePool(int64_t limit, at::Device device)
    : limit_(std::max(limit, kSlot)), device_(device) {}

int64_t SavePool::slots_held() const {
  return slots_ - static_cast<int64_t>(free_.size());
}

int64_t SavePool::room_on_device() const {
  if (!shard::has_streams(device_)) return 0;
  const auto [free, total] =
      c10::getDeviceAllocator(device_.type())->getMemoryInfo(device_.index());
  return std::max<int64_t>(static_cast<int64_t>(free) - kKeptFree, 0) + cached_on_device_;
}

void SavePool::took_on_device(int64_t bytes) {
  cached_on_device_ = std::max<int64_t>(cached_on_device_, bytes);
}

bool SavePool::has_room(int64_t bytes) const {
  Lock lock(mutex_);
  return slots_held() + slots_for(bytes) <= limit_ / kSlot;
}

void SavePool::expect(int64_t bytes) {
  Lock lock(mutex_);
  const int64_t all = slots_held() + std::max<int64_t>(slots_for(bytes), 1);
  wanted_ = std::max(wanted_, std::min(all, limit_ / kSlot));
}

bool SavePool::add_area() {
  int64_t count = 0;
  {
    Lock lock(mutex_);
    count = std::min(wanted_ - slots_, kSlotsPerArea);
    if (count <= 0) return false;
    slots_ += count;  // so that no other thread allocates the same
  }
  at::Tensor area;
  try {
    area = shard::pinned_memory(count * kSlot, device_);
  } catch (const std::exception& problem) {
    Lock lock(mutex_);
    slots_ -= count;
    wanted_ = slots_;  // make do with what there is
    if (slots_ > 0 && is_out_of_memory(problem)) return false;
    throw;
  }
  Lock lock(mutex_);
  for (int64_t i = 0; i < count; ++i)
    free_.push_back(static_cast<char*>(area.data_ptr()) + i * kSlot);
  areas_.push_back(std::move(area));
  changed_.notify_all();
  return true;
}

bool SavePool::pause_after(Clock::time_point begun) {
  const auto pause = kPause * (Clock::now() - begun);
  Lock lock(mutex_);
  changed_.wait_for(lock, pause, [&]() FSDP_REQUIRES(mutex_) { return stop_growing_; });
  return !stop_growing_;
}

void SavePool::grow(int64_t device_bytes) {
  for (auto begun = Clock::now(); add_area(); begun = Clock::now())
    if (!pause_after(begun)) return;
  grow_on_device(device_bytes);
}

void SavePool::grow_on_device(int64_t bytes) {
  std::vector<at::Tensor> held;  // freed together, so that each is new
  for (int64_t at = 0; at < bytes; at += kDeviceArea) {
    if (room_on_device() - at < kDeviceArea) return;
    const auto begun = Clock::now();
    held.push_back(at::empty({kDeviceArea}, at::TensorOptions(at::kByte).device(device_)));
    took_on_device(at + kDeviceArea);
    if (!pause_after(begun)) return;
  }
}

void SavePool::stop_growing() {
  Lock lock(mutex_);
  stop_growing_ = true;
  changed_.notify_all();
}

char* SavePool::take(const std::function<bool()>& given_up) {
  for (;;) {
    {
      Lock lock(mutex_);
      const auto ready = [&]() FSDP_REQUIRES(mutex_) {
        return !free_.empty() || slots_ < wanted_ || given_up();
      };
      changed_.wait(lock, ready);  // Ends: the writer gives a slot back, or gives up
      if (!free_.empty()) {
        char* slot = free_.back();
        free_.pop_back();
        return slot;
      }
      if (slots_ >= wanted_) return nullptr;
    }
    add_area();
  }
}

void SavePool::give(char* slot) {
  Lock lock(mutex_);
  free_.push_back(slot);
  changed_.notify_all();
}

void SavePool::wake() {
  Lock lock(mutex_);
  changed_.notify_all();
}

int64_t default_pool(int ranks_on_host) {
  const auto memory = host_memory();
  return (memory ? memory->usable() : 0) / 2 / std::max(ranks_on_host, 1);
}

}  // namespace fsdp::checkpoint
