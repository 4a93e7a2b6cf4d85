// Activation offload: tensors that autograd saves in a region stay in host memory until backward.
//
//   forward, region i    each saved storage is copied to the host on a side stream
//   region i ends        the compute stream waits for the copies of region i - 1 and frees its
//                        device memory
//   backward, region i   the first saved tensor that is used starts the copies back of region i - 1
//   a tensor is used     the compute stream waits for its copy
//
// So at most two regions are on the device at once, and the last one never leaves it. The CPU never
// blocks, and no memory is freed while a stream uses it. One side stream per device runs the copies
// of both directions, so host memory needs no further events.
//
// A storage is copied once, however many views of it are saved. A storage that backward finds still
// alive (a buffer, a mask) is used in place and isn't copied in later steps. On the CPU the same
// code runs with plain copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "shard/tape_hook.h"

namespace fsdp::memory {

class AwayStorage;

class OffloadedRegion : public std::enable_shared_from_this<OffloadedRegion> {
 public:
  OffloadedRegion(std::string name, std::weak_ptr<OffloadedRegion> before)
      : name_(std::move(name)), before_(std::move(before)) {}

  const std::string& name() const { return name_; }
  // Starts the copy to the host. Null: the tensor isn't offloaded.
  std::unique_ptr<shard::SavedPlace> place(const at::Tensor& tensor);
  bool empty() const;
  // Frees the device memory once the copies are done.
  void leave();
  // Starts the copies back of this region and the one before it.
  void come_back();

 private:
  void bring();

  const std::string name_;
  const std::weak_ptr<OffloadedRegion> before_;  // the one that backward reaches next
  mutable Mutex mutex_;
  std::vector<std::weak_ptr<AwayStorage>> storages_ FSDP_GUARDED_BY(mutex_);  // places hold them
  bool brought_ FSDP_GUARDED_BY(mutex_) = false;
  bool reached_ FSDP_GUARDED_BY(mutex_) = false;
};

namespace offload {

struct Use {
  int64_t now = 0;   // bytes in host memory
  int64_t pool = 0;  // size of the host pool
};
Use use_of(at::Device device);
// Copies started since the program began, per direction.
struct Copies {
  int64_t out = 0, in = 0;
};
Copies copies();

}  // namespace offload
}  // namespace fsdp::memory
