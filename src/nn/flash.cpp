#include "nn/flash.h"

#include <ATen/Context.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <atomic>
#include <optional>

#include "base/log.h"
#include "shard/dry_run.h"

namespace fsdp::nn {
namespace {

std::atomic<bool> flash_works{true};

bool is_for_flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const AttentionOptions& options) {
  int64_t head_dim = q.size(-1);
  bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  bool shapes = q.size(2) == k.size(2) && head_dim == v.size(-1) && head_dim % 8 == 0 &&
                head_dim <= 256 && q.size(0) > 0;
  const bool gpu = q.is_cuda() || (q.is_meta() && shard::dry_run::as_gpu());
  return flash_works && gpu && half && shapes && !options.mask.defined() && options.dropout == 0 &&
         at::globalContext().userEnabledFlashSDP();
}

at::Tensor flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const AttentionOptions& options) {
  if (q.is_meta())  // a plan: the same memory; its operations count as if a token saw all before it
    return at::scaled_dot_product_attention(q, k, v, std::nullopt, /*dropout_p=*/0.0,
                                            /*is_causal=*/true, options.scale,
                                            /*enable_gqa=*/k.size(1) != q.size(1));
  const bool packed = options.documents.defined();
  // [batch, tokens, heads, head_dim]; with documents the batch is one sequence.
  auto by_token = [&](const at::Tensor& x) {
    at::Tensor tokens = x.transpose(1, 2);
    return packed ? tokens.flatten(0, 1) : tokens;
  };
  auto starts = packed ? std::optional(options.documents) : std::nullopt;
  std::optional<int64_t> left, right;
  if (options.window > 0) {
    left = options.window - 1;
    right = 0;
  }
  at::Tensor out = std::get<0>(at::_flash_attention_forward(
      by_token(q), by_token(k), by_token(v), starts, starts, q.size(2), k.size(2),
      /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false, options.scale, left,
      right));
  if (packed) out = out.unflatten(0, {q.size(0), q.size(2)});
  return out.transpose(1, 2);
}

}  // namespace

at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const AttentionOptions& options, std::string& problem) {
  if (!is_for_flash(q, k, v, options)) return {};
  try {
    return flash(q, k, v, options);
  } catch (const c10::OutOfMemoryError&) {
    throw;  // not a failure of flash attention
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
    return {};
  }
}

void give_up_flash(const std::string& problem) {
  if (!problem.empty() && flash_works.exchange(false))
    log::warn("flash attention fails here, so windows and documents are computed in blocks: " +
              problem);
}

}  // namespace fsdp::nn
