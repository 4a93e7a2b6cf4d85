// Llama, operator by operator as bench/peers/peer_fsdp2.py computes it and in its order of
// construction, so that both begin with the same weights and lose the same.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/init.h>

#include <string>

#include "fsdp/error.h"
#include "fsdp/models.h"

namespace fsdp::models {
namespace {

torch::nn::Linear linear(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

}  // namespace

LlamaConfig checked(LlamaConfig config) {
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  if (config.ffn == 0) config.ffn = (8 * config.dim / 3 + 255) / 256 * 256;
  for (int64_t size : {config.vocab, config.dim, config.heads, config.kv_heads, config.ffn})
    if (size < 1) throw Error("a Llama's sizes must be positive.", "give 1 or more for each.");
  if (config.layers < 0) throw Error("a Llama cannot have fewer than 0 layers.", "");
  if (config.dim % config.heads != 0 || config.dim / config.heads % 2 != 0)
    throw Error("a Llama of dim " + std::to_string(config.dim) + " cannot have " +
                    std::to_string(config.heads) + " heads.",
                "dim / heads must be a whole, even number: rotary positions turn pairs.");
  if (config.heads % config.kv_heads != 0)
    throw Error(std::to_string(config.heads) + " heads cannot share " +
                    std::to_string(config.kv_heads) + " heads of keys and values.",
                "kv_heads must divide heads.");
  return config;
}

int64_t parameter_count(const LlamaConfig& config) {
  LlamaConfig c = checked(config);
  int64_t head_dim = c.dim / c.heads;
  int64_t attention = 2 * c.dim * c.dim + 2 * c.dim * c.kv_heads * head_dim;
  int64_t block = attention + 3 * c.dim * c.ffn + 2 * c.dim;
  return 2 * c.vocab * c.dim + c.layers * block + c.dim;
}

void init_weights(torch::nn::Module& module, double std) {
  torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
    if (parameter.dim() > 1)
      torch::nn::init::normal_(parameter, 0.0, std);
    else
      torch::nn::init::ones_(parameter);
  }
}

// --- RMSNorm ---

RMSNormImpl::RMSNormImpl(int64_t dim, double eps) : eps_(eps) {
  weight = register_parameter("weight", at::empty({dim}));
  reset_parameters();
}

void RMSNormImpl::reset_parameters() {
  torch::nn::init::ones_(weight);
}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  return at::rms_norm(x, weight.sizes(), weight, eps_);
}

// --- rotary positions ---

RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device) {
  auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  at::Tensor frequencies = 1.0 / at::pow(base, at::arange(0, head_dim, 2, options) / head_dim);
  at::Tensor half = at::outer(at::arange(tokens, options), frequencies);
  at::Tensor angles = at::cat({half, half}, -1);
  return {angles.cos(), angles.sin()};
}

at::Tensor rotate(const at::Tensor& x, const RotaryTables& tables) {
  at::Tensor cos = tables.cos.to(x.scalar_type()), sin = tables.sin.to(x.scalar_type());
  std::vector<at::Tensor> halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

// --- attention and feed-forward ---

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config)
    : heads_(config.heads), kv_heads_(config.kv_heads), head_dim_(config.dim / config.heads) {
  q = register_module("q", linear(config.dim, heads_ * head_dim_));
  k = register_module("k", linear(config.dim, kv_heads_ * head_dim_));
  v = register_module("v", linear(config.dim, kv_heads_ * head_dim_));
  o = register_module("o", linear(config.dim, config.dim));
}

at::Tensor LlamaAttentionImpl::forward(const at::Tensor& x, const RotaryTables& tables) {
  int64_t batch = x.size(0), tokens = x.size(1);
  auto split = [&](const at::Tensor& t, int64_t heads) {  // → [batch, heads, tokens, head_dim]
    return t.view({batch, tokens, heads, head_dim_}).transpose(1, 2);
  };
  at::Tensor queries = rotate(split(q(x), heads_), tables);
  at::Tensor keys = rotate(split(k(x), kv_heads_), tables);
  at::Tensor values = split(v(x), kv_heads_);
  at::Tensor mixed = at::scaled_dot_product_attention(
      queries, keys, values, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true,
      /*scale=*/std::nullopt, /*enable_gqa=*/kv_heads_ != heads_);
  return o(mixed.transpose(1, 2).reshape({batch, tokens, heads_ * head_dim_}));
}

SwiGLUImpl::SwiGLUImpl(int64_t dim, int64_t width) {
  gate = register_module("gate", linear(dim, width));
  up = register_module("up", linear(dim, width));
  down = register_module("down", linear(width, dim));
}

at::Tensor SwiGLUImpl::forward(const at::Tensor& x) {
  return down(at::silu(gate(x)) * up(x));
}

LlamaBlockImpl::LlamaBlockImpl(const LlamaConfig& config) {
  attn_norm = register_module("attn_norm", RMSNorm(config.dim, config.norm_eps));
  attn = register_module("attn", LlamaAttention(config));
  ffn_norm = register_module("ffn_norm", RMSNorm(config.dim, config.norm_eps));
  ffn = register_module("ffn", SwiGLU(config.dim, config.ffn));
}

at::Tensor LlamaBlockImpl::forward(const at::Tensor& x, const RotaryTables& tables) {
  at::Tensor attended = x + attn(attn_norm(x), tables);
  return attended + ffn(ffn_norm(attended));
}

// --- the whole ---

LlamaImpl::LlamaImpl(const LlamaConfig& config) : config_(checked(config)) {
  embedding = register_module("embedding", torch::nn::Embedding(config_.vocab, config_.dim));
  register_module("layers", layers);
  for (int64_t i = 0; i < config_.layers; ++i) layers->push_back(LlamaBlock(config_));
  norm = register_module("norm", RMSNorm(config_.dim, config_.norm_eps));
  head = register_module("head", linear(config_.dim, config_.vocab));
  apply([this](torch::nn::Module& module) { init_weights(module, config_.init_std); });
}

at::Tensor LlamaImpl::forward(const at::Tensor& ids, const at::Tensor& targets) {
  at::Tensor scores = logits(ids).to(at::kFloat);
  return at::cross_entropy_loss(scores.flatten(0, 1), targets.flatten());
}

at::Tensor LlamaImpl::logits(const at::Tensor& ids) {
  at::Tensor x = embedding(ids);
  const RotaryTables& tables = tables_for(x);
  for (const auto& layer : *layers) x = layer->as<LlamaBlock>()->forward(x, tables);
  return head(norm(x));
}

// Made at the first use, not in the constructor: there the model may be on its way to another
// device or have no memory at all.
const RotaryTables& LlamaImpl::tables_for(const at::Tensor& x) {
  int64_t tokens = x.size(1);
  const at::Tensor& cos = tables_.cos;
  if (!cos.defined() || cos.size(0) != tokens || cos.dtype() != x.dtype() ||
      cos.device() != x.device()) {
    c10::InferenceMode normal(false);  // what is made here must serve later training steps too
    torch::NoGradGuard no_grad;
    RotaryTables made =
        rotary_tables(tokens, config_.dim / config_.heads, config_.rope_base, x.device());
    tables_ = {made.cos.to(x.scalar_type()), made.sin.to(x.scalar_type())};
  }
  return tables_;
}

}  // namespace fsdp::models
