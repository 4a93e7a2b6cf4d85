// Dry runs: the engine on the meta device, where tensors have sizes and no memory. A plan takes
// whole steps so, and counts what they would have needed.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "shard/device_stream.h"

namespace fsdp::shard::dry_run {

enum class As { kCpu, kGpu };  // whose habits are followed: what is kept between steps, and where

// While one is alive, this thread's models may be used on the meta device without values.
class Scope {
 public:
  explicit Scope(As as);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  int before_;
};

bool on();
bool as_gpu();

// Whether gradients leave between steps and buffers take turns, as on a device with streams.
inline bool like_gpu(at::Device device) {
  return has_streams(device) || (device.is_meta() && as_gpu());
}

// Products of matrices, convolutions and attention, which take the time of a step.
struct Product {
  double flops;
  double bytes;  // read and written
};
void count_product(const Product& product);  // of this thread; nothing where no scope is
std::vector<Product> take_products();        // since the last time

}  // namespace fsdp::shard::dry_run
