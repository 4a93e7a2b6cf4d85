// Dry runs: the engine on the meta device, where tensors have sizes and no memory. A memory plan
// runs whole steps this way and counts what they would need.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "shard/device_stream.h"
#include "shard/thread_state.h"

namespace fsdp::shard::dry_run {

using As = DryRunState::As;  // the device to imitate: what is kept between steps, and where

// While one is alive, this thread may run models on the meta device, without values.
class Scope {
 public:
  explicit Scope(As as);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  const As before_;
};

inline bool on() {
  return this_thread().dry_run.as != As::kNone;
}
inline bool as_gpu() {
  return this_thread().dry_run.as == As::kGpu;
}

// Whether gradients are freed between steps and buffers take turns, as on a device with streams.
inline bool like_gpu(at::Device device) {
  return has_streams(device) || (device.is_meta() && as_gpu());
}

void count_product(const Product& product);  // per thread; does nothing outside a Scope
std::vector<Product> take_products();        // those since the last call

}  // namespace fsdp::shard::dry_run
