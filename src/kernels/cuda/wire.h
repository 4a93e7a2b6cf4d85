// The CUDA kernels behind kernels/wire.h, as plain functions of pointers and sizes, and what calls
// them for tensors (wire_register.cpp).
//
// As in launch.h, each function only launches, on `stream`, and may be captured into a graph.
// Pointers are aligned to 16 bytes; numbers of a message are a multiple of 64.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/launch.h"

namespace fsdp::kernels::cuda {

enum class Code : int { kBFloat16, kFp8, kInt8 };

struct WireMessages {
  Code code = Code::kInt8;
  int64_t numel = 0;  // numbers of one message
  int64_t bytes = 0;  // of one message
};

// values [messages, numel] → bytes [messages, message.bytes]; not for kBFloat16.
void encode_wire(const void* values, Dtype dtype, uint8_t* bytes, int64_t messages,
                 const WireMessages& message, cudaStream_t stream);
// bytes [groups, messages, message.bytes] → sums [groups, numel], each divided by `divisor`.
void sum_wire(const uint8_t* bytes, void* sums, Dtype dtype, int64_t groups, int64_t messages,
              float divisor, const WireMessages& message, cudaStream_t stream);

}  // namespace fsdp::kernels::cuda
