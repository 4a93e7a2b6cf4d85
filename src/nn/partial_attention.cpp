#include "nn/partial_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

namespace fsdp::nn {
namespace {

// Keys or values for each head of the queries. A plan needs no copies: it is of a GPU, most often.
at::Tensor for_heads(const at::Tensor& x, int64_t heads) {
  if (x.size(1) == heads || x.is_meta()) return x;
  return x.unsqueeze(2).expand({-1, -1, heads / x.size(1), -1, -1}).flatten(1, 2);
}

// The sum over the heads that shared one: the gradient of for_heads().
at::Tensor of_shared(const at::Tensor& gradient, int64_t kv_heads) {
  if (gradient.size(1) == kv_heads) return gradient;
  return gradient.unflatten(1, {kv_heads, -1}).sum(2);
}

bool has_flash(const at::Tensor& q) {
  const bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  return q.is_cuda() && half && q.size(3) % 8 == 0 && q.size(3) <= 256;
}

// [batch, tokens, heads, width], as flash attention has it, and back.
at::Tensor by_tokens(const at::Tensor& x) {
  return x.transpose(1, 2);
}

at::Tensor widened(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat);
}

at::Tensor scores_of(const at::Tensor& q, const at::Tensor& k, bool causal,
                     std::optional<double> scale) {
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
  at::Tensor scores = widened(at::matmul(q, k.transpose(2, 3))) * factor;
  if (!causal) return scores;
  const at::Tensor later =
      at::ones({q.size(2), k.size(2)}, scores.options().dtype(at::kBool)).triu(1);
  return scores.masked_fill(later, -std::numeric_limits<double>::infinity());
}

}  // namespace

PartialAttention partial_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   bool causal, std::optional<double> scale) {
  if (has_flash(q)) {
    const auto done = at::_flash_attention_forward(
        by_tokens(q), by_tokens(k), by_tokens(v), /*cum_seq_q=*/std::nullopt,
        /*cum_seq_k=*/std::nullopt, q.size(2), k.size(2), /*dropout_p=*/0.0, causal,
        /*return_debug_mask=*/false, scale);
    return {by_tokens(std::get<0>(done)), std::get<1>(done)};
  }
  const at::Tensor keys = for_heads(k, q.size(1)), values = for_heads(v, q.size(1));
  if (!q.is_cuda()) {
    auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, /*dropout_p=*/0.0, causal, /*attn_mask=*/{}, scale);
    return {out, lse};
  }
  const at::Tensor scores = scores_of(q, keys, causal, scale);
  const at::Tensor lse = scores.logsumexp({-1});
  return {at::matmul((scores - lse.unsqueeze(-1)).exp().to(v.scalar_type()), values), lse};
}

AttentionGradients partial_attention_backward(const at::Tensor& grad, const at::Tensor& q,
                                              const at::Tensor& k, const at::Tensor& v,
                                              const at::Tensor& out, const at::Tensor& lse,
                                              bool causal, std::optional<double> scale) {
  if (has_flash(q)) {
    const at::Tensor none, random = at::zeros({2}, q.options().dtype(at::kUInt64));
    auto [of_q, of_k, of_v] = at::_flash_attention_backward(
        by_tokens(grad), by_tokens(q), by_tokens(k), by_tokens(v), by_tokens(out), lse.contiguous(),
        none, none, q.size(2), k.size(2), /*dropout_p=*/0.0, causal, random, none, scale);
    return {by_tokens(of_q), by_tokens(of_k), by_tokens(of_v)};
  }
  const int64_t kv_heads = k.size(1);
  const at::Tensor keys = for_heads(k, q.size(1)), values = for_heads(v, q.size(1));
  if (!q.is_cuda()) {
    auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, keys, values, out, lse, /*dropout_p=*/0.0, causal, /*attn_mask=*/{}, scale);
    return {of_q, of_shared(of_k, kv_heads), of_shared(of_v, kv_heads)};
  }
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
  const at::Tensor chances = (scores_of(q, keys, causal, scale) - lse.unsqueeze(-1)).exp();
  const at::Tensor sums = (widened(grad) * widened(out)).sum(-1, /*keepdim=*/true);
  const at::Tensor of_scores =
      (chances * (widened(at::matmul(grad, values.transpose(2, 3))) - sums) * factor)
          .to(q.scalar_type());
  return {at::matmul(of_scores, keys),
          of_shared(at::matmul(of_scores.transpose(2, 3), q), kv_heads),
          of_shared(at::matmul(chances.to(q.scalar_type()).transpose(2, 3), grad), kv_heads)};
}

}  // namespace fsdp::nn
