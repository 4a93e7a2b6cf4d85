#include "train/model_shape.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "train/config_resolve.h"

namespace fsdp::train {
namespace {

// The decoders come first in ModelType, in the order of Family.
models::Family family_of(models::ModelType type) {
  return static_cast<models::Family>(type);
}

std::vector<double> factors_of(const char* key, const std::vector<std::string>& words) {
  std::vector<double> factors;
  for (const std::string& word : words) {
    char* end = nullptr;
    factors.push_back(std::strtod(word.c_str(), &end));
    if (word.empty() || *end != '\0')
      throw Error(formatted("{}: \"{}\" isn't a number.", key, word),
                  "the list has head_dim / 2 numbers, each in quotes.");
  }
  return factors;
}

std::vector<std::string> words_of(const std::vector<double>& factors) {
  std::vector<std::string> words;
  for (double factor : factors) words.push_back(formatted("{}", factor));
  return words;
}

// How positions are scaled for longer contexts.
void set_rope(models::DecoderConfig& shape, const models::ModelConfig& model) {
  if (model.rope_scaling == models::RopeScalingType::kLlama3)
    shape.rope_scaling =
        models::RopeScaling{.factor = model.rope_factor,
                            .low_freq_factor = model.rope_low_freq,
                            .high_freq_factor = model.rope_high_freq,
                            .original_max_position_embeddings = model.rope_original_tokens};
  if (model.rope_scaling == models::RopeScalingType::kLongRope)
    shape.long_rope = models::LongRope{
        .short_factors = factors_of("model.rope_short_factors", model.rope_short_factors),
        .long_factors = factors_of("model.rope_long_factors", model.rope_long_factors),
        .original_max_position_embeddings = model.rope_original_tokens,
        .max_position_embeddings = model.rope_max_tokens};
  if (model.rope_scaling == models::RopeScalingType::kLinear) shape.linear_rope = model.rope_factor;
  if (model.rope_scaling == models::RopeScalingType::kYarn)
    shape.yarn = models::Yarn{.factor = model.rope_factor,
                              .beta_fast = model.rope_beta_fast,
                              .beta_slow = model.rope_beta_slow,
                              .attention_factor = model.rope_attention_factor,
                              .truncate = model.rope_truncate,
                              .original_max_position_embeddings = model.rope_original_tokens};
}

// What the family doesn't decide.
void set_mixture(models::Mixture& mixture, const models::ModelConfig& model) {
  using enum models::ModelType;
  mixture.experts = model.experts;
  mixture.top_k = model.experts_per_token;
  if (model.type == kQwen3Moe || model.type == kDots1) mixture.ffn = model.expert_ffn;
  if (model.type != kMixtral) mixture.normalize = model.normalize_experts;
  mixture.balance = model.balance;
  mixture.z = model.z_loss;
  if (model.type != kDots1) return;
  mixture.shared = model.shared_experts;
  mixture.dense_layers = model.dense_layers;
  mixture.scale = model.expert_scale;
}

models::DecoderConfig decoder_shape(const models::ModelConfig& model, int64_t vocab) {
  models::DecoderConfig shape =
      models::of_family(family_of(model.type), {.vocab = vocab,
                                                .dim = model.dim,
                                                .layers = model.layers,
                                                .heads = model.heads,
                                                .kv_heads = model.kv_heads,
                                                .head_dim = model.head_dim,
                                                .ffn = model.ffn,
                                                .tied = model.tied,
                                                .norm_eps = model.norm_eps,
                                                .rope_base = model.rope_base,
                                                .init_std = model.init_std});
  using enum models::ModelType;
  const bool gemma3 = model.type == kGemma3;
  if (gemma3 || model.type == kMistral || model.type == kPhi3 || model.type == kMixtral)
    shape.window = model.window;
  if (gemma3) {
    shape.full_every = model.full_every;
    shape.local_rope_base = model.rope_local_base;
    shape.query_pre_attn_scalar = model.query_pre_attn_scalar;
  }
  if (model.type == kPhi3) shape.rotary_dim = model.rope_dim;
  if (model.type == kSmolLM3) shape.no_rope_every = model.no_rope_every;
  if (shape.mixture) set_mixture(*shape.mixture, model);
  set_rope(shape, model);
  return shape;
}

models::GPT2Config gpt2_shape(const models::ModelConfig& model, int64_t vocab, int64_t seq) {
  return {.vocab = vocab,
          .max_tokens = model.max_tokens > 0 ? model.max_tokens : seq,
          .dim = model.dim,
          .layers = model.layers,
          .heads = model.heads,
          .ffn = model.ffn,
          .tied = true,
          .norm_eps = model.norm_eps,
          .embd_dropout = model.dropout,
          .attn_dropout = model.dropout,
          .resid_dropout = model.dropout,
          .init_std = model.init_std};
}

void set_scaling(models::ModelConfig& model, const models::DecoderConfig& shape) {
  model.rope_scaling = models::RopeScalingType::kNone;
  if (shape.linear_rope > 0) {
    model.rope_scaling = models::RopeScalingType::kLinear;
    model.rope_factor = shape.linear_rope;
  }
  if (const auto& scaling = shape.yarn) {
    model.rope_scaling = models::RopeScalingType::kYarn;
    model.rope_factor = scaling->factor;
    model.rope_beta_fast = scaling->beta_fast;
    model.rope_beta_slow = scaling->beta_slow;
    model.rope_attention_factor = scaling->attention_factor;
    model.rope_truncate = scaling->truncate;
    model.rope_original_tokens = scaling->original_max_position_embeddings;
  }
  if (const auto& scaling = shape.rope_scaling) {
    model.rope_scaling = models::RopeScalingType::kLlama3;
    model.rope_factor = scaling->factor;
    model.rope_low_freq = scaling->low_freq_factor;
    model.rope_high_freq = scaling->high_freq_factor;
    model.rope_original_tokens = scaling->original_max_position_embeddings;
  }
  if (const auto& scaling = shape.long_rope) {
    model.rope_scaling = models::RopeScalingType::kLongRope;
    model.rope_short_factors = words_of(scaling->short_factors);
    model.rope_long_factors = words_of(scaling->long_factors);
    model.rope_original_tokens = scaling->original_max_position_embeddings;
    model.rope_max_tokens = scaling->max_position_embeddings;
  }
}

void set_decoder(models::ModelConfig& model, const models::DecoderConfig& given) {
  const models::DecoderConfig shape = models::checked(given);
  model.type = static_cast<models::ModelType>(shape.family);
  model.vocab = shape.vocab;
  model.dim = shape.dim;
  model.layers = shape.layers;
  model.heads = shape.heads;
  model.kv_heads = shape.kv_heads;
  model.head_dim = shape.head_dim * shape.heads == shape.dim ? 0 : shape.head_dim;
  model.ffn = shape.ffn;
  model.tied = shape.tied;
  model.norm_eps = shape.norm_eps;
  model.rope_base = shape.rope_base;
  model.init_std = shape.init_std;
  model.window = shape.window;
  if (shape.family == models::Family::kGemma3) {
    model.full_every = shape.full_every;
    model.rope_local_base = shape.local_rope_base > 0 ? shape.local_rope_base : shape.rope_base;
    model.query_pre_attn_scalar = shape.query_pre_attn_scalar;
  }
  model.rope_dim = shape.rotary_dim;
  if (shape.family == models::Family::kSmolLM3) model.no_rope_every = shape.no_rope_every;
  if (const auto& mixture = shape.mixture) {  // losses are the run's
    const bool apart =
        shape.family == models::Family::kQwen3Moe || shape.family == models::Family::kDots1;
    model.experts = mixture->experts;
    model.experts_per_token = mixture->top_k;
    model.expert_ffn = apart ? mixture->ffn : 0;
    model.normalize_experts = mixture->normalize;
    if (mixture->shared > 0) model.shared_experts = mixture->shared;
    model.dense_layers = mixture->dense_layers;
    model.expert_scale = mixture->scale;
  }
  set_scaling(model, shape);
}

void set_gpt2(models::ModelConfig& model, const models::GPT2Config& given) {
  const models::GPT2Config shape = models::checked(given);
  if (!shape.tied)
    throw Error("a gpt2 whose output layer isn't its embedding can't be trained.",
                "use one with tie_word_embeddings = true, as all published ones have.");
  model.type = models::ModelType::kGpt2;
  model.vocab = shape.vocab;
  model.max_tokens = shape.max_tokens;
  model.dim = shape.dim;
  model.layers = shape.layers;
  model.heads = shape.heads;
  model.ffn = shape.ffn;
  model.tied = shape.tied;
  model.norm_eps = shape.norm_eps;
  model.dropout = shape.resid_dropout;
  model.init_std = shape.init_std;
}

}  // namespace

models::AnyConfig model_shape(const Config& config, int64_t vocab) {
  const models::ModelConfig& model = config.model;
  const int64_t words = model.vocab > 0 ? model.vocab : vocab;
  if (model.type == models::ModelType::kMlp)
    throw Error("an mlp isn't a language model.", "pass a run of a language model.");
  if (words < 1)
    throw Error("the model's vocabulary size is unknown: token files don't contain it.",
                "pass --model.vocab, or --data.tokenizer with the tokenizer that made the files.");
  if (model.type == models::ModelType::kGpt2) return gpt2_shape(model, words, config.data.seq);
  return decoder_shape(model, words);
}

void set_model_shape(models::ModelConfig& model, const models::AnyConfig& shape) {
  if (const auto* decoder = std::get_if<models::DecoderConfig>(&shape))
    return set_decoder(model, *decoder);
  set_gpt2(model, std::get<models::GPT2Config>(shape));
}

std::filesystem::path settings_beside(const std::filesystem::path& checkpoint) {
  std::error_code problem;
  const std::filesystem::path own = std::filesystem::absolute(checkpoint / "", problem);
  for (const auto& folder : {own.parent_path(), own.parent_path().parent_path()})
    if (std::filesystem::is_regular_file(folder / "config.json", problem)) return folder;
  return {};
}

Config config_of(const checkpoint::Extra& extra, const std::filesystem::path& checkpoint) {
  const auto found = extra.find("config");
  Config config;
  if (found == extra.end() || !std::holds_alternative<std::string>(found->second)) {
    const std::filesystem::path settings = settings_beside(checkpoint);
    if (settings.empty())
      throw Error(checkpoint.string() + " doesn't describe its model.",
                  "put the model's config.json into that directory, as transformers writes it "
                  "(model.config.save_pretrained(DIR)), or pass a checkpoint of fsdp train.");
    set_model_shape(config.model, models::read_hugging_face_config(settings / "config.json"));
    config.model.dropout = 0;
    return config;
  }
  apply_toml(config, std::get<std::string>(found->second), checkpoint.string() + ": extra.config");
  return config;
}

}  // namespace fsdp::train
