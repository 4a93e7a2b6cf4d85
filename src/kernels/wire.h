// Messages between ranks: parameters and gradients in fewer bits than they are computed in
// (fsdp::Wire).
//
// A message of n numbers is n codes of one byte, in order, then one float32 scale for each block of
// 256 numbers, then padding to 16 bytes. With Wire::BF16 it is n bfloat16 numbers. n is a multiple
// of 64. Rounding is to nearest even; with m the block's largest magnitude and x a number in it:
//
//   INT8   scale m / 127; off by at most m / 254 (and the rounding of float32)
//   FP8    the least power of two that brings m to at most 448; off by at most x / 16, or m / 2^17
//          if that is more
//
// A block in which no magnitude reaches 2^-100 becomes zeros. One that has a number that isn't
// finite becomes NaNs. The CPU and CUDA give the same bits. On the meta device nothing happens.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "fsdp/sharding.h"

namespace fsdp::kernels {

constexpr int64_t kWireBlock = 256;  // numbers that share a scale

int64_t wire_bytes(int64_t numel, Wire wire);  // of a message; a multiple of 16

// values [messages * n] float32, bfloat16 or float16 → bytes [messages * wire_bytes(n)]: each part
// of n numbers becomes a message.
void encode_wire(const at::Tensor& values, const at::Tensor& bytes, int64_t messages, Wire wire);
// The other way round.
void decode_wire(const at::Tensor& bytes, const at::Tensor& values, int64_t messages, Wire wire);
// sum [n] float32, bfloat16 or float16: the messages' sum divided by `divisor`, added in order in
// float32.
void sum_wire(const at::Tensor& bytes, const at::Tensor& sum, int64_t messages, float divisor,
              Wire wire);

// Of `groups` times `messages` messages, each group's sum, one after the other.
struct WireSum {
  int64_t groups, messages;
  float divisor;
};

// The implementations that these choose from, by device.
namespace cpu {
void encode_wire(const at::Tensor& values, const at::Tensor& bytes, int64_t messages, Wire wire);
void sum_wire(const at::Tensor& bytes, const at::Tensor& sums, const WireSum& what, Wire wire);
}  // namespace cpu

}  // namespace fsdp::kernels
