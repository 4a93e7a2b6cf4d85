#include "models/families.h"

#include <array>
#include <utility>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::models {
namespace {

// In the order of Family.
constexpr std::array kFamilies = {FamilyRow{.family = Family::kLlama,
                                            .type = "llama",
                                            .architecture = "LlamaForCausalLM",
                                            .all_kv_heads = true},
                                  FamilyRow{.family = Family::kQwen2,
                                            .type = "qwen2",
                                            .architecture = "Qwen2ForCausalLM",
                                            .max_positions = 32768},
                                  FamilyRow{.family = Family::kQwen3,
                                            .type = "qwen3",
                                            .architecture = "Qwen3ForCausalLM",
                                            .head_dim = 128,
                                            .max_positions = 32768},
                                  FamilyRow{.family = Family::kMistral,
                                            .type = "mistral",
                                            .architecture = "MistralForCausalLM",
                                            .max_positions = 131072},
                                  FamilyRow{.family = Family::kSmolLM3,
                                            .type = "smollm3",
                                            .architecture = "SmolLM3ForCausalLM",
                                            .rope_base = 2e6,
                                            .tied = true,
                                            .max_positions = 32768},
                                  FamilyRow{.family = Family::kOlmo2,
                                            .type = "olmo2",
                                            .architecture = "Olmo2ForCausalLM",
                                            .norm_eps = 1e-5,
                                            .all_kv_heads = true},
                                  FamilyRow{.family = Family::kPhi3,
                                            .type = "phi3",
                                            .architecture = "Phi3ForCausalLM",
                                            .norm_eps = 1e-5,
                                            .all_kv_heads = true,
                                            .max_positions = 4096},
                                  FamilyRow{.family = Family::kGemma3,
                                            .type = "gemma3_text",
                                            .architecture = "Gemma3ForCausalLM",
                                            .rope_base = 1e6,
                                            .tied = true,
                                            .head_dim = 256,
                                            .max_positions = 131072},
                                  FamilyRow{.family = Family::kMixtral,
                                            .type = "mixtral",
                                            .architecture = "MixtralForCausalLM",
                                            .norm_eps = 1e-5,
                                            .rope_base = 1e6,
                                            .max_positions = 131072,
                                            .experts = true},
                                  FamilyRow{.family = Family::kQwen3Moe,
                                            .type = "qwen3_moe",
                                            .architecture = "Qwen3MoeForCausalLM",
                                            .max_positions = 32768,
                                            .experts = true},
                                  FamilyRow{.family = Family::kOlmoe,
                                            .type = "olmoe",
                                            .architecture = "OlmoeForCausalLM",
                                            .norm_eps = 1e-5,
                                            .all_kv_heads = true,
                                            .max_positions = 4096,
                                            .experts = true},
                                  FamilyRow{.family = Family::kDots1,
                                            .type = "dots1",
                                            .architecture = "Dots1ForCausalLM",
                                            .experts = true}};

}  // namespace

const FamilyRow& row_of(Family family) {
  return kFamilies.at(static_cast<size_t>(family));
}

const FamilyRow* find_family(std::string_view type) {
  for (const FamilyRow& row : kFamilies)
    if (row.type == type) return &row;
  return nullptr;
}

DecoderConfig of_family(Family family, DecoderConfig sizes) {
  sizes.family = family;
  sizes.qkv_bias = family == Family::kQwen2;
  sizes.fused_projections = family == Family::kPhi3;
  const bool gemma = family == Family::kGemma3;
  sizes.norm_from_one = sizes.scaled_embedding = gemma;
  sizes.activation = gemma ? GateActivation::kGeluTanh : GateActivation::kSilu;
  sizes.norms = gemma                      ? NormPlacement::kAround
                : family == Family::kOlmo2 ? NormPlacement::kAfter
                                           : NormPlacement::kBefore;
  const bool by_head =
      gemma || family == Family::kQwen3 || family == Family::kQwen3Moe || family == Family::kDots1;
  const bool whole = family == Family::kOlmo2 || family == Family::kOlmoe;
  sizes.qk_norm = by_head ? QKNorm::kHead : whole ? QKNorm::kWhole : QKNorm::kNone;
  if (!row_of(family).experts) sizes.mixture.reset();
  if (!row_of(family).experts) return sizes;
  Mixture& mixture = sizes.mixture ? *sizes.mixture : sizes.mixture.emplace();
  const bool deepseek = family == Family::kDots1;
  mixture.score = deepseek ? nn::RouterScore::kSigmoid : nn::RouterScore::kSoftmax;
  mixture.biased = deepseek;
  if (family == Family::kMixtral) mixture.normalize = true;
  return sizes;
}

void check_family(const DecoderConfig& config) {
  const DecoderConfig usual = of_family(config.family, config);
  const Family family = config.family;
  const bool windowed = family == Family::kMistral || family == Family::kPhi3 ||
                        family == Family::kGemma3 || family == Family::kMixtral;
  const Mixture own = config.mixture.value_or(Mixture()), theirs = usual.mixture.value_or(own);
  const bool apart = family == Family::kQwen3Moe || family == Family::kDots1;  // widths
  const bool deepseek = family == Family::kDots1;
  const std::pair<const char*, bool> facts[] = {
      {"qkv_bias", config.qkv_bias == usual.qkv_bias},
      {"fused_projections", config.fused_projections == usual.fused_projections},
      {"norm_from_one", config.norm_from_one == usual.norm_from_one},
      {"scaled_embedding", config.scaled_embedding == usual.scaled_embedding},
      {"activation", config.activation == usual.activation},
      {"norms", config.norms == usual.norms},
      {"qk_norm", config.qk_norm == usual.qk_norm},
      {"window", config.window == 0 || windowed},
      {"full_every", config.full_every == 0 || family == Family::kGemma3},
      {"local_rope_base", config.local_rope_base == 0 || family == Family::kGemma3},
      {"query_pre_attn_scalar", config.query_pre_attn_scalar == 0 || family == Family::kGemma3},
      {"no_rope_every", config.no_rope_every == 0 || family == Family::kSmolLM3},
      {"rotary_dim", rotary_dim(config) == config.head_dim || family == Family::kPhi3},
      {"rope_scaling", !config.rope_scaling || family != Family::kPhi3},
      {"yarn", !config.yarn || family != Family::kPhi3},
      {"linear_rope", config.linear_rope == 0 || family != Family::kPhi3},
      {"long_rope", !config.long_rope || family == Family::kPhi3},
      {"head_dim", config.head_dim * config.heads == config.dim || family != Family::kOlmoe},
      {"mixture", config.mixture.has_value() == usual.mixture.has_value()},
      {"mixture.score", own.score == theirs.score},
      {"mixture.biased", own.biased == theirs.biased},
      {"mixture.normalize", own.normalize == theirs.normalize},
      {"mixture.ffn", own.ffn == 0 || own.ffn == config.ffn || apart},
      {"mixture.scale", own.scale == 1 || deepseek},
      {"mixture.shared", (own.shared > 0) == deepseek},
      {"mixture.dense_layers", own.dense_layers == 0 || deepseek}};
  for (const auto& [name, fits] : facts)
    if (!fits)
      throw Error(formatted("a {} of transformers doesn't have this decoder's {}.",
                            row_of(family).type, name),
                  "start from of_family() with the family that has it.");
}

DecoderConfig qwen2(DecoderConfig sizes) {
  sizes = of_family(Family::kQwen2, std::move(sizes));
  sizes.rope_base = 1e6;
  sizes.norm_eps = 1e-6;
  return sizes;
}

}  // namespace fsdp::models
