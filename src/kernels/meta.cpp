// The operators of ops.h on the meta device: they check arguments and compute sizes, not values. A
// dry run uses them.
#include <torch/library.h>

#include "kernels/outputs.h"

namespace fsdp::kernels::meta {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;

Tensor sum_of(const Tensor& x, const Optional& residual) {
  return empty_if(residual && residual->defined(), x);
}

std::tuple<Tensor, Tensor, Tensor> rms_norm(const Tensor& x, const Optional& residual,
                                            const Tensor& weight, double eps) {
  check_rms_norm(x, residual, weight, eps);
  return {empty_contiguous(x), sum_of(x, residual), empty_rows(x)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Optional& residual,
                                                      const Tensor& weight, const Optional& bias,
                                                      double eps) {
  check_layer_norm(x, residual, weight, bias, eps);
  return {empty_contiguous(x), sum_of(x, residual), empty_rows(x), empty_rows(x)};
}

Two rms_norm_backward(const Tensor& grad, const Optional& grad_sum, const Tensor& x,
                      const Tensor& rstd, const Tensor& weight, const Optional& grad_weight,
                      bool accumulate, bool want_out) {
  check_rms_norm_backward(grad, grad_sum, x, rstd, weight, grad_weight, accumulate, want_out);
  return {empty_contiguous(x), empty_if(want_out, x)};
}

Two layer_norm_backward(const Tensor& grad, const Optional& grad_sum, const Tensor& x,
                        const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                        const Optional& bias, const Optional& grad_weight,
                        const Optional& grad_bias, bool accumulate, bool want_out) {
  check_layer_norm_backward(grad, grad_sum, x, mean, rstd, weight, bias, grad_weight, grad_bias,
                            accumulate, want_out);
  return {empty_contiguous(x), empty_if(want_out, x)};
}

void rope_(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t heads, bool inverse) {
  check_rope_(x, cos, sin, heads, inverse);
}

Tensor rope_pack(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                 const Tensor& sin) {
  return empty_packed(q, check_rope_pack(q, k, v, cos, sin));
}

Tensor swiglu(const Tensor& gate_up) {
  return empty_columns(gate_up, check_swiglu(gate_up).dim);
}

Two swiglu_backward(const Tensor& grad, const Tensor& gate_up, bool want_out) {
  check_swiglu_backward(grad, gate_up, want_out);
  return {empty_contiguous(gate_up), empty_if(want_out, grad)};
}

Tensor gelu(const Tensor& x, bool tanh) {
  check_gelu(x, tanh);
  return empty_contiguous(x);
}

Two gelu_backward(const Tensor& grad, const Tensor& x, bool tanh, bool want_out) {
  check_gelu_backward(grad, x, tanh, want_out);
  return {empty_contiguous(x), empty_if(want_out, x)};
}

Two cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index) {
  check_cross_entropy(logits, targets, ignore_index);
  return {empty_rows(logits), empty_rows(logits)};
}

Tensor cross_entropy_(const Tensor& logits, const Tensor& targets, const Tensor& scale,
                      int64_t ignore_index) {
  check_cross_entropy_(logits, targets, scale, ignore_index);
  return empty_rows(logits);
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& logits, const Tensor& targets,
                              const Tensor& log_sum, int64_t ignore_index) {
  check_cross_entropy_backward(grad, logits, targets, log_sum, ignore_index);
  return empty_contiguous(logits);
}

void embedding_backward(const Tensor& grad, const Tensor& ids, const Tensor& grad_weight,
                        int64_t padding_idx, bool accumulate) {
  check_embedding_backward(grad, ids, grad_weight, padding_idx, accumulate);
}

void fill_random_(const Tensor& out, bool normal, double a, double b, int64_t key, int64_t first) {
  check_fill_random_(out, normal, a, b, key, first);
}

void scale_into(const Tensor& target, const Tensor& source, const Optional& scale,
                bool accumulate) {
  check_scale_into(target, source, scale, accumulate);
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, Meta, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("layer_norm", layer_norm);
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("layer_norm_backward", layer_norm_backward);
  m.impl("rope_", rope_);
  m.impl("rope_pack", rope_pack);
  m.impl("swiglu", swiglu);
  m.impl("swiglu_backward", swiglu_backward);
  m.impl("gelu", gelu);
  m.impl("gelu_backward", gelu_backward);
  m.impl("cross_entropy", cross_entropy);
  m.impl("cross_entropy_", cross_entropy_);
  m.impl("cross_entropy_backward", cross_entropy_backward);
  m.impl("embedding_backward", embedding_backward);
  m.impl("fill_random_", fill_random_);
  m.impl("scale_into", scale_into);
}

}  // namespace fsdp::kernels::meta
