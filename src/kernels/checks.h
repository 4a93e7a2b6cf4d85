// Checks of the tensors given to the operators of ops.h, the same on every device. Each operator's
// function here takes the operator's arguments (in the C++ signature that a registered kernel must
// have; only the result differs), throws an Error that names the tensor that doesn't fit, and
// returns the sizes a kernel works with.
//
// Float64 is accepted on the CPU and the meta device, and computed in float64 there: rstd, losses
// and so on are then float64.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fsdp::kernels {

// An optional argument in the form of ops.h: undefined if it wasn't given.
inline at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor ? *tensor : at::Tensor();
}

// The dtype of per-row numbers (rstd, losses, …) for tensors of `type`.
inline at::ScalarType row_type(at::ScalarType type) {
  return type == at::ScalarType::Double ? at::ScalarType::Double : at::ScalarType::Float;
}

struct RowSizes {
  int64_t rows;
  int64_t dim;  // elements per row; for swiglu, of the result
};

RowSizes check_rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                        const at::Tensor& weight, double eps);
RowSizes check_layer_norm(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                          const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                          double eps);
RowSizes check_rms_norm_backward(const at::Tensor& grad, const std::optional<at::Tensor>& grad_sum,
                                 const at::Tensor& x, const at::Tensor& rstd,
                                 const at::Tensor& weight,
                                 const std::optional<at::Tensor>& grad_weight, bool accumulate,
                                 bool want_out);
RowSizes check_layer_norm_backward(const at::Tensor& grad,
                                   const std::optional<at::Tensor>& grad_sum, const at::Tensor& x,
                                   const at::Tensor& mean, const at::Tensor& rstd,
                                   const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                   const std::optional<at::Tensor>& grad_weight,
                                   const std::optional<at::Tensor>& grad_bias, bool accumulate,
                                   bool want_out);

struct RopeSizes {
  int64_t batch;
  int64_t tokens;
  int64_t heads;      // heads to rotate
  int64_t kv_heads;   // of rope_pack; 0 for rope_
  int64_t head_dim;   // even
  int64_t cos_batch;  // elements between sequences of the batch in cos and sin; 0 if shared
};

RopeSizes check_rope_(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                      int64_t heads, bool inverse);
RopeSizes check_rope_pack(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& cos, const at::Tensor& sin);

RowSizes check_swiglu(const at::Tensor& gate_up);
RowSizes check_swiglu_backward(const at::Tensor& grad, const at::Tensor& gate_up, bool want_out);
int64_t check_gelu(const at::Tensor& x, bool tanh);  // elements
int64_t check_gelu_backward(const at::Tensor& grad, const at::Tensor& x, bool tanh, bool want_out);

struct LogitSizes {
  int64_t rows;
  int64_t vocab;
  int64_t row_stride;  // elements from one row of the logits to the next
};

LogitSizes check_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                               int64_t ignore_index);
LogitSizes check_cross_entropy_(const at::Tensor& logits, const at::Tensor& targets,
                                const at::Tensor& scale, int64_t ignore_index);
LogitSizes check_cross_entropy_backward(const at::Tensor& grad, const at::Tensor& logits,
                                        const at::Tensor& targets, const at::Tensor& log_sum,
                                        int64_t ignore_index);

RowSizes check_embedding_backward(const at::Tensor& grad, const at::Tensor& ids,
                                  const at::Tensor& grad_weight, int64_t padding_idx,
                                  bool accumulate);
int64_t check_fill_random_(const at::Tensor& out, bool normal, double a, double b, int64_t key,
                           int64_t first);  // elements
int64_t check_scale_into(const at::Tensor& target, const at::Tensor& source,
                         const std::optional<at::Tensor>& scale, bool accumulate);  // elements

}  // namespace fsdp::kernels
