// Allocates the outputs of the operators of ops.h: sizes and dtypes, the same for every device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/checks.h"

namespace fsdp::kernels {

// An output that wasn't requested.
inline at::Tensor no_output(const at::Tensor& like) {
  return at::empty({0}, like.options());
}

// One number per row of x (with any number of columns).
inline at::Tensor empty_rows(const at::Tensor& x) {
  return at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(row_type(x.scalar_type())));
}

// x's rows with `columns` columns.
inline at::Tensor empty_columns(const at::Tensor& x, int64_t columns) {
  auto sizes = x.sizes().vec();
  sizes.back() = columns;
  return at::empty(sizes, x.options());
}

// Contiguous, even if x is a slice.
inline at::Tensor empty_contiguous(const at::Tensor& x) {
  return at::empty(x.sizes(), x.options());
}

inline at::Tensor empty_if(bool wanted, const at::Tensor& like) {
  return wanted ? empty_contiguous(like) : no_output(like);
}

inline at::Tensor empty_packed(const at::Tensor& like, const RopeSizes& size) {
  return at::empty({size.batch, size.tokens, (size.heads + 2 * size.kv_heads) * size.head_dim},
                   like.options());
}

}  // namespace fsdp::kernels
