#include "models/config.h"

#include <algorithm>

#include "base/format.h"
#include "base/options.h"
#include "fsdp/error.h"

namespace fsdp::models {
namespace {

// Generous bounds that keep the number of parameters within 64 bits.
constexpr double kMostWidth = 1e6, kLongest = 1e8;

// How rotary positions are scaled for long contexts.
void describe_scaling(ModelConfig& model, OptionList& list) {
  using enum RopeScalingType;
  const OnlyWith llama3(model.rope_scaling, {kLlama3}), longrope(model.rope_scaling, {kLongRope}),
      yarn(model.rope_scaling, {kYarn}), slower(model.rope_scaling, {kLlama3, kLinear, kYarn}),
      scaled(model.rope_scaling, {kLlama3, kLongRope, kYarn});
  list.add("rope_factor", model.rope_factor, "Factor of long wavelengths (linear scaling: of all)",
           {.least = 1, .only_with = slower});
  list.add("rope_low_freq", model.rope_low_freq,
           "llama3 scaling: wavelengths that fit fewer times than this into the original length "
           "are scaled fully",
           {.least = 0, .above = true, .only_with = llama3});
  list.add("rope_high_freq", model.rope_high_freq,
           "llama3 scaling: wavelengths that fit more times than this into the original length "
           "aren't scaled",
           {.least = 0, .above = true, .only_with = llama3});
  list.add("rope_original_tokens", model.rope_original_tokens,
           "RoPE scaling: the original context length, in tokens",
           {.least = 1, .most = kLongest, .only_with = scaled});
  list.add("rope_max_tokens", model.rope_max_tokens,
           "longrope scaling: the longest sequence, in tokens",
           {.least = 1, .most = kLongest, .only_with = longrope});
  list.add("rope_short_factors", model.rope_short_factors,
           "longrope scaling: head_dim / 2 factors for sequences up to the original length",
           {.only_with = longrope});
  list.add("rope_long_factors", model.rope_long_factors,
           "longrope scaling: head_dim / 2 factors for longer sequences", {.only_with = longrope});
  list.add("rope_beta_fast", model.rope_beta_fast,
           "yarn scaling: wavelengths that fit more times than this into the original length "
           "aren't scaled",
           {.least = 0, .above = true, .only_with = yarn});
  list.add("rope_beta_slow", model.rope_beta_slow,
           "yarn scaling: wavelengths that fit fewer times than this into the original length are "
           "scaled fully",
           {.least = 0, .above = true, .only_with = yarn});
  list.add("rope_attention_factor", model.rope_attention_factor,
           "yarn scaling: factor of cosines and sines; 0: 0.1 ln(rope_factor) + 1",
           {.least = 0, .only_with = yarn});
  list.add("rope_truncate", model.rope_truncate,
           "yarn scaling: interpolate between whole indices of wavelengths", {.only_with = yarn});
}

// Experts instead of feed-forwards.
void describe_experts(ModelConfig& model, OptionList& list) {
  using enum ModelType;
  const OnlyWith mixtures(model.type, kMixtures), dots(model.type, {kDots1});
  list.add("experts", model.experts, "mixtral, qwen3_moe, olmoe, dots1: experts in each block",
           {.least = 1, .most = 1e5, .only_with = mixtures});
  list.add("experts_per_token", model.experts_per_token, "Experts that a token goes to",
           {.least = 1, .most = 1e5, .only_with = mixtures});
  list.add("expert_ffn", model.expert_ffn, "qwen3_moe, dots1: width of an expert; 0: ffn",
           {.least = 0, .most = 1e7, .only_with = {model.type, {kQwen3Moe, kDots1}}});
  list.add("shared_experts", model.shared_experts,
           "dots1: experts of a block that every token goes through",
           {.least = 1, .most = 1024, .only_with = dots});
  list.add("dense_layers", model.dense_layers,
           "dots1: first blocks, which have a feed-forward instead of experts",
           {.least = 0, .most = 1e5, .only_with = dots});
  list.add("normalize_experts", model.normalize_experts,
           "The weights of a token's experts add up to one (mixtral: always)",
           {.only_with = {model.type, {kQwen3Moe, kOlmoe, kDots1}}});
  list.add("expert_scale", model.expert_scale, "dots1: factor of the weights of experts",
           {.least = 0, .above = true, .only_with = dots});
  list.add("balance", model.balance,
           "Coefficient of the loss that evens out the load of experts; 0: none",
           {.least = 0, .only_with = mixtures});
  list.add("z_loss", model.z_loss,
           "Coefficient of the loss that keeps the router's logits small; 0: none",
           {.least = 0, .only_with = mixtures});
  list.add("bias_rate", model.bias_rate,
           "dots1: change per step of the biases that even out the load of experts; 0: none",
           {.least = 0, .only_with = dots});
}

// Rotary positions, and which layers see how far.
void describe_positions(ModelConfig& model, OptionList& list) {
  using enum ModelType;
  const OnlyWith rotary(model.type, kDecoders),
      windowed(model.type, {kMistral, kPhi3, kGemma3, kMixtral}), gemma3(model.type, {kGemma3});
  list.add("rope_base", model.rope_base, "Base of the rotary position embedding (RoPE)",
           {.least = 1, .above = true, .only_with = rotary});
  list.add("rope_scaling", model.rope_scaling,
           "RoPE scaling for long contexts; phi3: longrope, others: llama3, linear or yarn",
           {.only_with = rotary});
  describe_scaling(model, list);
  list.add("rope_dim", model.rope_dim, "phi3: first elements of each head that are rotated; 0: all",
           {.least = 0, .most = kMostWidth, .only_with = {model.type, {kPhi3}}});
  list.add("window", model.window,
           "mistral, mixtral, phi3, gemma3: tokens that a token sees, with itself; 0: all before "
           "it",
           {.least = 0, .most = kLongest, .only_with = windowed});
  list.add("full_every", model.full_every,
           "gemma3: each n-th layer has no window; 0: all layers have it",
           {.least = 0, .most = 1e5, .only_with = gemma3});
  list.add("rope_local_base", model.rope_local_base,
           "gemma3: base of the RoPE in layers with a window",
           {.least = 1, .above = true, .only_with = gemma3});
  list.add("query_pre_attn_scalar", model.query_pre_attn_scalar,
           "gemma3: attention scores are divided by its square root; 0: head_dim",
           {.least = 0, .most = kMostWidth, .only_with = gemma3});
  list.add("no_rope_every", model.no_rope_every,
           "smollm3: each n-th layer has no positions; 0: all have them",
           {.least = 0, .most = 1e5, .only_with = {model.type, {kSmolLM3}}});
}

}  // namespace

void describe(ModelConfig& model, OptionList& list) {
  using enum ModelType;
  const OnlyWith language(model.type, kLanguageModels), rotary(model.type, kDecoders),
      gpt2(model.type, {kGpt2});
  list.section("model", "The model");
  list.add("type", model.type, "Model architecture");
  list.add("vocab", model.vocab, "Vocabulary size; 0: the tokenizer's",
           {.least = 0, .most = 1e8, .only_with = language});
  list.add("dim", model.dim, "Width of the model", {.least = 1, .most = kMostWidth});
  list.add("layers", model.layers, "Number of blocks; mlp: number of linear layers",
           {.least = 1, .most = 1e5});
  list.add("heads", model.heads, "Attention heads; must divide dim unless head_dim is set",
           {.least = 1, .most = kMostWidth, .only_with = language});
  list.add("kv_heads", model.kv_heads, "Key-value heads; must divide heads; 0: same as heads",
           {.least = 0, .most = kMostWidth, .only_with = rotary});
  list.add("head_dim", model.head_dim, "Width of an attention head; 0: dim / heads",
           {.least = 0, .most = kMostWidth, .only_with = rotary});
  list.add("ffn", model.ffn,
           "Width of the feed-forward layers; 0: 8/3 of dim, rounded up to a multiple of 256 "
           "(gpt2: 4 times dim)",
           {.least = 0, .most = 1e7, .only_with = language});
  list.add("max_tokens", model.max_tokens, "gpt2: number of positions; 0: data.seq",
           {.least = 0, .most = kLongest, .only_with = gpt2});
  list.add("tied", model.tied, "Use the embedding matrix as the output layer; always true for gpt2",
           {.only_with = language});
  list.add("norm_eps", model.norm_eps, "Epsilon of the norm layers", {.least = 0, .above = true});
  list.add("init_std", model.init_std, "Standard deviation of initial weight matrices",
           {.least = 0});
  list.add("dropout", model.dropout, "gpt2: dropout probability",
           {.least = 0, .most = 0.99, .only_with = gpt2});
  describe_positions(model, list);
  describe_experts(model, list);
  list.add("width", model.width, "mlp: width of the linear layers",
           {.least = 1, .most = kMostWidth, .only_with = {model.type, {kMlp}}});
}

void check(const ModelConfig& model) {
  if (model.type == ModelType::kMlp) return;
  const bool mixture = std::find(kMixtures.begin(), kMixtures.end(), model.type) != kMixtures.end();
  if (mixture && model.experts_per_token > model.experts)
    throw Error(formatted("model.experts_per_token = {}, but model.experts = {}.",
                          model.experts_per_token, model.experts),
                "a token can't go to more experts than there are.");
  if (mixture && model.dense_layers > model.layers)
    throw Error(formatted("model.dense_layers = {}, but model.layers = {}.", model.dense_layers,
                          model.layers),
                "they are the first of all layers.");
  if (model.head_dim == 0 && model.dim % model.heads != 0)
    throw Error(
        formatted("model.dim = {} isn't a multiple of model.heads = {}.", model.dim, model.heads),
        formatted("each head gets an equal part of dim: try dim = {}.",
                  (model.dim / model.heads + 1) * model.heads));
  const int64_t head = model.head_dim > 0 ? model.head_dim : model.dim / model.heads;
  if (model.type != ModelType::kGpt2 && head % 2 != 0)
    throw Error(formatted("{} = {} is odd.",
                          model.head_dim > 0 ? "model.head_dim" : "model.dim / model.heads", head),
                "rotary position embeddings rotate pairs of elements: choose an even head size.");
  if (model.kv_heads > 0 && model.heads % model.kv_heads != 0)
    throw Error(formatted("model.heads = {} isn't a multiple of model.kv_heads = {}.", model.heads,
                          model.kv_heads),
                "each key-value head serves the same number of heads.");
  if (model.rope_scaling == RopeScalingType::kLlama3 && model.rope_low_freq >= model.rope_high_freq)
    throw Error("model.rope_low_freq isn't below model.rope_high_freq.", "Llama 3 has 1 and 4.");
  const bool phi3 = model.type == ModelType::kPhi3;
  const bool longrope = model.rope_scaling == RopeScalingType::kLongRope;
  if (model.rope_scaling != RopeScalingType::kNone && longrope != phi3)
    throw Error(formatted("model.rope_scaling is {}, but model.type is {}.",
                          enum_name(model.rope_scaling), enum_name(model.type)),
                "phi3 has longrope or none; others have llama3, linear, yarn or none.");
  if (model.rope_scaling == RopeScalingType::kYarn && model.rope_beta_fast < model.rope_beta_slow)
    throw Error("model.rope_beta_fast is below model.rope_beta_slow.", "Qwen has 32 and 1.");
  if (model.rope_dim > head || model.rope_dim % 2 != 0)
    throw Error(
        formatted("model.rope_dim = {} can't be rotated in heads of {}.", model.rope_dim, head),
        "choose an even number up to the size of a head; 0 rotates all.");
}

}  // namespace fsdp::models
