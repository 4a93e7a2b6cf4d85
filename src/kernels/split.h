// A float32 number held in two halves of 16 bits: a bfloat16 that can be computed with, and what is
// missing to the whole. Exact: joining gives every bit back.
//
// The bfloat16 is the float32 rounded to nearest, ties away from zero (ties to even could not be
// undone with 16 bits); the rest is the distance of the two in units of the float32's last place,
// which fits a signed 16-bit number. A NaN becomes one canonical NaN.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::kernels {

// whole [n] float32 → high [n] bfloat16, rest [n] int16; any device, in stream order. high may be
// read by others only after that.
void split_float(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest);
at::Tensor join_float(const at::Tensor& high, const at::Tensor& rest);  // [n] float32

// The implementations behind them, which choose by device. `aten` works on any device, CPU too.
namespace cpu {
void split_float(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest);
void join_float(const at::Tensor& high, const at::Tensor& rest, const at::Tensor& whole);
}  // namespace cpu

namespace aten {
void split_float(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest);
at::Tensor join_float(const at::Tensor& high, const at::Tensor& rest);
}  // namespace aten

}  // namespace fsdp::kernels
