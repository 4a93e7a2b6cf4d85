// Host memory that a device copies from and to. Every large piece in the program comes from here.
//
// The driver's own way of allocating such memory (cudaHostAlloc) takes half a second per gigabyte,
// and every launch waits meanwhile. This takes a twentieth of it: huge pages, touched by all
// threads, then registered with the driver.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::shard {

// Bytes, all zero: pinned if the device has streams. Copies to and from it may be asynchronous; who
// frees it must have waited for them.
at::Tensor pinned_memory(int64_t bytes, at::Device device);

}  // namespace fsdp::shard
