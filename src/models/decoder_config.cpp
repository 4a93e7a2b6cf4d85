// The description of a decoder: what is valid, and what follows from it without making the model.
#include <cmath>
#include <functional>
#include <numeric>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/models/decoder.h"
#include "models/parameter_shapes.h"

namespace fsdp::models {
namespace {

void check_scaling(const RopeScaling& scaling) {
  if (!(scaling.factor > 0) || !(scaling.low_freq_factor > 0) ||
      !(scaling.high_freq_factor > scaling.low_freq_factor) ||
      scaling.original_max_position_embeddings < 1)
    throw Error("a decoder's rope scaling is inconsistent.",
                "factor, low_freq_factor and original_max_position_embeddings must be positive, "
                "and high_freq_factor above low_freq_factor; Llama 3.1 has 8, 1, 8192 and 4.");
}

void check_scaling(const Yarn& scaling) {
  if (!(scaling.factor >= 1) || !(scaling.beta_slow > 0) ||
      !(scaling.beta_fast >= scaling.beta_slow) || !(scaling.attention_factor >= 0) ||
      scaling.original_max_position_embeddings < 1)
    throw Error("a decoder's YaRN scaling is inconsistent.",
                "factor must be at least 1, beta_fast at least beta_slow, and both positive; Qwen "
                "has 4, 32 and 1.");
}

void check_scaling(const LongRope& scaling, int64_t head_dim) {
  for (const std::vector<double>* factors : {&scaling.short_factors, &scaling.long_factors}) {
    if (static_cast<int64_t>(factors->size()) != head_dim / 2)
      throw Error(formatted("LongRoPE has {} factors for heads of {}.", factors->size(), head_dim),
                  "there is one for each pair of elements that are rotated: head_dim / 2.");
    for (double factor : *factors)
      if (!(factor > 0) || !std::isfinite(factor))
        throw Error(formatted("LongRoPE has a factor of {:f}.", factor), "it must be positive.");
  }
  if (scaling.original_max_position_embeddings < 2 || scaling.max_position_embeddings < 1)
    throw Error("LongRoPE's contexts must be of 2 tokens or more.", "Phi-3 has 4096 and 131072.");
}

// Bounded so that no product overflows.
void check_sizes(const DecoderConfig& config) {
  for (int64_t size :
       {config.vocab, config.dim, config.heads, config.head_dim, config.layers, config.ffn})
    if (size > 1 << 24)
      throw Error(formatted("a decoder can't have a size of {}.", size),
                  "check the numbers in the config; each must be at most 16777216.");
  for (int64_t size : {config.vocab, config.dim, config.heads})
    if (size < 1) throw Error("a decoder's sizes must be positive.", "set each to 1 or more.");
  if (config.layers < 0)
    throw Error("a decoder can't have fewer than 0 layers.", "set layers to 0 or more.");
}

void check_numbers(const DecoderConfig& config) {
  if (!(config.norm_eps >= 0) || !(config.rope_base > 0) || !(config.init_std >= 0))
    throw Error("a decoder's norm_eps and init_std must not be negative, and rope_base positive.",
                "the usual values are 1e-5, 0.02 and 10000.");
  if (config.window < 0 || config.full_every < 0 || config.no_rope_every < 0 ||
      config.query_pre_attn_scalar < 0 || !(config.local_rope_base >= 0))
    throw Error(
        "a decoder's window, full_every, no_rope_every, query_pre_attn_scalar and "
        "local_rope_base must not be negative.",
        "0 leaves each of them out.");
  const int scalings = int(config.rope_scaling.has_value()) + int(config.long_rope.has_value()) +
                       int(config.yarn.has_value()) + int(config.linear_rope != 0);
  if (scalings > 1)
    throw Error("a decoder can't have several of rope_scaling, long_rope, yarn and linear_rope.",
                "set one of them.");
  if (!(config.linear_rope >= 0))
    throw Error("a decoder's linear_rope must not be negative.", "Gemma 3 has 8; 0 leaves it out.");
  const int64_t rotary = config.rotary_dim;
  if (rotary < 0 || rotary > config.head_dim || rotary % 2 != 0)
    throw Error(formatted("a decoder's rotary_dim can't be {}.", rotary),
                "it must be even and at most head_dim; 0: all of a head is rotated.");
  if (config.yarn) check_scaling(*config.yarn);
  if (config.rope_scaling) check_scaling(*config.rope_scaling);
  if (config.long_rope) check_scaling(*config.long_rope, rotary_dim(config));
}

void check_mixture(const DecoderConfig& config) {
  const Mixture& mixture = *config.mixture;
  for (int64_t size : {mixture.experts, mixture.ffn})
    if (size < 1 || size > 1 << 24)
      throw Error(formatted("a decoder's mixture can't have a size of {}.", size),
                  "the number of experts and their width must be from 1 to 16777216.");
  if (mixture.top_k < 1 || mixture.top_k > mixture.experts)
    throw Error(formatted("a token can't go to {} of {} experts.", mixture.top_k, mixture.experts),
                "set top_k to a number from 1 to that of the experts.");
  if (mixture.shared < 0 || mixture.shared > 1024 || mixture.dense_layers < 0 ||
      mixture.dense_layers > config.layers)
    throw Error("a decoder's mixture has an impossible number of shared experts or dense layers.",
                "dense_layers are at most all layers; 0 leaves each of them out.");
  if (!(mixture.scale > 0) || !(mixture.balance >= 0) || !(mixture.z >= 0))
    throw Error("a decoder's mixture must have a positive scale and coefficients of at least 0.",
                "the usual values are 1, 0.001 and 0.");
  if (config.fused_projections || config.activation != GateActivation::kSilu)
    throw Error("experts have no fused projections and no activation but SiLU.",
                "unset fused_projections and activation.");
}

}  // namespace

DecoderConfig checked(DecoderConfig config) {
  check_sizes(config);
  if (config.kv_heads == 0) config.kv_heads = config.heads;
  if (config.ffn == 0) config.ffn = (8 * config.dim / 3 + 255) / 256 * 256;
  for (int64_t size : {config.kv_heads, config.ffn})
    if (size < 1) throw Error("a decoder's sizes must be positive.", "set each to 1 or more.");
  if (config.head_dim == 0) {
    if (config.dim % config.heads != 0 || config.dim / config.heads % 2 != 0)
      throw Error(formatted("a decoder of dim {} can't have {} heads.", config.dim, config.heads),
                  "dim / heads must be a whole, even number: rotary positions rotate pairs.");
    config.head_dim = config.dim / config.heads;
  }
  if (config.head_dim < 2 || config.head_dim % 2 != 0)
    throw Error(formatted("a decoder's head_dim can't be {}.", config.head_dim),
                "it must be even and positive: rotary positions rotate pairs.");
  if (config.heads % config.kv_heads != 0)
    throw Error(
        formatted("{} heads can't share {} key-value heads.", config.heads, config.kv_heads),
        "kv_heads must divide heads.");
  check_numbers(config);
  if (config.mixture) {
    if (config.mixture->ffn == 0) config.mixture->ffn = config.ffn;
    check_mixture(config);
  }
  if (config.family == Family::kLlama && config.qkv_bias) config.family = Family::kQwen2;
  if (config.fused_projections && config.qkv_bias)
    throw Error("fused projections have no biases.", "unset qkv_bias or fused_projections.");
  return config;
}

int64_t parameter_count(const DecoderConfig& config) {
  int64_t count = 0;
  for (const auto& [name, sizes] : parameter_shapes(config))
    if (name != kHeadName || !config.tied)
      count += std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return count;
}

int64_t active_parameter_count(const DecoderConfig& config) {
  if (!config.mixture) return parameter_count(config);
  const DecoderConfig fewer = checked(config);
  const int64_t idle = fewer.mixture->experts - fewer.mixture->top_k;
  const int64_t blocks = fewer.layers - fewer.mixture->dense_layers;
  return parameter_count(config) - blocks * idle * 3 * fewer.dim * fewer.mixture->ffn;
}

int64_t rotary_dim(const DecoderConfig& config) {
  return config.rotary_dim > 0 ? config.rotary_dim : config.head_dim;
}

int64_t window_of(const DecoderConfig& config, int64_t layer) {
  const bool full = config.full_every > 0 && (layer + 1) % config.full_every == 0;
  return full ? 0 : config.window;
}

bool has_experts(const DecoderConfig& config, int64_t layer) {
  return config.mixture && layer >= config.mixture->dense_layers;
}

bool has_positions(const DecoderConfig& config, int64_t layer) {
  return config.no_rope_every == 0 || (layer + 1) % config.no_rope_every != 0;
}

}  // namespace fsdp::models
