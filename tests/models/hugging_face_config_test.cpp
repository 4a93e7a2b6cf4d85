// Hugging Face's config.json: reading, refusing unsupported settings by name, and writing.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "fsdp/error.h"
#include "fsdp/models/hugging_face.h"

namespace fsdp::models {
namespace {

using Json = nlohmann::json;

Json llama_json() {
  return {{"model_type", "llama"},       {"vocab_size", 320},      {"hidden_size", 64},
          {"intermediate_size", 96},     {"num_hidden_layers", 3}, {"num_attention_heads", 4},
          {"num_key_value_heads", 2},    {"hidden_act", "silu"},   {"rms_norm_eps", 1e-5},
          {"tie_word_embeddings", true}, {"rope_theta", 500000.0}};
}

Json gpt2_json() {
  return {{"model_type", "gpt2"}, {"vocab_size", 320}, {"n_positions", 64},
          {"n_embd", 48},         {"n_layer", 2},      {"n_head", 4}};
}

Json llama3() {
  return {{"rope_type", "llama3"},
          {"factor", 32.0},
          {"low_freq_factor", 1.0},
          {"high_freq_factor", 4.0},
          {"original_max_position_embeddings", 8192}};
}

template <typename Config = LlamaConfig>
Config read(const Json& json) {
  return std::get<Config>(parse_hugging_face_config(json.dump(), "config.json"));
}

// The message of the refusal; "" if `text` is accepted.
std::string refusal_of(const std::string& text) {
  try {
    parse_hugging_face_config(text, "config.json");
  } catch (const Error& problem) {
    EXPECT_FALSE(problem.hint().empty());
    EXPECT_TRUE(problem.message().starts_with("config.json: ")) << problem.message();
    return problem.message();
  }
  return "";
}

// Expects that setting `key` to `value` makes it refused, with an error that names `key`.
void expect_refused(Json json, const std::string& key, const Json& value) {
  ASSERT_EQ(refusal_of(json.dump()), "");
  json[key] = value;
  EXPECT_NE(refusal_of(json.dump()).find(key), std::string::npos)
      << key << " = " << value << ": " << refusal_of(json.dump());
}

TEST(HuggingFaceConfig, ReadsLlama) {
  LlamaConfig config = read(llama_json());
  EXPECT_EQ(config.vocab, 320);
  EXPECT_EQ(config.dim, 64);
  EXPECT_EQ(config.ffn, 96);
  EXPECT_EQ(config.layers, 3);
  EXPECT_EQ(config.heads, 4);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_TRUE(config.tied);
  EXPECT_FALSE(config.qkv_bias);
  EXPECT_EQ(config.norm_eps, 1e-5);
  EXPECT_EQ(config.rope_base, 500000);
  EXPECT_FALSE(config.rope_scaling);
}

TEST(HuggingFaceConfig, MissingFieldsHaveTheDefaultsOfTransformers) {
  Json json = llama_json();
  for (const char* key :
       {"num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "rope_theta"})
    json.erase(key);
  json["head_dim"] = nullptr;
  LlamaConfig config = read(json);
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_FALSE(config.tied);
  EXPECT_EQ(config.rope_base, 10000);

  GPT2Config small = read<GPT2Config>({{"model_type", "gpt2"}});
  EXPECT_EQ(small.dim, 768);
  EXPECT_EQ(small.ffn, 4 * 768);
  EXPECT_TRUE(small.tied);
}

TEST(HuggingFaceConfig, Qwen2HasBiases) {
  Json json = llama_json();
  json["model_type"] = "qwen2";
  EXPECT_TRUE(read(json).qkv_bias);
  json["sliding_window"] = 4096;  // set but unused
  json["use_sliding_window"] = false;
  EXPECT_EQ(refusal_of(json.dump()), "");
  json["use_sliding_window"] = true;  // from layer 28 on, and there are 3
  EXPECT_EQ(refusal_of(json.dump()), "");
  Json windowed = json;
  windowed["max_window_layers"] = 1;
  windowed["use_sliding_window"] = false;
  expect_refused(windowed, "use_sliding_window", true);
  expect_refused(json, "layer_types", {"full_attention", "sliding_attention", "full_attention"});
  expect_refused(json, "num_key_value_heads", nullptr);
}

TEST(HuggingFaceConfig, RotaryPositionsAreReadAsVersions4And5WriteThem) {
  Json old = llama_json(), current = llama_json();
  old["rope_scaling"] = llama3();
  current.erase("rope_theta");
  current["rope_parameters"] = llama3();
  current["rope_parameters"]["rope_theta"] = 500000.0;
  for (const Json& json : {old, current}) {
    LlamaConfig config = read(json);
    EXPECT_EQ(config.rope_base, 500000);
    ASSERT_TRUE(config.rope_scaling);
    EXPECT_EQ(config.rope_scaling->factor, 32);
    EXPECT_EQ(config.rope_scaling->high_freq_factor, 4);
    EXPECT_EQ(config.rope_scaling->original_max_position_embeddings, 8192);
  }
  old["rope_scaling"] = nullptr;
  EXPECT_FALSE(read(old).rope_scaling);
  expect_refused(old, "rope_scaling", {{"type", "linear"}, {"factor", 2.0}});
  expect_refused(old, "rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}});
  expect_refused(old, "rope_scaling", {{"rope_type", "llama3"}, {"factor", 2.0}});
  expect_refused(old, "rope_scaling", "llama3");
  expect_refused(old, "partial_rotary_factor", 0.5);
}

TEST(HuggingFaceConfig, UnsupportedComputationsAreRefusedByName) {
  expect_refused(llama_json(), "hidden_act", "gelu");
  expect_refused(llama_json(), "attention_bias", true);
  expect_refused(llama_json(), "mlp_bias", true);
  expect_refused(llama_json(), "quantization_config", {{"quant_method", "fp8"}});
  expect_refused(llama_json(), "model_type", "mistral");
  expect_refused(gpt2_json(), "activation_function", "relu");
  expect_refused(gpt2_json(), "scale_attn_weights", false);
  expect_refused(gpt2_json(), "scale_attn_by_inverse_layer_idx", true);
  expect_refused(gpt2_json(), "reorder_and_upcast_attn", true);
  expect_refused(gpt2_json(), "add_cross_attention", true);
}

TEST(HuggingFaceConfig, InvalidNumbersAreRefused) {
  for (const char* key : {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                          "intermediate_size"})
    for (const Json& value : {Json(0), Json(-1), Json(1.5), Json("64"), Json(uint64_t(1) << 63),
                              Json(int64_t(1) << 40), Json(nullptr), Json(true)})
      expect_refused(llama_json(), key, value);
  expect_refused(llama_json(), "rms_norm_eps", -1);
  expect_refused(llama_json(), "rms_norm_eps", "small");
  EXPECT_NE(refusal_of(R"({"model_type": "llama"})"), "");
  Json odd = llama_json();
  odd["num_attention_heads"] = 5;  // does not divide 64
  EXPECT_NE(refusal_of(odd.dump()), "");
}

TEST(HuggingFaceConfig, TextThatIsNotAConfigIsRefused) {
  for (const char* text : {"", "[]", "{", "{}", "1", R"({"model_type": 3})", "{\"a\":1}x"})
    EXPECT_NE(refusal_of(text), "") << text;
  EXPECT_NE(refusal_of(std::string(100'000, '[')), "");
  EXPECT_NE(refusal_of(std::string(5 << 20, ' ')), "");
  EXPECT_NE(refusal_of(std::string("{\"model_type\":\"gpt2\"}\0x", 23)), "");
  EXPECT_THROW(read_hugging_face_config("/nowhere/config.json"), Error);
}

TEST(HuggingFaceConfig, AWrittenConfigReadsBack) {
  LlamaConfig scaled{.vocab = 320, .dim = 64, .layers = 3, .heads = 4, .kv_heads = 2};
  scaled.head_dim = 24;
  scaled.ffn = 96;
  scaled.tied = true;
  scaled.norm_eps = 3e-6;
  scaled.rope_base = 123456.5;
  scaled.rope_scaling = RopeScaling{.factor = 16};
  for (bool bias : {false, true}) {
    scaled.qkv_bias = bias;
    const std::string text = hugging_face_config(scaled, "bfloat16", 4096, {.eos = 7});
    const Json json = Json::parse(text);
    EXPECT_EQ(json.at("architectures").at(0), bias ? "Qwen2ForCausalLM" : "LlamaForCausalLM");
    EXPECT_EQ(json.at("max_position_embeddings"), 4096);
    EXPECT_EQ(json.at("torch_dtype"), "bfloat16");
    EXPECT_EQ(json.at("eos_token_id"), 7);
    EXPECT_TRUE(json.at("bos_token_id").is_null());
    LlamaConfig back = std::get<LlamaConfig>(parse_hugging_face_config(text, "config.json"));
    EXPECT_EQ(back.qkv_bias, bias);
    EXPECT_EQ(back.head_dim, 24);
    EXPECT_EQ(back.tied, true);
    EXPECT_EQ(back.norm_eps, scaled.norm_eps);
    EXPECT_EQ(back.rope_base, scaled.rope_base);
    ASSERT_TRUE(back.rope_scaling);
    EXPECT_EQ(back.rope_scaling->factor, 16);
    EXPECT_EQ(parameter_count(back), parameter_count(scaled));
    EXPECT_EQ(hugging_face_config(back, "bfloat16", 4096, {.eos = 7}), text);
  }
  GPT2Config small{.vocab = 320, .max_tokens = 64, .dim = 48, .layers = 2, .heads = 4, .ffn = 80};
  small.resid_dropout = 0.25;
  const std::string text = hugging_face_config(small, "float32");
  GPT2Config back = std::get<GPT2Config>(parse_hugging_face_config(text, "config.json"));
  EXPECT_EQ(back.resid_dropout, 0.25);
  EXPECT_EQ(back.ffn, 80);
  EXPECT_EQ(hugging_face_config(back, "float32"), text);
}

}  // namespace
}  // namespace fsdp::models
