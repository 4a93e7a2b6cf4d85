// The decoder. As a Llama it computes the same as bench/peers/peer_fsdp2.py and constructs its
// parts in the same order, so that both start from the same weights and have the same losses.
// Modules hold the parameters; the computation is composed from nn/functional.h, several layers per
// call.
#include "fsdp/models/decoder.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/functional.h"
#include "fsdp/nn/lora.h"
#include "fsdp/recompute.h"

namespace fsdp::models {
namespace {

nn::Linear matrix(int64_t in, int64_t out, bool bias = false) {
  return nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

// The weights of one block that take part in matrix products of a token.
int64_t decoder_products(const DecoderConfig& config, int64_t layer) {
  const int64_t heads = 2 * config.heads + 2 * config.kv_heads;  // of q, k, v and o
  const int64_t attention = config.dim * config.head_dim * heads;
  if (!has_experts(config, layer)) return attention + 3 * config.dim * config.ffn;
  const Mixture& mixture = *config.mixture;
  return attention +
         config.dim * (mixture.experts + 3 * mixture.ffn * (mixture.top_k + mixture.shared));
}

// `config` as checked() returns it.
nn::MoE experts_of(const DecoderConfig& config) {
  const Mixture& mixture = *config.mixture;
  const auto blocks = static_cast<double>(config.layers - mixture.dense_layers);
  return nn::MoE(nn::MoEOptions{.dim = config.dim,
                                .ffn = mixture.ffn,
                                .experts = mixture.experts,
                                .shared_ffn = mixture.shared * mixture.ffn,
                                .route = {.top_k = mixture.top_k,
                                          .score = mixture.score,
                                          .normalize = mixture.normalize,
                                          .scale = mixture.scale},
                                .biased = mixture.biased,
                                .balance = mixture.balance / blocks,
                                .z = mixture.z / blocks});
}

// What a norm multiplies by. In half precision 1 + weight has the precision of a Llama's weight,
// which is near one as well.
at::Tensor factor_of(const nn::RMSNorm& norm, bool from_one) {
  return from_one ? norm->weight + 1 : norm->weight;
}

// sqrt(dim) as a tensor of that dtype has it.
double root_of(int64_t dim, at::ScalarType dtype) {
  const auto root = static_cast<float>(std::sqrt(static_cast<double>(dim)));
  if (dtype == at::kBFloat16) return static_cast<float>(c10::BFloat16(root));
  if (dtype == at::kHalf) return static_cast<float>(c10::Half(root));
  return dtype == at::kDouble ? std::sqrt(static_cast<double>(dim)) : root;
}

// Mean number of keys that a token sees in a sequence of this length, without the diagonal's half.
double keys_seen(int64_t tokens, int64_t window) {
  const auto all = static_cast<double>(tokens), some = static_cast<double>(window);
  return window == 0 || window >= tokens ? all / 2 : some - some * some / (2 * all);
}

}  // namespace

// --- the parts ---

DecoderAttentionImpl::DecoderAttentionImpl(const DecoderConfig& config, int64_t layer)
    : config_(config), layer_(layer) {
  bool bias = config.qkv_bias;
  int64_t queries = config.heads * config.head_dim, keys = config.kv_heads * config.head_dim;
  if (config.fused_projections) {
    qkv_proj = register_module("qkv_proj", matrix(config.dim, queries + 2 * keys));
  } else {
    q_proj = register_module("q_proj", matrix(config.dim, queries, bias));
    k_proj = register_module("k_proj", matrix(config.dim, keys, bias));
    v_proj = register_module("v_proj", matrix(config.dim, keys, bias));
  }
  o_proj = register_module("o_proj", matrix(queries, config.dim));
  if (config.qk_norm == QKNorm::kNone) return;
  bool heads = config.qk_norm == QKNorm::kHead;
  auto norm = [&](int64_t whole) {
    return nn::RMSNorm(heads ? config.head_dim : whole, config.norm_eps);
  };
  q_norm = register_module("q_norm", norm(queries));
  k_norm = register_module("k_norm", norm(keys));
}

std::vector<nn::Linear> DecoderAttentionImpl::projections() const {
  if (config_.fused_projections) return {qkv_proj};
  return {q_proj, k_proj, v_proj};
}

at::Tensor DecoderAttentionImpl::normed(const at::Tensor& qkv) const {
  if (config_.qk_norm == QKNorm::kNone) return qkv;
  int64_t queries = config_.heads * config_.head_dim, keys = config_.kv_heads * config_.head_dim;
  std::vector<at::Tensor> parts = qkv.split_with_sizes({queries, keys, keys}, -1);
  auto apply = [&](at::Tensor& part, const nn::RMSNorm& norm) {
    at::Tensor factor = factor_of(norm, config_.norm_from_one);
    part = config_.qk_norm == QKNorm::kHead
               ? nn::rms_norm(part.unflatten(-1, {-1, config_.head_dim}), factor, norm->eps())
                     .flatten(-2)
               : nn::rms_norm(part, factor, norm->eps());
  };
  apply(parts[0], q_norm);
  apply(parts[1], k_norm);
  return at::cat(parts, -1);
}

// Only the first elements of each head are rotated, so their pairs are nearer than the kernel for
// whole heads has them.
nn::Heads DecoderAttentionImpl::rotated_partly(const at::Tensor& qkv,
                                               const RotaryTables& tables) const {
  const int64_t rotary = rotary_dim(config_), rest = config_.head_dim - rotary;
  const std::vector<at::Tensor> heads =
      qkv.unflatten(-1, {-1, config_.head_dim})
          .split_with_sizes({config_.heads, config_.kv_heads, config_.kv_heads},
                            -2);  // [batch, tokens, heads, ..]
  const auto rotated = [&](const at::Tensor& x) {
    const at::Tensor begin = nn::rope(x.narrow(-1, 0, rotary).contiguous(), tables.cos, tables.sin);
    return at::cat({begin, x.narrow(-1, rotary, rest)}, -1).transpose(1, 2);
  };
  return {rotated(heads[0]), rotated(heads[1]), heads[2].transpose(1, 2)};
}

at::Tensor DecoderAttentionImpl::forward(const at::Tensor& qkv, const RotaryTables& tables,
                                         const Attending& attending) {
  nn::Heads heads =
      rotary_dim(config_) < config_.head_dim
          ? rotated_partly(normed(qkv), tables)
          : nn::rope_heads(normed(qkv), tables.cos, tables.sin, config_.heads, config_.kv_heads);
  AttendOptions options{.window = window_of(config_, layer_)};
  if (config_.query_pre_attn_scalar > 0)
    options.scale = 1 / std::sqrt(static_cast<double>(config_.query_pre_attn_scalar));
  at::Tensor mixed = attend(heads.q, heads.k, heads.v, attending, layer_, options);
  return o_proj(mixed.transpose(1, 2).flatten(2));
}

GatedFeedForwardImpl::GatedFeedForwardImpl(const DecoderConfig& config)
    : activation_(config.activation) {
  if (config.fused_projections) {
    gate_up_proj = register_module("gate_up_proj", matrix(config.dim, 2 * config.ffn));
  } else {
    gate_proj = register_module("gate_proj", matrix(config.dim, config.ffn));
    up_proj = register_module("up_proj", matrix(config.dim, config.ffn));
  }
  down_proj = register_module("down_proj", matrix(config.ffn, config.dim));
}

std::vector<nn::Linear> GatedFeedForwardImpl::projections() const {
  if (gate_up_proj) return {gate_up_proj};
  return {gate_proj, up_proj};
}

at::Tensor GatedFeedForwardImpl::forward(const at::Tensor& gate_up) {
  if (down_proj->uses_adapter() || down_proj->quant() != nn::Quant::kNone) {  // not fused
    if (activation_ == GateActivation::kSilu) return down_proj(nn::swiglu(gate_up));
    const std::vector<at::Tensor> halves = gate_up.chunk(2, -1);
    return down_proj(nn::gelu(halves[0], "tanh") * halves[1]);
  }
  const auto layer = activation_ == GateActivation::kSilu ? nn::swiglu_linear : nn::geglu_linear;
  return layer(gate_up, down_proj->weight, {}, nn::WeightLayout::kOutIn, down_proj->fp8);
}

DecoderBlockImpl::DecoderBlockImpl(const DecoderConfig& config, int64_t layer)
    : norm_from_one_(config.norm_from_one) {
  auto norm = [&](const char* name) {
    return register_module(name, nn::RMSNorm(config.dim, config.norm_eps));
  };
  if (config.norms != NormPlacement::kAfter) input_layernorm = norm("input_layernorm");
  self_attn = register_module("self_attn", DecoderAttention(config, layer));
  post_attention_layernorm = norm("post_attention_layernorm");
  if (config.norms == NormPlacement::kAround)
    pre_feedforward_layernorm = norm("pre_feedforward_layernorm");
  if (has_experts(config, layer))
    experts = register_module("mlp", experts_of(config));
  else
    mlp = register_module("mlp", GatedFeedForward(config));
  if (config.norms != NormPlacement::kBefore)
    post_feedforward_layernorm = norm("post_feedforward_layernorm");
}

// The linears of the stream's sum, after a norm or without one.
nn::NormedLinears DecoderBlockImpl::read(const Stream& stream, const nn::RMSNorm& norm,
                                         const std::vector<nn::Linear>& linears) const {
  std::vector<at::Tensor> weights, biases;
  bool adapted = false;
  nn::Fp8 fp8 = linears.front()->fp8;
  const nn::Quant quant = linears.front()->quant();  // of all: they have the same inputs
  for (const nn::Linear& linear : linears) {
    if (linear->fp8 != fp8) fp8 = nn::Fp8::kNone;
    weights.push_back(linear->weight);
    if (linear->bias.defined()) biases.push_back(linear->bias);
    adapted = adapted || linear->uses_adapter();
  }
  if (norm && !adapted && quant == nn::Quant::kNone)
    return nn::norm_linears(stream.x, stream.delta, factor_of(norm, norm_from_one_), norm->eps(),
                            weights, biases, fp8);
  const nn::NormedSum input = normed(stream, norm);
  at::Tensor out = quant == nn::Quant::kNone
                       ? nn::linears(input.out, weights, biases, fp8)
                       : nn::quantised_linears(input.out, weights, biases, quant);
  return {adapted ? nn::add_adapters(out, input.out, linears) : out, input.sum};
}

// The stream's sum and its norm, or twice the sum without one.
nn::NormedSum DecoderBlockImpl::normed(const Stream& stream, const nn::RMSNorm& norm) const {
  if (norm)
    return nn::add_rms_norm(stream.x, stream.delta, factor_of(norm, norm_from_one_), norm->eps());
  const at::Tensor sum = stream.delta.defined() ? stream.x + stream.delta : stream.x;
  return {sum, sum};
}

// What a sublayer adds to the stream.
at::Tensor DecoderBlockImpl::written(const at::Tensor& x, const nn::RMSNorm& norm) const {
  return norm ? nn::rms_norm(x, factor_of(norm, norm_from_one_), norm->eps()) : x;
}

Stream DecoderBlockImpl::forward(const Stream& stream, const RotaryTables& tables,
                                 const Attending& attending) {
  const bool before = !post_feedforward_layernorm;  // the names of kBefore
  const nn::RMSNorm none = nullptr;
  auto [qkv, x] = read(stream, input_layernorm, self_attn->projections());
  at::Tensor attended =
      written(self_attn(qkv, tables, attending), before ? none : post_attention_layernorm);
  return add_feed_forward({x, attended, stream.loss});
}

Stream DecoderBlockImpl::add_feed_forward(const Stream& stream) {
  const nn::RMSNorm& norm =
      post_feedforward_layernorm ? pre_feedforward_layernorm : post_attention_layernorm;
  if (experts) {  // all tokens together, which the router's losses are about
    const nn::NormedSum input = normed(stream, norm);
    auto [out, loss] = experts(input.out);
    if (stream.loss.defined()) loss = loss.defined() ? stream.loss + loss : stream.loss;
    return {input.sum, written(out, post_feedforward_layernorm), loss};
  }
  const auto feed_forward = [&](const Stream& part) -> Stream {
    auto [gate_up, sum] = read(part, norm, mlp->projections());
    return {sum, written(mlp(gate_up), post_feedforward_layernorm), part.loss};
  };
  if (tile == 0) return feed_forward(stream);
  const at::Tensor sum = stream.x + stream.delta;
  return {sum, tiled([&](const at::Tensor& rows) { return feed_forward({rows}).delta; }, sum, tile),
          stream.loss};
}

// --- the model ---

DecoderModelImpl::DecoderModelImpl(const DecoderConfig& config) : config_(config) {
  embed_tokens = register_module("embed_tokens", nn::Embedding(config.vocab, config.dim));
  register_module("layers", layers);
  for (int64_t i = 0; i < config.layers; ++i) layers->push_back(DecoderBlock(config, i));
  norm = register_module("norm", nn::RMSNorm(config.dim, config.norm_eps));
}

at::Tensor DecoderModelImpl::forward(const TextInputs& inputs) {
  Attending attending = plan_attention(inputs, config_.layers);
  const int64_t end = attending.end;
  if (config_.long_rope) {
    const int64_t limit = config_.long_rope->original_max_position_embeddings;
    if (attending.past > 0 && attending.past <= limit && end > limit)
      throw Error(formatted("a cache of {} tokens was continued to {}, beyond the {} of LongRoPE's "
                            "short factors.",
                            attending.past, end, limit),
                  "reset() the cache and pass all tokens again.");
  }
  Stream stream{embed_tokens(inputs.ids)};
  if (config_.scaled_embedding) stream.x = stream.x * root_of(config_.dim, stream.x.scalar_type());
  std::array<RotaryTables, 4> tables;  // by kind
  for (int64_t i = 0; i < config_.layers; ++i) {
    const Rotation rotation = rotation_of(i, end);
    RotaryTables& own = tables[static_cast<size_t>(rotation)];
    if (!own.cos.defined()) own = tables_for(rotation, stream.x, attending);
    stream = layers[static_cast<size_t>(i)]->as<DecoderBlock>()->forward(stream, own, attending);
  }
  if (inputs.cache) inputs.cache->advance(inputs.ids.size(1));
  router_loss = stream.loss;
  return nn::add_rms_norm(stream.x, stream.delta, factor_of(norm, config_.norm_from_one),
                          norm->eps())
      .out;
}

DecoderModelImpl::Rotation DecoderModelImpl::rotation_of(int64_t layer, int64_t tokens) const {
  if (!has_positions(config_, layer)) return Rotation::kNone;
  if (config_.local_rope_base > 0 && window_of(config_, layer) > 0) return Rotation::kLocal;
  const auto& scaling = config_.long_rope;
  const bool longer = scaling && tokens > scaling->original_max_position_embeddings;
  return longer ? Rotation::kLonger : Rotation::kNormal;
}

RotaryTables DecoderModelImpl::make_tables(Rotation rotation, int64_t tokens,
                                           at::Device device) const {
  const int64_t width = rotary_dim(config_);
  if (rotation == Rotation::kNone) return unrotated_tables(tokens, width, device);
  if (rotation == Rotation::kLocal)
    return rotary_tables(tokens, width, config_.local_rope_base, device);
  if (config_.long_rope)
    return rotary_tables(tokens, width, config_.rope_base, device, *config_.long_rope,
                         rotation == Rotation::kLonger);
  if (config_.yarn) return rotary_tables(tokens, width, config_.rope_base, device, *config_.yarn);
  return rotary_tables(tokens, width, config_.rope_base, device, config_.rope_scaling,
                       config_.linear_rope > 0 ? config_.linear_rope : 1);
}

// Made on first use, not in the constructor: the model may still move to another device or have no
// memory yet. The first table has exactly the tokens of the first pass. Later ones are rounded up
// to a power of two, so there are few.
RotaryTables DecoderModelImpl::tables_of(Rotation rotation, const at::Tensor& x, int64_t tokens,
                                         bool more) {
  for (const auto& [kind, known] : tables_) {
    if (kind != rotation || known.cos.dtype() != x.dtype() || known.cos.device() != x.device())
      continue;
    if (known.cos.size(0) >= tokens) return known;
    more = true;
  }
  c10::InferenceMode normal(false);  // later training steps use these tables too
  torch::NoGradGuard no_grad;
  if (more) tokens = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tokens)));
  RotaryTables made = make_tables(rotation, tokens, x.device());
  tables_.push_back({rotation, {made.cos.to(x.scalar_type()), made.sin.to(x.scalar_type())}});
  return tables_.back().tables;
}

RotaryTables DecoderModelImpl::tables_for(Rotation rotation, const at::Tensor& x,
                                          const Attending& attending) {
  const int64_t tokens = x.size(1), end = attending.end;
  RotaryTables tables = tables_of(rotation, x, end, /*more=*/attending.cache != nullptr);
  if (attending.positions.defined()) {
    const at::Tensor positions = attending.positions.flatten();
    std::vector<int64_t> sizes = attending.positions.sizes().vec();
    sizes.push_back(rotary_dim(config_));
    auto of = [&](const at::Tensor& table) { return table.index_select(0, positions).view(sizes); };
    RotaryTables own{of(tables.cos), of(tables.sin)};
    if (rotation != Rotation::kLonger || !attending.lengths.defined()) return own;
    // Each document has the factors of its own length.
    const at::Tensor longer =
        attending.lengths.gt(config_.long_rope->original_max_position_embeddings).unsqueeze(-1);
    tables = tables_of(Rotation::kNormal, x, end, /*more=*/false);
    return {at::where(longer, own.cos, of(tables.cos)), at::where(longer, own.sin, of(tables.sin))};
  }
  if (tables.cos.size(0) == tokens) return tables;
  return {tables.cos.slice(0, attending.past, end), tables.sin.slice(0, attending.past, end)};
}

DecoderImpl::DecoderImpl(const DecoderConfig& config) : config_(checked(config)) {
  model = register_module("model", DecoderModel(config_));
  lm_head = register_module("lm_head", config_.tied ? LMHead(model->embed_tokens->weight)
                                                    : LMHead(config_.dim, config_.vocab));
  init_weights();
}

at::Tensor DecoderImpl::hidden(const TextInputs& inputs) {
  return model(inputs);
}

int64_t DecoderImpl::cache_limit() const {
  return config_.long_rope ? config_.long_rope->original_max_position_embeddings : 0;
}

void DecoderImpl::tile_feed_forward(int64_t tokens) {
  for (const auto& block : *model->layers) block->as<DecoderBlock>()->tile = tokens;
}

double DecoderImpl::flops_per_token(int64_t tokens) const {
  double products = static_cast<double>(config_.vocab) * config_.dim, keys = 0;
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    products += static_cast<double>(decoder_products(config_, layer));
    keys += keys_seen(tokens, window_of(config_, layer));
  }
  return 6 * products + 12 * static_cast<double>(config_.heads * config_.head_dim) * keys;
}

// Matrices are normal; biases start at zero and norms at a factor of one.
Distribution DecoderImpl::initial(const std::string& name, at::IntArrayRef sizes) const {
  if (sizes.size() > 1) return Distribution::normal(0, config_.init_std);
  return Distribution::constant(name.ends_with("bias") || config_.norm_from_one ? 0 : 1);
}

}  // namespace fsdp::models
