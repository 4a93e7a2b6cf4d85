#include "train/model_shape.h"

#include "fsdp/error.h"
#include "train/config_resolve.h"

namespace fsdp::train {
namespace {

models::LlamaConfig llama_shape(const models::ModelConfig& model, int64_t vocab) {
  models::LlamaConfig shape{.vocab = vocab,
                            .dim = model.dim,
                            .layers = model.layers,
                            .heads = model.heads,
                            .kv_heads = model.kv_heads,
                            .head_dim = model.head_dim,
                            .ffn = model.ffn,
                            .tied = model.tied,
                            .qkv_bias = model.type == models::ModelType::kQwen2,
                            .norm_eps = model.norm_eps,
                            .rope_base = model.rope_base,
                            .init_std = model.init_std};
  if (model.rope_scaling == models::RopeScalingType::kLlama3)
    shape.rope_scaling =
        models::RopeScaling{.factor = model.rope_factor,
                            .low_freq_factor = model.rope_low_freq,
                            .high_freq_factor = model.rope_high_freq,
                            .original_max_position_embeddings = model.rope_original_tokens};
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

void set_llama(models::ModelConfig& model, const models::LlamaConfig& given) {
  const models::LlamaConfig shape = models::checked(given);
  model.type = shape.qkv_bias ? models::ModelType::kQwen2 : models::ModelType::kLlama;
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
  model.rope_scaling =
      shape.rope_scaling ? models::RopeScalingType::kLlama3 : models::RopeScalingType::kNone;
  if (!shape.rope_scaling) return;
  model.rope_factor = shape.rope_scaling->factor;
  model.rope_low_freq = shape.rope_scaling->low_freq_factor;
  model.rope_high_freq = shape.rope_scaling->high_freq_factor;
  model.rope_original_tokens = shape.rope_scaling->original_max_position_embeddings;
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
    throw Error("an mlp isn't a language model.", "pass a run of a llama, qwen2 or gpt2.");
  if (words < 1)
    throw Error("the model's vocabulary size is unknown: token files don't contain it.",
                "pass --model.vocab, or --data.tokenizer with the tokenizer that made the files.");
  if (model.type == models::ModelType::kGpt2) return gpt2_shape(model, words, config.data.seq);
  return llama_shape(model, words);
}

void set_model_shape(models::ModelConfig& model, const models::AnyConfig& shape) {
  if (const auto* llama = std::get_if<models::LlamaConfig>(&shape)) return set_llama(model, *llama);
  set_gpt2(model, std::get<models::GPT2Config>(shape));
}

Config config_of(const checkpoint::Extra& extra, const std::filesystem::path& checkpoint) {
  const auto found = extra.find("config");
  if (found == extra.end() || !std::holds_alternative<std::string>(found->second))
    throw Error(checkpoint.string() + " doesn't describe its model.",
                "pass a checkpoint that fsdp train wrote.");
  Config config;
  apply_toml(config, std::get<std::string>(found->second), checkpoint.string() + ": extra.config");
  return config;
}

}  // namespace fsdp::train
