// [model] of a run's config.
#pragma once

#include <cstdint>
#include <vector>

#include "base/enum_names.h"

namespace fsdp::base {
class OptionList;
}

namespace fsdp::models {

enum class ModelType { kLlama, kQwen2, kGpt2, kMlp };
constexpr auto enum_table(ModelType) {
  return std::to_array<EnumName>({{"llama"}, {"qwen2"}, {"gpt2"}, {"mlp"}});
}
// All but the mlp, which has no tokens.
inline const std::vector<ModelType> kLanguageModels = {ModelType::kLlama, ModelType::kQwen2,
                                                       ModelType::kGpt2};

enum class RopeScalingType { kNone, kLlama3 };
constexpr auto enum_table(RopeScalingType) {
  return std::to_array<EnumName>({{"none"}, {"llama3"}});
}

struct ModelConfig {
  ModelType type = ModelType::kLlama;
  int64_t vocab = 0;  // 0: the tokenizer's
  int64_t dim = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t kv_heads = 0;    // 0: same as heads
  int64_t head_dim = 0;    // 0: dim / heads
  int64_t ffn = 0;         // 0: 8/3 of dim (llama, qwen2) or 4 times dim (gpt2)
  int64_t max_tokens = 0;  // gpt2: positions; 0: data.seq
  bool tied = false;       // the output layer is the embedding
  double norm_eps = 1e-5;
  double init_std = 0.02;
  double dropout = 0.0;  // gpt2
  double rope_base = 10000;
  RopeScalingType rope_scaling = RopeScalingType::kNone;
  double rope_factor = 8;  // llama3 scaling, like the next three
  double rope_low_freq = 1;
  double rope_high_freq = 4;
  int64_t rope_original_tokens = 8192;
  int64_t width = 2048;  // mlp: of its `layers` linear layers
};

void describe(ModelConfig& model, OptionList& list);
void check(const ModelConfig& model);

}  // namespace fsdp::models
