// Rotary position embeddings, and the choice of an attention kernel.
#include <ATen/Context.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <string>

#include "base/format.h"
#include "base/log.h"
#include "fsdp/error.h"
#include "fsdp/nn/functional.h"
#include "kernels/fp8.h"
#include "kernels/ops.h"
#include "nn/context_attention.h"
#include "nn/documents.h"
#include "nn/known_amax.h"
#include "nn/node.h"
#include "nn/window.h"

namespace fsdp::nn {
namespace {

// RoPE with torch's operators. x [batch, heads, tokens, head_dim]
at::Tensor plain_rope(const at::Tensor& x, at::Tensor cos, at::Tensor sin) {
  if (cos.dim() == 3) {
    cos = cos.unsqueeze(1);
    sin = sin.unsqueeze(1);
  }
  std::vector<at::Tensor> halves = x.chunk(2, -1);
  return x * cos.to(x.scalar_type()) +
         at::cat({-halves[1], halves[0]}, -1) * sin.to(x.scalar_type());
}

// Input: x. Saved: cos, sin.
struct RopeNode : Node {
  int64_t heads = 0;

  std::string name() const override { return "fsdp::rope"; }

  Tensors backward(const Tensors& gradients) override {
    Tensors tables = saved();
    at::Tensor grad = gradients[0].clone(at::MemoryFormat::Contiguous);
    kernels::rope_(grad.flatten(2), tables[0], tables[1], heads, /*inverse=*/true);
    return {grad};
  }
};

Heads cut(const at::Tensor& qkv, int64_t heads, int64_t kv_heads) {
  int64_t batch = qkv.size(0), tokens = qkv.size(1);
  int64_t head_dim = qkv.size(2) / (heads + 2 * kv_heads);
  shard::ViewsOnly views;
  auto part = [&](int64_t first, int64_t count) {
    return qkv.narrow(2, first * head_dim, count * head_dim)
        .view({batch, tokens, count, head_dim})
        .transpose(1, 2);
  };
  return {part(0, heads), part(heads, kv_heads), part(heads + kv_heads, kv_heads)};
}

// Input: qkv. Outputs: q, k, v. Saved: cos, sin.
struct RopeHeadsNode : Node {
  int64_t batch = 0, tokens = 0, head_dim = 0, heads = 0, kv_heads = 0;
  at::TensorOptions options;

  std::string name() const override { return "fsdp::rope_heads"; }

  Tensors backward(const Tensors& gradients) override {
    Tensors tables = saved();
    auto whole = [&](size_t i, int64_t count) {
      if (!gradients[i].defined()) return at::zeros({batch, count, tokens, head_dim}, options);
      return gradients[i].stride(-1) == 1 ? gradients[i] : gradients[i].contiguous();
    };
    const at::Tensor q = whole(0, heads), k = whole(1, kv_heads), v = whole(2, kv_heads);
    if (!KnownAmax::of_thread().wanted() || q.scalar_type() == at::kDouble)
      return {kernels::rope_pack(q, k, v, tables[0], tables[1])};
    auto [grad, amax] = kernels::fp8::rope_pack(q, k, v, tables[0], tables[1]);
    KnownAmax::of_thread().remember(grad, amax);
    return {grad};
  }
};

// --- attention ---

std::atomic<bool> cudnn_works{true};

bool wants_gradient(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return at::GradMode::is_enabled() &&
         (q.requires_grad() || k.requires_grad() || v.requires_grad());
}

// Whether cuDNN supports the inputs and is faster. It builds a plan per shape, which takes longer
// than a forward pass over many sequences, so it is used only for training and large shapes.
bool is_for_cudnn(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const AttentionOptions& options) {
  int64_t head_dim = q.size(-1);
  bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  bool shapes = q.dim() == 4 && head_dim == v.size(-1) && head_dim >= 32 && head_dim <= 128 &&
                head_dim % 8 == 0 && q.size(2) == k.size(2) && q.size(2) >= 64 && q.size(0) > 0;
  const at::Context& context = at::globalContext();
  return cudnn_works && q.is_cuda() && half && shapes && !options.mask.defined() &&
         options.dropout == 0 && wants_gradient(q, k, v) && context.userEnabledCuDNNSDP() &&
         !context.deterministicAlgorithms();
}

}  // namespace

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  if (!has_kernels(x)) return plain_rope(x.transpose(1, 2), cos, sin).transpose(1, 2);
  at::Tensor out;
  {
    Unrecorded unrecorded;
    out = x.clone(at::MemoryFormat::Contiguous);
    kernels::rope_(out.flatten(2), cos.contiguous(), sin.contiguous(), x.size(2), false);
  }
  if (auto node = record<RopeNode>({x})) {
    node->heads = x.size(2);
    node->save({cos.contiguous(), sin.contiguous()});
    node->returns(out);
  }
  return out;
}

Heads rope_heads(const at::Tensor& given, const at::Tensor& cos, const at::Tensor& sin,
                 int64_t heads, int64_t kv_heads) {
  if (given.dim() != 3 || heads < 1 || kv_heads < 1 || given.size(2) % (heads + 2 * kv_heads) != 0)
    throw Error(
        formatted("rope_heads can't split a tensor of {} dimensions into {} + 2 · {} heads.",
                  given.dim(), heads, kv_heads),
        "pass a tensor [batch, tokens, (heads + 2 * kv_heads) * head_dim].");
  if (!has_kernels(given)) {
    Heads all = cut(given, heads, kv_heads);
    return {plain_rope(all.q, cos, sin), plain_rope(all.k, cos, sin), all.v};
  }
  at::Tensor qkv = given.contiguous();
  // Don't overwrite a leaf: it belongs to the caller.
  if (qkv.is_leaf() && qkv.requires_grad()) qkv = qkv.clone();
  at::Tensor c = cos.contiguous(), s = sin.contiguous();
  Heads out;
  {
    Unrecorded unrecorded;
    kernels::rope_(qkv, c, s, heads + kv_heads, /*inverse=*/false);
    out = cut(qkv, heads, kv_heads);
    // One version counter, as for autograd's own views: a write to one changes their common memory.
    // Not the counter of qkv, which may be a part of a tensor that is rotated again.
    for (at::Tensor* part : {&out.k, &out.v})
      torch::autograd::impl::set_version_counter(*part,
                                                 torch::autograd::impl::version_counter(out.q));
  }
  if (auto node = record<RopeHeadsNode>({qkv})) {
    node->batch = qkv.size(0);
    node->tokens = qkv.size(1);
    node->head_dim = out.q.size(3);
    node->heads = heads;
    node->kv_heads = kv_heads;
    node->options = at::TensorOptions().dtype(qkv.scalar_type()).device(qkv.device());
    node->save({c, s});
    node->returns(out.q);
    node->returns(out.k);
    node->returns(out.v);
  }
  return out;
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options) {
  if (options.context) return context_attention(q, k, v, options);
  if (options.documents.defined()) return document_attention(q, k, v, options);
  if (options.window > 0 && options.window < k.size(2)) return window_attention(q, k, v, options);
  std::string problem;
  if (is_for_cudnn(q, k, v, options)) {
    try {
      return std::get<0>(at::_scaled_dot_product_cudnn_attention(
          q, k, v, /*attn_bias=*/std::nullopt, /*compute_log_sumexp=*/true, /*dropout_p=*/0.0,
          options.causal, /*return_debug_mask=*/false, options.scale));
    } catch (const c10::OutOfMemoryError&) {
      throw;  // not a failure of cuDNN
    } catch (const c10::Error& error) {
      problem = error.what_without_backtrace();
    }
  }
  bool grouped = k.size(1) != q.size(1);
  auto mask = options.mask.defined() ? std::optional(options.mask) : std::nullopt;
  at::Tensor out = at::scaled_dot_product_attention(q, k, v, mask, options.dropout, options.causal,
                                                    options.scale, grouped);
  // Torch's attention worked, so the inputs are fine and cuDNN isn't.
  if (!problem.empty() && cudnn_works.exchange(false))
    log::warn("cuDNN's attention fails here, so torch chooses another: " + problem);
  return out;
}

at::Tensor rope_attention(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                          int64_t heads, int64_t kv_heads, const AttentionOptions& options) {
  Heads all = rope_heads(qkv, cos, sin, heads, kv_heads);
  at::Tensor out = attention(all.q, all.k, all.v, options);
  {
    shard::ViewsOnly views;
    out = out.transpose(1, 2);
    if (out.is_contiguous()) return out.flatten(2);
  }
  return out.flatten(2);  // a copy
}

}  // namespace fsdp::nn
