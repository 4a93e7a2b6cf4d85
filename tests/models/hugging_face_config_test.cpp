// Hugging Face's config.json: reading, refusing unsupported settings by name, and writing.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

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
  expect_refused(old, "rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}});
  expect_refused(old, "rope_scaling", {{"rope_type", "proportional"}, {"factor", 2.0}});
  expect_refused(old, "rope_scaling", {{"rope_type", "llama3"}, {"factor", 2.0}});
  expect_refused(old, "rope_scaling", "llama3");
  expect_refused(old, "partial_rotary_factor", 0.5);
}

TEST(HuggingFaceConfig, UnsupportedComputationsAreRefusedByName) {
  expect_refused(llama_json(), "hidden_act", "gelu");
  expect_refused(llama_json(), "attention_bias", true);
  expect_refused(llama_json(), "mlp_bias", true);
  expect_refused(llama_json(), "quantization_config", {{"quant_method", "fp8"}});
  expect_refused(llama_json(), "model_type", "deepseek_v2");
  expect_refused(gpt2_json(), "activation_function", "relu");
  expect_refused(gpt2_json(), "scale_attn_weights", false);
  expect_refused(gpt2_json(), "scale_attn_by_inverse_layer_idx", true);
  expect_refused(gpt2_json(), "reorder_and_upcast_attn", true);
  expect_refused(gpt2_json(), "add_cross_attention", true);
}

// --- other families ---

Json family_json(const std::string& type) {
  Json json = llama_json();
  json["model_type"] = type;
  json["head_dim"] = 16;
  json.erase("rope_theta");
  json.erase("rms_norm_eps");
  json.erase("tie_word_embeddings");
  if (type == "gemma3_text") json.erase("hidden_act");
  if (type == "dots1")
    json.update({{"n_routed_experts", 8}, {"n_shared_experts", 2}, {"num_experts_per_tok", 3}});
  return json;
}

const std::vector<std::string> kFamilyTypes = {"llama",   "qwen2",     "qwen3", "mistral",
                                               "smollm3", "olmo2",     "phi3",  "gemma3_text",
                                               "mixtral", "qwen3_moe", "olmoe", "dots1"};

TEST(HuggingFaceFamilies, HaveTheirDescriptionsAndDefaults) {
  EXPECT_EQ(read(family_json("qwen3")).qk_norm, QKNorm::kHead);
  DecoderConfig mistral = read(family_json("mistral"));
  EXPECT_EQ(mistral.window, 4096);
  Json without = family_json("mistral");
  without["sliding_window"] = nullptr;
  EXPECT_EQ(read(without).window, 0);
  EXPECT_EQ(read(without).family, Family::kMistral);
  DecoderConfig smollm = read(family_json("smollm3"));
  EXPECT_EQ(smollm.no_rope_every, 4);
  EXPECT_EQ(smollm.rope_base, 2e6);
  EXPECT_TRUE(smollm.tied);
  DecoderConfig olmo = read(family_json("olmo2"));
  EXPECT_EQ(olmo.norms, NormPlacement::kAfter);
  EXPECT_EQ(olmo.qk_norm, QKNorm::kWhole);
  EXPECT_EQ(olmo.norm_eps, 1e-5);
  EXPECT_TRUE(read(family_json("phi3")).fused_projections);
  DecoderConfig gemma = read(family_json("gemma3_text"));
  EXPECT_TRUE(gemma.norm_from_one && gemma.scaled_embedding && gemma.tied);
  EXPECT_EQ(gemma.activation, GateActivation::kGeluTanh);
  EXPECT_EQ(gemma.norms, NormPlacement::kAround);
  EXPECT_EQ(gemma.full_every, 6);
  EXPECT_EQ(gemma.rope_base, 1e6);
  EXPECT_EQ(gemma.local_rope_base, 10000);
  EXPECT_EQ(gemma.query_pre_attn_scalar, 256);
}

TEST(HuggingFaceFamilies, KeysThatAreNotKnownAreRefusedByName) {
  for (const std::string& type : kFamilyTypes) {
    expect_refused(family_json(type), "residual_multiplier", 0.22);
    expect_refused(family_json(type), "attention_dropout", 0.1);
    Json json = family_json(type);
    json["residual_multiplier"] = nullptr;  // as if it weren't there
    json["transformers_version"] = "5.0.0";
    EXPECT_EQ(refusal_of(json.dump()), "") << type;
  }
  expect_refused(gpt2_json(), "residual_multiplier", 0.22);
  Json scaled = llama_json();
  scaled["rope_scaling"] = llama3();
  scaled["rope_scaling"]["mscale"] = 2.0;
  EXPECT_NE(refusal_of(scaled.dump()).find("rope_scaling.mscale"), std::string::npos);
}

// What the published files say beside that.
TEST(HuggingFaceFamilies, PublishedKeysWithoutAnEffectAreKnown) {
  const std::map<std::string, Json> more = {
      {"llama", {{"is_llama_config", true}, {"rope_interleaved", false}, {"pretraining_tp", 1}}},
      {"qwen2", {{"max_window_layers", 28}, {"sliding_window", 4096}, {"use_mrope", false}}},
      {"qwen3", {{"max_window_layers", 28}, {"use_sliding_window", false}}},
      {"mistral", {{"attention_dropout", 0.0}, {"eos_token_id", 2}}},
      {"smollm3",
       {{"max_window_layers", 28}, {"use_sliding_window", false}, {"no_rope_layer_interval", 4}}},
      {"olmo2", {{"attention_bias", false}, {"pad_token_id", 1}}},
      {"phi3",
       {{"embd_pdrop", 0.0}, {"original_max_position_embeddings", 4096}, {"sliding_window", 2047}}},
      {"gemma3_text",
       {{"cache_implementation", "hybrid"},
        {"attn_logit_softcapping", nullptr},
        {"sliding_window_pattern", 6},
        {"use_bidirectional_attention", false}}}};
  for (const auto& [type, keys] : more) {
    Json json = family_json(type);
    json.update(keys);
    EXPECT_EQ(refusal_of(json.dump()), "") << type;
  }
}

TEST(HuggingFaceFamilies, ComputationsThatTheyDoNotHaveHereAreRefused) {
  Json gemma = family_json("gemma3_text"), smollm = family_json("smollm3");
  expect_refused(gemma, "attn_logit_softcapping", 50.0);
  expect_refused(gemma, "final_logit_softcapping", 30.0);
  expect_refused(gemma, "use_bidirectional_attention", true);
  expect_refused(gemma, "hidden_activation", "silu");
  expect_refused(gemma, "rope_scaling", {{"rope_type", "dynamic"}, {"factor", 8.0}});
  expect_refused(gemma, "layer_types", {"full_attention", "sliding_attention"});
  expect_refused(smollm, "use_sliding_window", true);
  expect_refused(smollm, "no_rope_layers", {0, 1, 1});
  expect_refused(smollm, "no_rope_layers", {1, 0});
  expect_refused(family_json("qwen3"), "attention_bias", true);
  expect_refused(family_json("olmo2"), "attention_bias", true);
  expect_refused(family_json("llama"), "partial_rotary_factor", 0.75);
  expect_refused(family_json("phi3"), "rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}});
  expect_refused(family_json("phi3"), "resid_pdrop", 0.1);
  expect_refused(family_json("llama"), "rope_interleaved", true);
  expect_refused(family_json("qwen3"), "num_key_value_heads", nullptr);
}

TEST(HuggingFaceFamilies, ExpertsAreRead) {
  const Mixture mixtral = read(family_json("mixtral")).mixture.value();
  EXPECT_EQ(mixtral.experts, 8);
  EXPECT_EQ(mixtral.top_k, 2);
  EXPECT_TRUE(mixtral.normalize);
  EXPECT_EQ(read(family_json("mixtral")).rope_base, 1e6);
  Json json = family_json("qwen3_moe");
  json.update({{"num_experts", 60}, {"moe_intermediate_size", 24}, {"norm_topk_prob", true}});
  const Mixture qwen = read(json).mixture.value();
  EXPECT_EQ(qwen.experts, 60);
  EXPECT_EQ(qwen.ffn, 24);
  EXPECT_TRUE(qwen.normalize);
  EXPECT_EQ(read(family_json("olmoe")).mixture->experts, 64);
  EXPECT_FALSE(read(family_json("olmoe")).mixture->normalize);
  json = family_json("dots1");
  json.update({{"first_k_dense_replace", 1}, {"routed_scaling_factor", 2.5}, {"n_group", 1}});
  const DecoderConfig dots = read(json);
  EXPECT_EQ(dots.mixture->shared, 2);
  EXPECT_EQ(dots.mixture->scale, 2.5);
  EXPECT_EQ(dots.mixture->score, nn::RouterScore::kSigmoid);
  EXPECT_TRUE(dots.mixture->biased);
  EXPECT_FALSE(has_experts(dots, 0));
  EXPECT_TRUE(has_experts(dots, 1));
}

TEST(HuggingFaceFamilies, RoutersThatAreNotSupportedAreRefused) {
  expect_refused(family_json("mixtral"), "router_jitter_noise", 0.1);
  Json mixtral = family_json("mixtral");
  mixtral["num_experts_per_tok"] = 9;
  EXPECT_NE(refusal_of(mixtral.dump()).find("9 of 8 experts"), std::string::npos);
  expect_refused(family_json("qwen3_moe"), "mlp_only_layers", {1});
  expect_refused(family_json("qwen3_moe"), "decoder_sparse_step", 2);
  expect_refused(family_json("olmoe"), "clip_qkv", 8.0);
  expect_refused(family_json("dots1"), "n_group", 4);
  expect_refused(family_json("dots1"), "max_window_layers", 1);
  expect_refused(family_json("dots1"), "first_k_dense_replace", 99);
  expect_refused(family_json("dots1"), "n_shared_experts", nullptr);
}

TEST(HuggingFaceFamilies, LayersAreReadFromLists) {
  Json gemma = family_json("gemma3_text"), smollm = family_json("smollm3");
  gemma["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention"};
  EXPECT_EQ(read(gemma).full_every, 2);
  gemma["sliding_window_pattern"] = 2;
  gemma["layer_types"] = {"sliding_attention", "sliding_attention", "sliding_attention"};
  EXPECT_EQ(read(gemma).full_every, 0);
  gemma["layer_types"] = {"full_attention", "full_attention", "full_attention"};
  EXPECT_EQ(read(gemma).full_every, 1);
  smollm["no_rope_layers"] = {1, 0, 1};
  EXPECT_EQ(read(smollm).no_rope_every, 2);
  smollm["no_rope_layers"] = {1, 1, 1};
  EXPECT_EQ(read(smollm).no_rope_every, 0);
}

TEST(HuggingFaceFamilies, LongRopeNeedsAFactorForEachFrequency) {
  Json phi = family_json("phi3");
  phi["max_position_embeddings"] = 131072;
  phi["original_max_position_embeddings"] = 4096;
  phi["rope_scaling"] = {{"type", "longrope"},
                         {"short_factor", std::vector<double>(8, 1.0)},
                         {"long_factor", std::vector<double>(8, 1.5)}};
  DecoderConfig config = read(phi);
  ASSERT_TRUE(config.long_rope);
  EXPECT_EQ(config.long_rope->long_factors.at(7), 1.5);
  EXPECT_EQ(config.long_rope->original_max_position_embeddings, 4096);
  EXPECT_EQ(config.long_rope->max_position_embeddings, 131072);
  Json other = phi;
  other["rope_scaling"]["factor"] = 8.0;  // not the ratio of the contexts
  EXPECT_NE(refusal_of(other.dump()).find("rope_scaling.factor"), std::string::npos);
  other = phi;
  other["rope_scaling"]["long_factor"] = {1.0, 2.0};
  EXPECT_NE(refusal_of(other.dump()), "");
  other = phi;
  other["model_type"] = "llama";
  EXPECT_NE(refusal_of(other.dump()).find("rope_scaling.rope_type"), std::string::npos);
}

TEST(HuggingFaceFamilies, ScaledAndPartialPositionsReadBack) {
  Json qwen = family_json("qwen3"), llama = family_json("llama"), phi = family_json("phi3");
  qwen["rope_scaling"] = {
      {"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32768}};
  llama["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
  phi["partial_rotary_factor"] = 0.75;
  ASSERT_TRUE(read(qwen).yarn);
  EXPECT_EQ(read(qwen).yarn->beta_fast, 32);
  EXPECT_NEAR(read(qwen).yarn->attention_factor, 1.138629, 1e-6);
  EXPECT_EQ(read(llama).linear_rope, 8);
  EXPECT_EQ(read(phi).rotary_dim, rotary_dim(read(phi)));
  EXPECT_EQ(read(phi).rotary_dim * 4, read(phi).head_dim * 3);
  for (const Json& json : {qwen, llama, phi}) {
    const std::string text = hugging_face_config(read(json), "float32", 512);
    EXPECT_EQ(hugging_face_config(read(Json::parse(text)), "float32", 512), text);
    EXPECT_NE(text.find("head_dim"), std::string::npos);
  }
  qwen["rope_scaling"]["beta_fast"] = 0.5;
  EXPECT_NE(refusal_of(qwen.dump()).find("YaRN"), std::string::npos);
  phi["partial_rotary_factor"] = 0.2;  // three elements of sixteen
  EXPECT_NE(refusal_of(phi.dump()).find("rotary_dim"), std::string::npos);
}

TEST(HuggingFaceFamilies, WrittenConfigsReadBack) {
  for (const std::string& type : kFamilyTypes) {
    DecoderConfig config = read(family_json(type));
    if (type == "phi3")
      config.long_rope = LongRope{.short_factors = std::vector<double>(8, 1.1),
                                  .long_factors = std::vector<double>(8, 1.7)};
    if (config.window > 0) config.window = 77;
    const std::string text = hugging_face_config(config, "float32", 512);
    const Json json = Json::parse(text);
    EXPECT_EQ(json.at("model_type"), type);
    DecoderConfig back = std::get<DecoderConfig>(parse_hugging_face_config(text, "config.json"));
    EXPECT_EQ(hugging_face_config(back, "float32", 512), text);
    EXPECT_EQ(parameter_count(back), parameter_count(config));
    EXPECT_EQ(back.window, config.window);
    EXPECT_EQ(back.full_every, config.full_every);
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      EXPECT_EQ(window_of(back, layer), window_of(config, layer)) << type;
      EXPECT_EQ(has_positions(back, layer), has_positions(config, layer)) << type;
    }
  }
}

TEST(HuggingFaceFamilies, ADescriptionOfNoFamilyIsNotWritten) {
  for (DecoderConfig config : {DecoderConfig{.qk_norm = QKNorm::kHead}, DecoderConfig{.window = 8},
                               DecoderConfig{.norms = NormPlacement::kAfter}})
    EXPECT_THROW(hugging_face_config(config, "float32"), Error);
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
