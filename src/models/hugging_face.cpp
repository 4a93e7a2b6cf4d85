#include "fsdp/models/hugging_face.h"
#include "base/regular_file.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::models {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kLargest = 4 << 20;  // bytes of a config.json
constexpr int kDeepest = 32;
// Bounds that no model reaches; within them, parameter counts fit in 64 bits.
constexpr int64_t kWidest = 1'000'000, kMostTokens = 100'000'000, kMostLayers = 100'000;

// Reads fields of a JSON object; null counts as missing. Errors name the field.
class Fields {
 public:
  Fields(const Json& object, const std::string& where, std::string path = "")
      : object_(object), where_(where), path_(std::move(path)) {}

  [[noreturn]] void refuse(const std::string& what) const {
    throw Error(formatted("{}: {}.", where_, what),
                "docs/checkpoints.md describes which llama, qwen2 and gpt2 models are supported.");
  }
  [[noreturn]] void refuse(const char* key, const std::string& why) const {
    refuse(formatted("{}{} {}", path_, key, why));
  }

  bool has(const char* key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }
  const Json& operator[](const char* key) const { return *object_.find(key); }

  int64_t count(const char* key, std::optional<int64_t> otherwise, int64_t most) const {
    if (!has(key)) {
      if (!otherwise) refuse(key, "is missing");
      return *otherwise;
    }
    const Json& value = (*this)[key];
    const bool whole = value.is_number_integer() && !value.is_number_float();
    if (!whole || (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(most)) ||
        value.get<int64_t>() < 1)
      refuse(key, formatted("isn't a whole number from 1 to {}", most));
    return value.get<int64_t>();
  }

  // Reads `key`, or `other` if `key` is missing: GPT-2 has names of its own and accepts the common
  // ones.
  int64_t count(const char* key, const char* other, int64_t otherwise, int64_t most) const {
    return count(has(key) ? key : other, otherwise, most);
  }

  double number(const char* key, std::optional<double> otherwise) const {
    if (!has(key)) {
      if (!otherwise) refuse(key, "is missing");
      return *otherwise;
    }
    const Json& value = (*this)[key];
    if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0)
      refuse(key, "isn't a number of at least 0");
    return value.get<double>();
  }

  bool flag(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!(*this)[key].is_boolean()) refuse(key, "is neither true nor false");
    return (*this)[key].get<bool>();
  }

  std::string text(const char* key, const std::string& otherwise) const {
    if (!has(key)) return otherwise;
    const Json& value = (*this)[key];
    if (!value.is_string()) refuse(key, "isn't a string");
    std::string text = value.get<std::string>();
    for (char& c : text)
      if (c < ' ' || c > '~') c = '?';  // it may be printed
    return text.substr(0, 64);
  }

  // A switch that changes the computation in a way that our models don't support.
  void need(const char* key, bool wanted) const {
    if (flag(key, wanted) != wanted)
      refuse(key,
             formatted("is {}, which the models here don't support", wanted ? "false" : "true"));
  }

  void need_text(const char* key, const std::vector<std::string>& choices) const {
    const std::string found = text(key, choices.front());
    for (const auto& choice : choices)
      if (found == choice) return;
    refuse(key, formatted("is \"{}\"; only \"{}\" is supported", found, choices.front()));
  }

  Fields object(const char* key) const {
    if (!(*this)[key].is_object()) refuse(key, "isn't an object");
    return {(*this)[key], where_, formatted("{}{}.", path_, key)};
  }

 private:
  const Json& object_;
  const std::string& where_;
  std::string path_;
};

// --- rotary positions ---
//
// transformers 5 writes "rope_parameters", earlier versions "rope_theta" and "rope_scaling".

void read_rope(const Fields& fields, LlamaConfig& config) {
  config.rope_base = fields.number("rope_theta", config.rope_base);
  // If both are present, transformers uses the older one.
  const char* key = fields.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  if (fields.number("partial_rotary_factor", 1.0) != 1.0)
    fields.refuse("partial_rotary_factor is not 1, which the models here don't support");
  if (!fields.has(key)) return;
  const Fields rope = fields.object(key);
  config.rope_base = rope.number("rope_theta", config.rope_base);
  if (rope.number("partial_rotary_factor", 1.0) != 1.0)
    rope.refuse("partial_rotary_factor", "is not 1, which the models here don't support");
  const std::string type = rope.text("rope_type", rope.text("type", "default"));
  if (type == "default") return;
  if (type != "llama3")
    rope.refuse("rope_type",
                formatted("is \"{}\"; only \"default\" and \"llama3\" are supported", type));
  config.rope_scaling = RopeScaling{.factor = rope.number("factor", {}),
                                    .low_freq_factor = rope.number("low_freq_factor", {}),
                                    .high_freq_factor = rope.number("high_freq_factor", {}),
                                    .original_max_position_embeddings = rope.count(
                                        "original_max_position_embeddings", {}, kMostTokens)};
}

// Refuses sliding-window attention.
void check_windows(const Fields& fields, int64_t layers) {
  if (fields.has("layer_types")) {
    const Json& types = fields["layer_types"];
    if (!types.is_array()) fields.refuse("layer_types isn't a list");
    for (const Json& type : types)
      if (type != "full_attention")
        fields.refuse("layer_types has layers without full attention (a sliding window)");
    return;
  }
  if (!fields.flag("use_sliding_window", false) || !fields.has("sliding_window")) return;
  if (fields.count("max_window_layers", 28, kMostLayers) < layers)
    fields.refuse("use_sliding_window is true, which the models here don't support");
}

LlamaConfig read_llama(const Fields& fields, bool qwen2) {
  LlamaConfig config;
  config.vocab = fields.count("vocab_size", {}, kMostTokens);
  config.dim = fields.count("hidden_size", {}, kWidest);
  config.layers = fields.count("num_hidden_layers", {}, kMostLayers);
  config.heads = fields.count("num_attention_heads", {}, kWidest);
  if (qwen2 && !fields.has("num_key_value_heads")) fields.refuse("num_key_value_heads is missing");
  config.kv_heads = fields.count("num_key_value_heads", config.heads, kWidest);
  if (fields.has("head_dim")) config.head_dim = fields.count("head_dim", {}, kWidest);
  config.ffn = fields.count("intermediate_size", {}, 10 * kWidest);
  config.tied = fields.flag("tie_word_embeddings", false);
  config.qkv_bias = qwen2;
  config.norm_eps = fields.number("rms_norm_eps", 1e-6);
  config.init_std = fields.number("initializer_range", 0.02);
  config.rope_base = 10000;
  read_rope(fields, config);
  fields.need_text("hidden_act", {"silu", "swish"});
  if (!qwen2) fields.need("attention_bias", false);
  fields.need("mlp_bias", false);
  fields.need("use_mrope", false);
  check_windows(fields, config.layers);
  return checked(config);
}

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

Json scaling_json(const RopeScaling& scaling) {
  return {{"rope_type", "llama3"},
          {"factor", scaling.factor},
          {"low_freq_factor", scaling.low_freq_factor},
          {"high_freq_factor", scaling.high_freq_factor},
          {"original_max_position_embeddings", scaling.original_max_position_embeddings}};
}

// transformers 4 and 5 both read rope_theta and rope_scaling.
Json llama_json(const LlamaConfig& c, int64_t max_positions) {
  if (max_positions == 0)
    max_positions =
        c.rope_scaling
            ? static_cast<int64_t>(std::min(
                  1e9, c.rope_scaling->factor *
                           static_cast<double>(c.rope_scaling->original_max_position_embeddings)))
            : (c.qkv_bias ? 32768 : 2048);
  Json json = {{"architectures", {c.qkv_bias ? "Qwen2ForCausalLM" : "LlamaForCausalLM"}},
               {"model_type", c.qkv_bias ? "qwen2" : "llama"},
               {"vocab_size", c.vocab},
               {"hidden_size", c.dim},
               {"intermediate_size", c.ffn},
               {"num_hidden_layers", c.layers},
               {"num_attention_heads", c.heads},
               {"num_key_value_heads", c.kv_heads},
               {"head_dim", c.head_dim},
               {"hidden_act", "silu"},
               {"max_position_embeddings", max_positions},
               {"initializer_range", c.init_std},
               {"rms_norm_eps", c.norm_eps},
               {"rope_theta", c.rope_base},
               {"rope_scaling", c.rope_scaling ? scaling_json(*c.rope_scaling) : Json()},
               {"tie_word_embeddings", c.tied},
               {"attention_dropout", 0.0},
               {"use_cache", true}};
  if (c.qkv_bias) {
    json["use_sliding_window"] = false;
  } else {
    json["attention_bias"] = false;
    json["mlp_bias"] = false;
  }
  return json;
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
  const Fields fields(json, where);
  if (fields.has("quantization_config"))
    fields.refuse("quantization_config: quantized weights aren't supported");
  const std::string type = fields.text("model_type", "");
  try {
    if (type == "llama" || type == "qwen2") return read_llama(fields, type == "qwen2");
    if (type == "gpt2") return read_gpt2(fields);
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
  if (const auto* llama = std::get_if<LlamaConfig>(&config))
    json = llama_json(checked(*llama), max_positions);
  else
    json = gpt2_json(checked(std::get<GPT2Config>(config)));
  // Null if absent: the defaults are ids of other vocabularies.
  json["bos_token_id"] = tokens.bos ? Json(*tokens.bos) : Json();
  json["eos_token_id"] = tokens.eos ? Json(*tokens.eos) : Json();
  json["torch_dtype"] = dtype;
  return json.dump(2) + "\n";
}

}  // namespace fsdp::models
