#include "memory/host_pool.h"

#include <algorithm>

#include "shard/pinned_memory.h"
#include "shard/saved_activations.h"
#include "shard/tensor_access.h"

namespace fsdp::memory {
namespace {

constexpr int64_t kSlab = int64_t{1} << 28, kGrain = 4096;

int64_t rounded(int64_t bytes) {
  return (std::max<int64_t>(bytes, 1) + kGrain - 1) / kGrain * kGrain;
}

}  // namespace

HostPool::~HostPool() {
  shard::saved_activations::add_host(-size());
}

at::Tensor HostPool::take(int64_t bytes) {
  shard::Unseen unseen;
  const int64_t whole = rounded(bytes);
  Lock lock(mutex_);
  at::Tensor block;
  if (auto same = free_.find(whole); same != free_.end() && !same->second.empty()) {
    block = std::move(same->second.back());
    same->second.pop_back();
  }
  for (size_t i = 0; !block.defined(); ++i) {
    if (i == slabs_.size()) {
      slabs_.push_back({shard::pinned_memory(std::max(kSlab, whole), device_)});
      shard::saved_activations::add_host(slabs_.back().memory.numel());
    }
    Slab& slab = slabs_[i];
    if (slab.memory.numel() - slab.cut < whole) continue;
    block = slab.memory.narrow(0, slab.cut, whole);
    slab.cut += whole;
  }
  used_ += whole;
  return block.narrow(0, 0, bytes);
}

void HostPool::give(const at::Tensor& block) {
  shard::Unseen unseen;
  const int64_t whole = rounded(block.numel());
  Lock lock(mutex_);
  used_ -= whole;
  if (used_ > 0) {
    free_[whole].push_back(block.as_strided({whole}, {1}));
    return;
  }
  free_.clear();
  for (Slab& slab : slabs_) slab.cut = 0;
}

int64_t HostPool::used() const {
  Lock lock(mutex_);
  return used_;
}

int64_t HostPool::size_for(int64_t most) {
  return (most + kSlab - 1) / kSlab * kSlab;
}

int64_t HostPool::size() const {
  Lock lock(mutex_);
  int64_t bytes = 0;
  for (const Slab& slab : slabs_) bytes += slab.memory.numel();
  return bytes;
}

}  // namespace fsdp::memory
