// A float32 number stored as two 16-bit halves: a bfloat16 to compute with, and the rest. Exact:
// joining them restores every bit.
//
// The bfloat16 is the float32 rounded to nearest, ties away from zero (ties to even couldn't be
// undone with 16 bits); the rest is the difference in units of the float32's last place, which fits
// a signed 16-bit number. Every NaN becomes the same canonical NaN.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::kernels {

// whole [n] float32 → high [n] bfloat16, rest [n] int16; any device, in stream order. Nothing else
// may read `high` before that.
void split_float(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest);
at::Tensor join_float(const at::Tensor& high, const at::Tensor& rest);  // [n] float32

// The implementations that these choose from, by device. `aten` works on any device, including the
// CPU.
namespace cpu {
void split_float(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest);
void join_float(const at::Tensor& high, const at::Tensor& rest, const at::Tensor& whole);
}  // namespace cpu

namespace aten {
void split_float(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest);
at::Tensor join_float(const at::Tensor& high, const at::Tensor& rest);
}  // namespace aten

}  // namespace fsdp::kernels
