// Products of groups of rows, each with a matrix of its own: the experts of a mixture.
//
// `ends` [groups] int32 says where each group of rows ends; the last is the number of rows, and
// groups may be empty. Floating-point tensors have one dtype unless noted and are contiguous.
//
// On CUDA in bfloat16, with sizes that are multiples of 8, one kernel computes all groups and reads
// `ends` on the device. Elsewhere there is one product per group; on CUDA the host then waits for
// `ends`.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::kernels {

// x [rows, in], weight [groups, out, in] → [rows, out]: each row times its group's matrix,
// transposed. With `backward` the matrix as it is: x [rows, out] → [rows, in].
at::Tensor grouped_mm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ends,
                      bool backward);

// grad [rows, out], x [rows, in], target [groups, out, in] of any floating-point dtype: each
// group's gradᵀ · x, added to the target with `accumulate`.
void grouped_mm_into(const at::Tensor& target, const at::Tensor& grad, const at::Tensor& x,
                     const at::Tensor& ends, bool accumulate);

}  // namespace fsdp::kernels
