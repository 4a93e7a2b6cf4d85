#include "shard/saved_activations.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

namespace fsdp::shard::saved_activations {
namespace {

struct Held {
  int64_t times = 0, bytes = 0;
};

std::atomic<bool> on{false};
std::atomic<int64_t> in_host{0};
std::mutex mutex;
std::unordered_map<const void*, Held> storages;
int64_t now = 0, most = 0;

void begin(bool wanted) {
  on = wanted;
  storages.clear();
  now = most = 0;
}

}  // namespace

void count(bool wanted) {
  std::lock_guard lock(mutex);
  begin(wanted);
}

struct CountedApart::Before {
  bool on = false;
  std::unordered_map<const void*, Held> storages = {};
  int64_t now = 0, most = 0;
};

CountedApart::CountedApart() : before_(std::make_unique<Before>()) {
  std::lock_guard lock(mutex);
  *before_ = {on, std::move(storages), now, most};
  begin(true);
}

CountedApart::~CountedApart() {
  std::lock_guard lock(mutex);
  on = before_->on;
  storages = std::move(before_->storages);
  now = before_->now;
  most = before_->most;
}

bool counting() {
  return on.load(std::memory_order_relaxed);
}

void add(const at::Tensor& tensor) {
  if (tensor.has_storage()) add(tensor.storage().unsafeGetStorageImpl(), tensor.storage().nbytes());
}

void add(const void* storage, size_t bytes) {
  std::lock_guard lock(mutex);
  Held& held = storages[storage];
  if (held.times++ > 0) return;
  held.bytes = static_cast<int64_t>(bytes);
  now += held.bytes;
  most = std::max(most, now);
}

void remove(const void* storage) {
  std::lock_guard lock(mutex);
  auto known = storages.find(storage);
  if (known == storages.end() || --known->second.times > 0) return;
  now -= known->second.bytes;
  storages.erase(known);
}

bool holds(const void* storage) {
  std::lock_guard lock(mutex);
  return storages.contains(storage);
}

int64_t held() {
  std::lock_guard lock(mutex);
  return now;
}

int64_t peak() {
  std::lock_guard lock(mutex);
  return most;
}

void add_host(int64_t bytes) {
  in_host += bytes;
}

int64_t host() {
  return in_host;
}

}  // namespace fsdp::shard::saved_activations
