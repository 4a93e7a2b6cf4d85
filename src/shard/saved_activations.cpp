#include "shard/saved_activations.h"

#include <algorithm>
#include <unordered_map>

#include "base/mutex.h"
#include "shard/runtime.h"

namespace fsdp::shard::saved_activations {
namespace {

auto& saved() {
  return runtime().saved;
}

void begin(bool wanted) FSDP_REQUIRES(saved().mutex) {
  saved().counting = wanted;
  saved().storages.clear();
  saved().now = saved().most = 0;
}

}  // namespace

void count(bool wanted) {
  Lock lock(saved().mutex);
  begin(wanted);
}

struct CountedApart::Before {
  bool counting = false;
  std::unordered_map<const void*, Runtime::Held> storages = {};
  int64_t now = 0, most = 0;
};

CountedApart::CountedApart() : before_(std::make_unique<Before>()) {
  Lock lock(saved().mutex);
  *before_ = {saved().counting, std::move(saved().storages), saved().now, saved().most};
  begin(true);
}

CountedApart::~CountedApart() {
  Lock lock(saved().mutex);
  saved().counting = before_->counting;
  saved().storages = std::move(before_->storages);
  saved().now = before_->now;
  saved().most = before_->most;
}

bool counting() {
  return saved().counting.load(std::memory_order_relaxed);
}

void add(const at::Tensor& tensor) {
  if (tensor.has_storage()) add(tensor.storage().unsafeGetStorageImpl(), tensor.storage().nbytes());
}

void add(const void* storage, size_t bytes) {
  Lock lock(saved().mutex);
  Runtime::Held& held = saved().storages[storage];
  if (held.times++ > 0) return;
  held.bytes = static_cast<int64_t>(bytes);
  saved().now += held.bytes;
  saved().most = std::max(saved().most, saved().now);
}

void remove(const void* storage) {
  Lock lock(saved().mutex);
  auto known = saved().storages.find(storage);
  if (known == saved().storages.end() || --known->second.times > 0) return;
  saved().now -= known->second.bytes;
  saved().storages.erase(known);
}

bool holds(const void* storage) {
  Lock lock(saved().mutex);
  return saved().storages.contains(storage);
}

int64_t held() {
  Lock lock(saved().mutex);
  return saved().now;
}

int64_t peak() {
  Lock lock(saved().mutex);
  return saved().most;
}

void add_host(int64_t bytes) {
  saved().in_host += bytes;
}

int64_t host() {
  return saved().in_host;
}

}  // namespace fsdp::shard::saved_activations
