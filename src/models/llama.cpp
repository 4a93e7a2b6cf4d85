// Llama. It computes the same as bench/peers/peer_fsdp2.py and constructs its parts in the same
// order, so that both start from the same weights and have the same losses. Modules hold the
// parameters; the computation is composed from nn/functional.h, several layers per call.
#include "fsdp/models/llama.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <bit>
#include <string>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/functional.h"

namespace fsdp::models {
namespace {

nn::Linear matrix(int64_t in, int64_t out, bool bias = false) {
  return nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

// The weights of one block that take part in matrix products.
int64_t llama_products(const LlamaConfig& config) {
  int64_t heads = 2 * config.heads + 2 * config.kv_heads;  // of q, k, v and o
  return config.dim * config.head_dim * heads + 3 * config.dim * config.ffn;
}

void check_scaling(const RopeScaling& scaling) {
  if (!(scaling.factor > 0) || !(scaling.low_freq_factor > 0) ||
      !(scaling.high_freq_factor > scaling.low_freq_factor) ||
      scaling.original_max_position_embeddings < 1)
    throw Error("a Llama's rope scaling is inconsistent.",
                "factor, low_freq_factor and original_max_position_embeddings must be positive, "
                "and high_freq_factor above low_freq_factor; Llama 3.1 has 8, 1, 8192 and 4.");
}

}  // namespace

LlamaConfig checked(LlamaConfig config) {
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  for (int64_t size : {config.vocab, config.dim, config.heads, config.head_dim, config.layers,
                       config.ffn})  // bounded so that no product overflows
    if (size > 1 << 24)
      throw Error(formatted("a Llama can't have a size of {}.", size),
                  "check the numbers in the config; each must be at most 16777216.");
  if (config.ffn == 0) config.ffn = (8 * config.dim / 3 + 255) / 256 * 256;
  for (int64_t size : {config.vocab, config.dim, config.heads, config.kv_heads, config.ffn})
    if (size < 1) throw Error("a Llama's sizes must be positive.", "set each to 1 or more.");
  if (config.layers < 0)
    throw Error("a Llama can't have fewer than 0 layers.", "set layers to 0 or more.");
  if (config.head_dim == 0) {
    if (config.dim % config.heads != 0 || config.dim / config.heads % 2 != 0)
      throw Error(formatted("a Llama of dim {} can't have {} heads.", config.dim, config.heads),
                  "dim / heads must be a whole, even number: rotary positions rotate pairs.");
    config.head_dim = config.dim / config.heads;
  }
  if (config.head_dim < 2 || config.head_dim % 2 != 0)
    throw Error(formatted("a Llama's head_dim can't be {}.", config.head_dim),
                "it must be even and positive: rotary positions rotate pairs.");
  if (config.heads % config.kv_heads != 0)
    throw Error(
        formatted("{} heads can't share {} key-value heads.", config.heads, config.kv_heads),
        "kv_heads must divide heads.");
  if (!(config.norm_eps >= 0) || !(config.rope_base > 0) || !(config.init_std >= 0))
    throw Error("a Llama's norm_eps and init_std must not be negative, and rope_base positive.",
                "the usual values are 1e-5, 0.02 and 10000.");
  if (config.rope_scaling) check_scaling(*config.rope_scaling);
  return config;
}

int64_t parameter_count(const LlamaConfig& config) {
  LlamaConfig c = checked(config);
  int64_t bias = c.qkv_bias ? (c.heads + 2 * c.kv_heads) * c.head_dim : 0;
  int64_t block = llama_products(c) + bias + 2 * c.dim;
  return (c.tied ? 1 : 2) * c.vocab * c.dim + c.layers * block + c.dim;
}

LlamaConfig qwen2(LlamaConfig sizes) {
  sizes.qkv_bias = true;
  sizes.rope_base = 1e6;
  sizes.norm_eps = 1e-6;
  return sizes;
}

// --- the parts ---

LlamaAttentionImpl::LlamaAttentionImpl(const LlamaConfig& config, int64_t layer)
    : heads_(config.heads), kv_heads_(config.kv_heads), layer_(layer) {
  bool bias = config.qkv_bias;
  int64_t queries = heads_ * config.head_dim, keys = kv_heads_ * config.head_dim;
  q_proj = register_module("q_proj", matrix(config.dim, queries, bias));
  k_proj = register_module("k_proj", matrix(config.dim, keys, bias));
  v_proj = register_module("v_proj", matrix(config.dim, keys, bias));
  o_proj = register_module("o_proj", matrix(queries, config.dim));
}

std::vector<at::Tensor> LlamaAttentionImpl::projections() const {
  return {q_proj->weight, k_proj->weight, v_proj->weight};
}

std::vector<at::Tensor> LlamaAttentionImpl::biases() const {
  if (!q_proj->bias.defined()) return {};
  return {q_proj->bias, k_proj->bias, v_proj->bias};
}

at::Tensor LlamaAttentionImpl::forward(const at::Tensor& qkv, const RotaryTables& tables,
                                       const Attending& attending) {
  nn::Heads heads = nn::rope_heads(qkv, tables.cos, tables.sin, heads_, kv_heads_);
  at::Tensor mixed = attend(heads.q, heads.k, heads.v, attending, layer_);
  return o_proj(mixed.transpose(1, 2).flatten(2));
}

SwiGLUImpl::SwiGLUImpl(int64_t dim, int64_t width) {
  gate_proj = register_module("gate_proj", matrix(dim, width));
  up_proj = register_module("up_proj", matrix(dim, width));
  down_proj = register_module("down_proj", matrix(width, dim));
}

std::vector<at::Tensor> SwiGLUImpl::projections() const {
  return {gate_proj->weight, up_proj->weight};
}

at::Tensor SwiGLUImpl::forward(const at::Tensor& gate_up) {
  return nn::swiglu_linear(gate_up, down_proj->weight);
}

LlamaBlockImpl::LlamaBlockImpl(const LlamaConfig& config, int64_t layer) {
  auto norm = [&] { return nn::RMSNorm(config.dim, config.norm_eps); };
  input_layernorm = register_module("input_layernorm", norm());
  self_attn = register_module("self_attn", LlamaAttention(config, layer));
  post_attention_layernorm = register_module("post_attention_layernorm", norm());
  mlp = register_module("mlp", SwiGLU(config.dim, config.ffn));
}

Stream LlamaBlockImpl::forward(const Stream& stream, const RotaryTables& tables,
                               const Attending& attending) {
  auto [qkv, x] =
      nn::norm_linears(stream.x, stream.delta, input_layernorm->weight, input_layernorm->eps(),
                       self_attn->projections(), self_attn->biases());
  at::Tensor attended = self_attn(qkv, tables, attending);
  auto [gate_up, sum] = nn::norm_linears(x, attended, post_attention_layernorm->weight,
                                         post_attention_layernorm->eps(), mlp->projections());
  return {sum, mlp(gate_up)};
}

// --- the model ---

LlamaModelImpl::LlamaModelImpl(const LlamaConfig& config) : config_(config) {
  embed_tokens = register_module("embed_tokens", nn::Embedding(config.vocab, config.dim));
  register_module("layers", layers);
  for (int64_t i = 0; i < config.layers; ++i) layers->push_back(LlamaBlock(config, i));
  norm = register_module("norm", nn::RMSNorm(config.dim, config.norm_eps));
}

at::Tensor LlamaModelImpl::forward(const TextInputs& inputs) {
  Attending attending = plan_attention(inputs, config_.layers);
  Stream stream{embed_tokens(inputs.ids)};
  RotaryTables tables = tables_for(stream.x, attending);
  for (const auto& layer : *layers)
    stream = layer->as<LlamaBlock>()->forward(stream, tables, attending);
  if (inputs.cache) inputs.cache->advance(inputs.ids.size(1));
  return nn::add_rms_norm(stream.x, stream.delta, norm->weight, norm->eps()).out;
}

// Made on first use, not in the constructor: the model may still move to another device or have no
// memory yet. The first table has exactly the tokens of the first pass. Later ones are rounded up
// to a power of two, so there are few.
const RotaryTables& LlamaModelImpl::tables_of(const at::Tensor& x, int64_t tokens, bool more) {
  for (const RotaryTables& known : tables_) {
    if (known.cos.dtype() != x.dtype() || known.cos.device() != x.device()) continue;
    if (known.cos.size(0) >= tokens) return known;
    more = true;
  }
  c10::InferenceMode normal(false);  // later training steps use these tables too
  torch::NoGradGuard no_grad;
  if (more) tokens = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tokens)));
  RotaryTables made =
      rotary_tables(tokens, config_.head_dim, config_.rope_base, x.device(), config_.rope_scaling);
  tables_.push_back({made.cos.to(x.scalar_type()), made.sin.to(x.scalar_type())});
  return tables_.back();
}

RotaryTables LlamaModelImpl::tables_for(const at::Tensor& x, const Attending& attending) {
  int64_t tokens = x.size(1), end = attending.past + tokens;
  const RotaryTables& tables = tables_of(x, end, /*more=*/attending.cache != nullptr);
  if (attending.positions.defined()) {
    at::Tensor positions = attending.positions.flatten();
    auto of = [&](const at::Tensor& table) {
      return table.index_select(0, positions).view({x.size(0), tokens, config_.head_dim});
    };
    return {of(tables.cos), of(tables.sin)};
  }
  if (tables.cos.size(0) == tokens) return tables;
  return {tables.cos.slice(0, attending.past, end), tables.sin.slice(0, attending.past, end)};
}

LlamaImpl::LlamaImpl(const LlamaConfig& config) : config_(checked(config)) {
  model = register_module("model", LlamaModel(config_));
  lm_head = register_module("lm_head", config_.tied ? LMHead(model->embed_tokens->weight)
                                                    : LMHead(config_.dim, config_.vocab));
  init_weights();
}

at::Tensor LlamaImpl::hidden(const TextInputs& inputs) {
  return model(inputs);
}

double LlamaImpl::flops_per_token(int64_t tokens) const {
  double products = static_cast<double>(config_.layers) * llama_products(config_) +
                    static_cast<double>(config_.vocab) * config_.dim;
  double attention = static_cast<double>(config_.layers) * config_.heads * config_.head_dim *
                     static_cast<double>(tokens);
  return 6 * products + 6 * attention;
}

// Matrices are normal; biases start at zero and norms at one.
Distribution LlamaImpl::initial(const std::string& name, at::IntArrayRef sizes) const {
  if (sizes.size() > 1) return Distribution::normal(0, config_.init_std);
  return Distribution::constant(name.ends_with("bias") ? 0 : 1);
}

}  // namespace fsdp::models
