// HostPool: host memory for offloaded tensors, reused from step to step.
//
// Memory is allocated in slabs, pinned if the device has streams, and never freed: a device may
// still use it, and a recorded step will. It is reported as MemoryReport::host_activations. Blocks
// are cut from the slabs. A returned block is reused for the next request of its size; once all
// blocks are returned, cutting starts over. So steps with the same requests allocate nothing new,
// and the pool is as large as the most that was taken at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

#include "base/mutex.h"

namespace fsdp::memory {

class HostPool {
 public:
  explicit HostPool(at::Device device) : device_(device) {}
  ~HostPool();

  at::Tensor take(int64_t bytes);         // uint8 [bytes]
  void give(const at::Tensor& block);     // returns a block from take()
  int64_t used() const;                   // bytes currently taken
  int64_t size() const;                   // bytes of all slabs
  static int64_t size_for(int64_t most);  // size of a pool with at most this many bytes taken

 private:
  struct Slab {
    at::Tensor memory;
    int64_t cut = 0;  // bytes handed out from its start
  };

  const at::Device device_;
  mutable Mutex mutex_;
  std::vector<Slab> slabs_ FSDP_GUARDED_BY(mutex_);
  std::map<int64_t, std::vector<at::Tensor>> free_ FSDP_GUARDED_BY(mutex_);  // by size
  int64_t used_ FSDP_GUARDED_BY(mutex_) = 0;
};

}  // namespace fsdp::memory
