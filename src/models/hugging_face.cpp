#include "fsdp/models/hugging_face.h"

#include <nlohmann/json.hpp>

#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/error.h"
#include "models/decoder_json.h"
#include "models/families.h"

namespace fsdp::models {
namespace {

constexpr size_t kLargest = 4 << 20;  // bytes of a config.json
constexpr int kDeepest = 32;

// What config.json says beside what a model computes: ids of tokens, what generation does, how the
// weights are stored, who wrote the file, and heads for other tasks. pad_token_id is among them,
// because the ids that are trained on are never padding.
constexpr std::string_view kIrrelevant[] = {"_attn_implementation",
                                            "_attn_implementation_autoset",
                                            "_name_or_path",
                                            "_num_labels",
                                            "architectures",
                                            "auto_map",
                                            "begin_suppress_tokens",
                                            "bos_token_id",
                                            "cache_implementation",
                                            "chunk_size_feed_forward",
                                            "decoder_start_token_id",
                                            "diversity_penalty",
                                            "do_sample",
                                            "dtype",
                                            "early_stopping",
                                            "encoder_no_repeat_ngram_size",
                                            "eos_token_id",
                                            "exponential_decay_length_penalty",
                                            "finetuning_task",
                                            "forced_bos_token_id",
                                            "forced_eos_token_id",
                                            "gradient_checkpointing",
                                            "id2label",
                                            "is_decoder",
                                            "is_encoder_decoder",
                                            "is_llama_config",
                                            "keys_to_ignore_at_inference",
                                            "label2id",
                                            "length_penalty",
                                            "max_length",
                                            "max_window_layers",
                                            "max_position_embeddings",
                                            "min_length",
                                            "model_type",
                                            "n_ctx",
                                            "no_repeat_ngram_size",
                                            "num_beam_groups",
                                            "num_beams",
                                            "num_labels",
                                            "num_return_sequences",
                                            "output_attentions",
                                            "output_hidden_states",
                                            "output_scores",
                                            "pad_token_id",
                                            "prefix",
                                            "pretraining_tp",
                                            "problem_type",
                                            "remove_invalid_values",
                                            "repetition_penalty",
                                            "return_dict",
                                            "return_dict_in_generate",
                                            "sep_token_id",
                                            "summary_activation",
                                            "summary_first_dropout",
                                            "summary_proj_to_labels",
                                            "summary_type",
                                            "summary_use_proj",
                                            "suppress_tokens",
                                            "task_specific_params",
                                            "temperature",
                                            "tf_legacy_loss",
                                            "tokenizer_class",
                                            "top_k",
                                            "top_p",
                                            "torch_dtype",
                                            "torchscript",
                                            "transformers.js_config",
                                            "transformers_version",
                                            "typical_p",
                                            "unk_token_id",
                                            "unsloth_fixed",
                                            "unsloth_version",
                                            "use_bfloat16",
                                            "use_cache"};

GPT2Config read_gpt2(const Fields& fields) {
  GPT2Config config;
  config.vocab = fields.count("vocab_size", 50257, kMostTokens);
  config.max_tokens = fields.count("n_positions", "max_position_embeddings", 1024, kMostTokens);
  config.dim = fields.count("n_embd", "hidden_size", 768, kWidest);
  config.layers = fields.count("n_layer", "num_hidden_layers", 12, kMostLayers);
  config.heads = fields.count("n_head", "num_attention_heads", 12, kWidest);
  config.ffn = fields.count("n_inner", 4 * config.dim, 10 * kWidest);
  config.tied = fields.flag("tie_word_embeddings", true);
  config.norm_eps = fields.number("layer_norm_epsilon", 1e-5);
  config.embd_dropout = fields.number("embd_pdrop", 0.1);
  config.attn_dropout = fields.number("attn_pdrop", 0.1);
  config.resid_dropout = fields.number("resid_pdrop", 0.1);
  config.init_std = fields.number("initializer_range", 0.02);
  fields.need_text("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  fields.need("scale_attn_weights", true);
  fields.need("scale_attn_by_inverse_layer_idx", false);
  fields.need("reorder_and_upcast_attn", false);
  fields.need("add_cross_attention", false);
  return checked(config);
}

Json gpt2_json(const GPT2Config& c) {
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"vocab_size", c.vocab},
          {"n_positions", c.max_tokens},
          {"n_embd", c.dim},
          {"n_layer", c.layers},
          {"n_head", c.heads},
          {"n_inner", c.ffn},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", c.norm_eps},
          {"embd_pdrop", c.embd_dropout},
          {"attn_pdrop", c.attn_dropout},
          {"resid_pdrop", c.resid_dropout},
          {"initializer_range", c.init_std},
          {"tie_word_embeddings", c.tied},
          {"use_cache", true}};
}

// Gemma 3 with images has its text model in text_config, which leaves out what has its default.
Json text_model_of(Json json) {
  const auto type = json.find("model_type");
  const auto nested = json.find("text_config");
  if (type == json.end() || *type != "gemma3" || nested == json.end() || !nested->is_object())
    return json;
  Json text = {{"model_type", "gemma3_text"}, {"vocab_size", 262208},    {"hidden_size", 2304},
               {"intermediate_size", 9216},   {"num_hidden_layers", 26}, {"num_attention_heads", 8},
               {"num_key_value_heads", 4}};
  text.update(*nested);
  for (const char* key : {"tie_word_embeddings", "quantization_config"})  // of both models
    if (json.contains(key)) text[key] = json[key];
  return text;
}

}  // namespace

AnyConfig parse_hugging_face_config(std::string_view text, const std::string& where) {
  const auto refuse = [&](const std::string& what) {
    throw Error(formatted("{}: {}.", where, what), "pass a config.json as transformers writes it.");
  };
  if (text.size() > kLargest) refuse("is too large for a config.json");
  // The parser would take a zero byte for the end of the text.
  if (text.find('\0') != std::string_view::npos) refuse("isn't JSON");
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kDeepest) refuse("is nested too deeply");
    return true;
  };
  Json json;
  try {
    json = Json::parse(text, shallow);
  } catch (const Json::exception&) {
    refuse("isn't JSON");
  }
  if (!json.is_object()) refuse("isn't a JSON object");
  json = text_model_of(std::move(json));
  const Fields fields(json, where);
  if (fields.has("quantization_config"))
    fields.refuse("quantization_config: quantized weights aren't supported");
  const std::string type = fields.text("model_type", "");
  try {
    std::optional<AnyConfig> config;
    if (const FamilyRow* row = find_family(type)) config = read_decoder(fields, *row);
    if (type == "gpt2") config = read_gpt2(fields);
    if (config) {
      fields.refuse_unknown(kIrrelevant);
      return *config;
    }
  } catch (const Error& problem) {  // inconsistent sizes
    if (problem.message().starts_with(where)) throw;
    throw Error(formatted("{}: {}", where, problem.message()), problem.hint());
  }
  fields.refuse(type.empty() ? "model_type is missing"
                             : formatted("the model_type \"{}\" is not supported", type));
}

AnyConfig read_hugging_face_config(const std::filesystem::path& file) {
  return parse_hugging_face_config(read_file(file, kLargest), file.string());
}

std::string hugging_face_config(const AnyConfig& config, const std::string& dtype,
                                int64_t max_positions, const SpecialTokens& tokens) {
  Json json;
  if (const auto* decoder = std::get_if<DecoderConfig>(&config))
    json = decoder_json(checked(*decoder), max_positions);
  else
    json = gpt2_json(checked(std::get<GPT2Config>(config)));
  // Null if absent: the defaults are ids of other vocabularies.
  json["bos_token_id"] = tokens.bos ? Json(*tokens.bos) : Json();
  json["eos_token_id"] = tokens.eos ? Json(*tokens.eos) : Json();
  json["torch_dtype"] = dtype;
  return json.dump(2) + "\n";
}

}  // namespace fsdp::models
