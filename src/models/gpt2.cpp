// GPT-2 as Hugging Face computes it, with the same names and shapes.
#include "fsdp/models/gpt2.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/functional.h"
#include "fsdp/recompute.h"

namespace fsdp::models {
namespace {

at::Tensor dropped(const at::Tensor& x, double share, bool training) {
  return training && share > 0 ? at::dropout(x, share, /*train=*/true) : x;
}

nn::LayerNorm norm(const GPT2Config& config) {
  return nn::LayerNorm(torch::nn::LayerNormOptions({config.dim}).eps(config.norm_eps));
}

// Normalizes the stream and applies `conv`.
nn::NormedLinears norm_conv(const Stream& stream, const nn::LayerNorm& norm, Conv1D conv) {
  if (conv->uses_adapter()) {  // it reads what is normalized, too
    const nn::NormedSum normed =
        nn::add_layer_norm(stream.x, stream.delta, norm->weight, norm->bias, norm->options.eps());
    return {conv(normed.out), normed.sum};
  }
  return nn::layer_norm_linears(stream.x, stream.delta, norm->weight, norm->bias,
                                norm->options.eps(), {conv->weight}, {conv->bias},
                                nn::WeightLayout::kInOut);
}

// The weights of one block that take part in matrix products.
int64_t gpt2_products(const GPT2Config& config) {
  return 4 * config.dim * config.dim + 2 * config.dim * config.ffn;
}

}  // namespace

GPT2Config checked(GPT2Config config) {
  for (int64_t size : {config.vocab, config.max_tokens, config.dim, config.heads, config.layers,
                       config.ffn})  // bounded so that no product overflows
    if (size > 1 << 24)
      throw Error(formatted("a GPT-2 can't have a size of {}.", size),
                  "check the numbers in the config; each must be at most 16777216.");
  if (config.ffn == 0) config.ffn = 4 * config.dim;
  for (int64_t size : {config.vocab, config.max_tokens, config.dim, config.heads, config.ffn})
    if (size < 1) throw Error("a GPT-2's sizes must be positive.", "set each to 1 or more.");
  if (config.layers < 0)
    throw Error("a GPT-2 can't have fewer than 0 layers.", "set layers to 0 or more.");
  if (config.dim % config.heads != 0)
    throw Error(formatted("a GPT-2 of dim {} can't have {} heads.", config.dim, config.heads),
                "heads must divide dim.");
  for (double share : {config.embd_dropout, config.attn_dropout, config.resid_dropout})
    if (!(share >= 0 && share < 1))
      throw Error(formatted("a GPT-2 can't have a dropout of {:f}.", share),
                  "set each dropout to at least 0 and below 1.");
  if (!(config.norm_eps >= 0) || !(config.init_std >= 0))
    throw Error("a GPT-2's norm_eps and init_std must not be negative.",
                "the usual values are 1e-5 and 0.02.");
  return config;
}

int64_t parameter_count(const GPT2Config& config) {
  GPT2Config c = checked(config);
  int64_t biases = 3 * c.dim + c.dim + c.ffn + c.dim;
  int64_t block = gpt2_products(c) + biases + 4 * c.dim;
  int64_t embeddings = (c.tied ? 1 : 2) * c.vocab * c.dim + c.max_tokens * c.dim;
  return embeddings + c.layers * block + 2 * c.dim;
}

// --- the parts ---

Conv1DImpl::Conv1DImpl(int64_t in, int64_t out) {
  weight = register_parameter("weight", at::empty({in, out}));
  bias = register_parameter("bias", at::empty({out}));
  torch::nn::init::normal_(weight, 0.0, 0.02);
  torch::nn::init::zeros_(bias);
}

at::Tensor Conv1DImpl::forward(const at::Tensor& x) {
  const at::Tensor out = nn::linear(x, weight, bias, nn::WeightLayout::kInOut);
  return uses_adapter() ? out + adapter(x) : out;
}

nn::Adaptable::Product Conv1DImpl::product() {
  return {*this, weight, weight.size(0), weight.size(1)};
}

GPT2AttentionImpl::GPT2AttentionImpl(const GPT2Config& config, int64_t layer)
    : heads_(config.heads),
      layer_(layer),
      attn_dropout_(config.attn_dropout),
      resid_dropout_(config.resid_dropout) {
  c_attn = register_module("c_attn", Conv1D(config.dim, 3 * config.dim));
  c_proj = register_module("c_proj", Conv1D(config.dim, config.dim));
}

at::Tensor GPT2AttentionImpl::forward(const at::Tensor& qkv, const Attending& attending) {
  auto split = [&](const at::Tensor& t) {  // → [batch, heads, tokens, head_dim]
    return t.unflatten(-1, {heads_, -1}).transpose(1, 2);
  };
  std::vector<at::Tensor> parts = qkv.chunk(3, -1);
  at::Tensor mixed = attend(split(parts[0]), split(parts[1]), split(parts[2]), attending, layer_,
                            {.dropout = is_training() ? attn_dropout_ : 0.0});
  return dropped(c_proj(mixed.transpose(1, 2).flatten(2)), resid_dropout_, is_training());
}

GPT2MLPImpl::GPT2MLPImpl(const GPT2Config& config) : dropout_(config.resid_dropout) {
  c_fc = register_module("c_fc", Conv1D(config.dim, config.ffn));
  c_proj = register_module("c_proj", Conv1D(config.ffn, config.dim));
}

at::Tensor GPT2MLPImpl::forward(const at::Tensor& x) {
  const at::Tensor out = c_proj->uses_adapter() ? c_proj(nn::gelu(x, "tanh"))
                                                : nn::gelu_linear(x, c_proj->weight, c_proj->bias,
                                                                  "tanh", nn::WeightLayout::kInOut);
  return dropped(out, dropout_, is_training());
}

GPT2BlockImpl::GPT2BlockImpl(const GPT2Config& config, int64_t layer) {
  ln_1 = register_module("ln_1", norm(config));
  attn = register_module("attn", GPT2Attention(config, layer));
  ln_2 = register_module("ln_2", norm(config));
  mlp = register_module("mlp", GPT2MLP(config));
}

Stream GPT2BlockImpl::forward(const Stream& stream, const Attending& attending) {
  auto [qkv, x] = norm_conv(stream, ln_1, attn->c_attn);
  const at::Tensor attended = attn(qkv, attending);
  if (tile == 0) {
    auto [wide, sum] = norm_conv({x, attended}, ln_2, mlp->c_fc);
    return {sum, mlp(wide)};
  }
  const auto feed_forward = [&](const at::Tensor& rows) {
    return mlp(norm_conv({rows}, ln_2, mlp->c_fc).out);
  };
  const at::Tensor sum = x + attended;
  return {sum, tiled(feed_forward, sum, tile)};
}

// --- the model ---

GPT2ModelImpl::GPT2ModelImpl(const GPT2Config& config) : config_(config) {
  wte = register_module("wte", nn::Embedding(config.vocab, config.dim));
  wpe = register_module("wpe", nn::Embedding(config.max_tokens, config.dim));
  register_module("h", h);
  for (int64_t i = 0; i < config.layers; ++i) h->push_back(GPT2Block(config, i));
  ln_f = register_module("ln_f", norm(config));
}

at::Tensor GPT2ModelImpl::forward(const TextInputs& inputs) {
  Attending attending = plan_attention(inputs, config_.layers, config_.max_tokens);
  int64_t past = attending.past, tokens = inputs.ids.size(1);
  at::Tensor positions = attending.positions;
  if (!positions.defined()) positions = at::arange(past, past + tokens, inputs.ids.options());
  Stream stream{dropped(wte(inputs.ids) + wpe(positions), config_.embd_dropout, is_training())};
  for (const auto& block : *h) stream = block->as<GPT2Block>()->forward(stream, attending);
  if (inputs.cache) inputs.cache->advance(tokens);
  return nn::add_layer_norm(stream.x, stream.delta, ln_f->weight, ln_f->bias, config_.norm_eps).out;
}

GPT2Impl::GPT2Impl(const GPT2Config& config) : config_(checked(config)) {
  transformer = register_module("transformer", GPT2Model(config_));
  lm_head = register_module("lm_head", config_.tied ? LMHead(transformer->wte->weight)
                                                    : LMHead(config_.dim, config_.vocab));
  init_weights();
}

at::Tensor GPT2Impl::hidden(const TextInputs& inputs) {
  return transformer(inputs);
}

void GPT2Impl::tile_feed_forward(int64_t tokens) {
  for (const auto& block : *transformer->h) block->as<GPT2Block>()->tile = tokens;
}

double GPT2Impl::flops_per_token(int64_t tokens) const {
  double products = static_cast<double>(config_.layers) * gpt2_products(config_) +
                    static_cast<double>(config_.vocab) * config_.dim;
  double attention =
      static_cast<double>(config_.layers) * config_.dim * static_cast<double>(tokens);
  return 6 * products + 6 * attention;
}

// Matrices are normal; biases start at zero and norms at one. The two matrices per block whose
// outputs add to the residual stream are smaller, so that the stream's variance doesn't grow with
// depth.
Distribution GPT2Impl::initial(const std::string& name, at::IntArrayRef sizes) const {
  if (sizes.size() < 2) return Distribution::constant(name.ends_with("bias") ? 0 : 1);
  const double adds = 2.0 * static_cast<double>(config_.layers);
  const double scale = name.ends_with("c_proj.weight") ? 1.0 / std::sqrt(adds) : 1.0;
  return Distribution::normal(0, config_.init_std * scale);
}

}  // namespace fsdp::models
