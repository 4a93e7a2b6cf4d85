// Attention of some keys, to be combined with that of others by the logsumexp of its scores.
//
// q [batch, heads, queries, width], k and v [batch, kv_heads, keys, width]; lse [batch, heads,
// queries], in float32 or float64. On the CPU and on CUDA in half precision, flash attention
// computes it; elsewhere the scores are held.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fsdp::nn {

struct PartialAttention {
  at::Tensor out, lse;
};
PartialAttention partial_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   bool causal, std::optional<double> scale);

struct AttentionGradients {
  at::Tensor q, k, v;
};
// `out` and `lse` are those of all keys: then so are the gradients, these keys' part of them.
AttentionGradients partial_attention_backward(const at::Tensor& grad, const at::Tensor& q,
                                              const at::Tensor& k, const at::Tensor& v,
                                              const at::Tensor& out, const at::Tensor& lse,
                                              bool causal, std::optional<double> scale);

}  // namespace fsdp::nn
