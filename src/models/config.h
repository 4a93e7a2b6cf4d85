// [model] of a run's config.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/enum_names.h"

namespace fsdp::base {
class OptionList;
}

namespace fsdp::models {

// The decoders first, in the order of Family.
enum class ModelType {
  kLlama,
  kQwen2,
  kQwen3,
  kMistral,
  kSmolLM3,
  kOlmo2,
  kPhi3,
  kGemma3,
  kMixtral,
  kQwen3Moe,
  kOlmoe,
  kDots1,
  kGpt2,
  kMlp
};
constexpr auto enum_table(ModelType) {
  return std::to_array<EnumName>({{"llama"},
                                  {"qwen2"},
                                  {"qwen3"},
                                  {"mistral"},
                                  {"smollm3"},
                                  {"olmo2"},
                                  {"phi3"},
                                  {"gemma3"},
                                  {"mixtral"},
                                  {"qwen3_moe"},
                                  {"olmoe"},
                                  {"dots1"},
                                  {"gpt2"},
                                  {"mlp"}});
}
inline const std::vector<ModelType> kMixtures = {ModelType::kMixtral, ModelType::kQwen3Moe,
                                                 ModelType::kOlmoe, ModelType::kDots1};
inline const std::vector<ModelType> kDecoders = {
    ModelType::kLlama,   ModelType::kQwen2,    ModelType::kQwen3, ModelType::kMistral,
    ModelType::kSmolLM3, ModelType::kOlmo2,    ModelType::kPhi3,  ModelType::kGemma3,
    ModelType::kMixtral, ModelType::kQwen3Moe, ModelType::kOlmoe, ModelType::kDots1};
// All but the mlp, which has no tokens.
inline const std::vector<ModelType> kLanguageModels = {
    ModelType::kLlama,   ModelType::kQwen2,    ModelType::kQwen3, ModelType::kMistral,
    ModelType::kSmolLM3, ModelType::kOlmo2,    ModelType::kPhi3,  ModelType::kGemma3,
    ModelType::kMixtral, ModelType::kQwen3Moe, ModelType::kOlmoe, ModelType::kDots1,
    ModelType::kGpt2};

enum class RopeScalingType { kNone, kLlama3, kLongRope, kLinear, kYarn };
constexpr auto enum_table(RopeScalingType) {
  return std::to_array<EnumName>({{"none"}, {"llama3"}, {"longrope"}, {"linear"}, {"yarn"}});
}

struct ModelConfig {
  ModelType type = ModelType::kLlama;
  int64_t vocab = 0;  // 0: the tokenizer's
  int64_t dim = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 0;    // 0: same as heads
  int64_t head_dim = 0;    // 0: dim / heads
  int64_t ffn = 0;         // 0: 8/3 of dim, or 4 times dim (gpt2)
  int64_t max_tokens = 0;  // gpt2: positions; 0: data.seq
  bool tied = false;       // the output layer is the embedding
  double norm_eps = 1e-5;
  double init_std = 0.02;
  double dropout = 0.0;  // gpt2
  double rope_base = 10000;
  RopeScalingType rope_scaling = RopeScalingType::kNone;
  double rope_factor = 8;    // llama3, linear and yarn scaling
  double rope_low_freq = 1;  // llama3, like the next one
  double rope_high_freq = 4;
  int64_t rope_original_tokens = 8192;  // llama3, longrope and yarn
  double rope_beta_fast = 32;           // yarn, like the next three
  double rope_beta_slow = 1;
  double rope_attention_factor = 0;  // 0: by rope_factor
  bool rope_truncate = true;
  int64_t rope_max_tokens = 131072;     // longrope, like the next two
  std::vector<std::string> rope_short_factors = {};
  std::vector<std::string> rope_long_factors = {};
  int64_t rope_dim = 0;    // phi3; 0: head_dim
  int64_t window = 0;      // mistral, phi3, gemma3; 0: none
  int64_t full_every = 6;  // gemma3, like the next two
  double rope_local_base = 10000;
  int64_t query_pre_attn_scalar = 0;  // 0: head_dim
  int64_t no_rope_every = 4;          // smollm3
  int64_t experts = 8;                // mixtures, like the next nine
  int64_t experts_per_token = 2;
  int64_t expert_ffn = 0;      // qwen3_moe, dots1; 0: ffn
  int64_t shared_experts = 1;  // dots1
  int64_t dense_layers = 0;    // dots1
  bool normalize_experts = true;
  double expert_scale = 1;  // dots1
  double balance = 0.001;
  double z_loss = 0;
  double bias_rate = 0.001;           // dots1
  int64_t width = 2048;               // mlp: of its `layers` linear layers
};

void describe(ModelConfig& model, OptionList& list);
void check(const ModelConfig& model);

}  // namespace fsdp::models
