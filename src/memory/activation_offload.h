// Activation offload: what autograd saves in a region waits for backward in host memory.
//
//   forward, region i     each saved storage is copied out on a side stream as soon as it is saved
//   region i ends         the compute stream waits for the copies of region i - 1, whose memory
//   goes backward, region i    its first saved tensor that is asked for begins to bring back region
//   i - 1 a tensor is used      the compute stream waits for its copy
//
// So two regions are on the device at once, at most, and the last one never leaves. Nothing waits
// on the host, and no memory is freed while a stream is at it, also in a step that is recorded as a
// CUDA graph. One side stream a device takes the copies of both directions: what is read and
// written in host memory is in order without any more events.
//
// A storage is copied once, however many views of it are saved. What backward finds alive for
// another reason (a buffer, a mask) is used as it is, and not copied the next time. On the CPU the
// same runs with plain copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

#include "shard/tape_hook.h"

namespace fsdp::memory {

class AwayStorage;

class OffloadedRegion : public std::enable_shared_from_this<OffloadedRegion> {
 public:
  OffloadedRegion(std::string name, std::weak_ptr<OffloadedRegion> before)
      : name_(std::move(name)), before_(std::move(before)) {}

  const std::string& name() const { return name_; }
  // Begins the copy. Null: the tensor stays.
  std::unique_ptr<shard::SavedPlace> place(const at::Tensor& tensor);
  bool empty() const;
  // Frees the device's memory, once the copies are done.
  void leave();
  // Begins to bring back what the region and the one before it need.
  void come_back();

 private:
  void bring();

  const std::string name_;
  const std::weak_ptr<OffloadedRegion> before_;  // the one that backward reaches next
  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<AwayStorage>> storages_;  // places hold them
  bool brought_ = false, reached_ = false;
};

namespace offload {

// Storages below this many bytes stay where they are. Tests have smaller ones.
extern int64_t smallest_bytes;
struct Use {
  int64_t now = 0;   // bytes in host memory
  int64_t pool = 0;  // that is there for them
};
Use use_of(at::Device device);
// How many copies were begun since the program began, in either direction.
struct Copies {
  int64_t out = 0, in = 0;
};
Copies copies();
// What a dry run on the meta device would have moved, since begin_plan().
struct Planned {
  int64_t now = 0, most = 0;  // bytes in host memory
  int64_t moved = 0;          // that left, one after the other
};
void begin_plan();
Planned planned();

}  // namespace offload
}  // namespace fsdp::memory
