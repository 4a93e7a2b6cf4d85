// HostPool: host memory that things of a device wait in, used again from step to step.
//
// Memory comes in slabs, pinned where a device copies from and to it, and is never given back: a
// device may still be at it, and a recorded step will be. It shows as
// MemoryReport::host_activations. Blocks are cut from the slabs; one that is given back serves the
// next of its size, and when all are, cutting begins anew. So a step that does what the step before
// did takes nothing more, and the pool is as large as the most that was in it at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace fsdp::memory {

class HostPool {
 public:
  explicit HostPool(at::Device device) : device_(device) {}
  ~HostPool();

  at::Tensor take(int64_t bytes);         // [bytes], of bytes
  void give(const at::Tensor& block);     // as it was taken
  int64_t used() const;                   // bytes that are taken
  int64_t size() const;                   // bytes of all slabs
  static int64_t size_for(int64_t most);  // of a pool that had that much taken at once

 private:
  struct Slab {
    at::Tensor memory;
    int64_t cut = 0;  // bytes from its beginning
  };

  const at::Device device_;
  mutable std::mutex mutex_;
  std::vector<Slab> slabs_;
  std::map<int64_t, std::vector<at::Tensor>> free_;  // by size
  int64_t used_ = 0;
};

}  // namespace fsdp::memory
