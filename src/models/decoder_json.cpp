#include "models/decoder_json.h"

#include <algorithm>
#include <cmath>

#include "base/format.h"

namespace fsdp::models {
namespace {

// --- rotary positions ---
//
// transformers 5 writes "rope_parameters", earlier versions "rope_theta" and "rope_scaling".

// Without an effect on positions that aren't scaled.
constexpr std::string_view kOnlyScaled[] = {"factor", "low_freq_factor", "high_freq_factor",
                                            "original_max_position_embeddings"};

void read_long_rope(const Fields& fields, const Fields& rope, DecoderConfig& config) {
  const char* original = "original_max_position_embeddings";
  const int64_t common = fields.count(original, 4096, kMostTokens);
  LongRope made{
      .short_factors = rope.numbers("short_factor"),
      .long_factors = rope.numbers("long_factor"),
      .original_max_position_embeddings = rope.count(original, common, kMostTokens),
      .max_position_embeddings = fields.count("max_position_embeddings", 4096, kMostTokens)};
  const double ratio = static_cast<double>(made.max_position_embeddings) /
                       static_cast<double>(made.original_max_position_embeddings);
  rope.need_number("factor", ratio);
  config.long_rope = std::move(made);
}

double mscale(double factor, double by) {
  return factor <= 1 ? 1 : 0.1 * by * std::log(factor) + 1;
}

void read_yarn(const Fields& fields, const Fields& rope, DecoderConfig& config) {
  const char* original = "original_max_position_embeddings";
  const int64_t longest =
      fields.count("max_position_embeddings", row_of(config.family).max_positions, kMostTokens);
  Yarn made{.beta_fast = rope.number("beta_fast", 32),
            .beta_slow = rope.number("beta_slow", 1),
            .attention_factor = rope.number("attention_factor", 0),
            .truncate = rope.flag("truncate", true),
            .original_max_position_embeddings = rope.count(original, longest, kMostTokens)};
  made.factor =
      rope.number("factor", static_cast<double>(longest) /
                                static_cast<double>(made.original_max_position_embeddings));
  const double own = rope.number("mscale", 0), all = rope.number("mscale_all_dim", 0);
  if (made.attention_factor == 0)
    made.attention_factor = own > 0 && all > 0 ? mscale(made.factor, own) / mscale(made.factor, all)
                                               : mscale(made.factor, 1);
  config.yarn = made;
}

// The share of a head that is rotated.
void read_partial(double share, DecoderConfig& config) {
  const int64_t head = config.head_dim > 0 ? config.head_dim : config.dim / config.heads;
  const auto rotary = static_cast<int64_t>(static_cast<double>(head) * share);
  config.rotary_dim = rotary == head ? 0 : std::max<int64_t>(rotary, 1);  // 1 is refused
}

// `rope`: the object that describes the positions.
void read_positions(const Fields& fields, const Fields& rope, DecoderConfig& config) {
  config.rope_base = rope.number("rope_theta", config.rope_base);
  const char* partial = "partial_rotary_factor";
  if (config.family != Family::kPhi3)
    rope.need_number(partial, 1);
  else if (rope.has(partial))
    read_partial(std::min(1.0, rope.number(partial, 1)), config);
  const std::string old = rope.text("type", "default"), type = rope.text("rope_type", old);
  const bool phi = config.family == Family::kPhi3;
  if (phi && (type == "longrope" || type == "su")) {
    read_long_rope(fields, rope, config);
  } else if (type == "llama3") {
    config.rope_scaling = RopeScaling{.factor = rope.number("factor", {}),
                                      .low_freq_factor = rope.number("low_freq_factor", {}),
                                      .high_freq_factor = rope.number("high_freq_factor", {}),
                                      .original_max_position_embeddings = rope.count(
                                          "original_max_position_embeddings", {}, kMostTokens)};
  } else if (type == "default") {
    return rope.refuse_unknown(kOnlyScaled);
  } else if (type == "linear" && !phi) {
    config.linear_rope = rope.number("factor", {});
    return rope.refuse_unknown(kOnlyScaled);
  } else if (type == "yarn" && !phi) {
    read_yarn(fields, rope, config);
  } else {
    rope.refuse("rope_type", formatted("is \"{}\"; {} are supported", type,
                                       phi ? "\"default\" and \"longrope\""
                                           : "\"default\", \"linear\", \"llama3\" and \"yarn\""));
  }
  rope.refuse_unknown({});
}

void read_rope(const Fields& fields, const FamilyRow& row, DecoderConfig& config) {
  config.rope_base = fields.number("rope_theta", row.rope_base);
  const bool gemma = config.family == Family::kGemma3;
  if (gemma) config.local_rope_base = fields.number("rope_local_base_freq", 10000);
  if (config.family == Family::kPhi3)
    read_partial(std::min(1.0, fields.number("partial_rotary_factor", 1)), config);
  else
    fields.need_number("partial_rotary_factor", 1);
  // If both are present, transformers uses the older one.
  const bool old = fields.has("rope_scaling"), current = fields.has("rope_parameters");
  if (gemma && current) {
    const Fields both = fields.object("rope_parameters");
    if (both.has("full_attention")) read_positions(fields, both.object("full_attention"), config);
    if (both.has("sliding_attention")) {
      const Fields local = both.object("sliding_attention");
      config.local_rope_base = local.number("rope_theta", config.local_rope_base);
      local.need_text("rope_type", {"default"});
      local.need_number("partial_rotary_factor", 1);
      local.refuse_unknown({});
    }
    both.refuse_unknown({});
  }
  if (old)
    read_positions(fields, fields.object("rope_scaling"), config);
  else if (current && !gemma)
    read_positions(fields, fields.object("rope_parameters"), config);
}

// --- which layers have what ---

// Qwen's windows begin at some layer; models with a window in use are refused.
void check_qwen_window(const Fields& fields, const DecoderConfig& config) {
  const bool windowed = fields.has("sliding_window");
  const int64_t full = fields.count("max_window_layers", 28, kMostLayers);
  if (fields.has("layer_types")) {
    fields.flag("use_sliding_window", false);  // layer_types says which layers
    return;
  }
  if (fields.flag("use_sliding_window", false) && windowed && full < config.layers)
    fields.refuse("use_sliding_window is true, which the models here don't support");
}

// As Qwen's, but there is a window unless sliding_window is null. layer_types is checked elsewhere.
void check_dots_window(const Fields& fields, const DecoderConfig& config) {
  const bool windowed = !fields.null("sliding_window");
  if (fields.has("sliding_window")) fields.count("sliding_window", {}, kMostTokens);
  const int64_t full = fields.count("max_window_layers", 62, kMostLayers);
  if (windowed && !fields.has("layer_types") && full < config.layers)
    fields.refuse("max_window_layers",
                  "is below num_hidden_layers: the models here have no windows in this family");
}

// The n of lists in which each n-th layer is of another kind; 0: none is.
int64_t period_of(const std::vector<bool>& other) {
  const auto first = std::find(other.begin(), other.end(), true);
  return first == other.end() ? 0 : first - other.begin() + 1;
}

void read_gemma_layers(const Fields& fields, DecoderConfig& config) {
  config.full_every = fields.count(
      fields.has("_sliding_window_pattern") ? "_sliding_window_pattern" : "sliding_window_pattern",
      6, kMostLayers);
  if (!fields.has("layer_types") || !fields["layer_types"].is_array()) return;
  std::vector<bool> full;
  bool fits = true;
  for (const Json& type : fields["layer_types"]) {
    full.push_back(type == "full_attention");
    fits = fits && full.back() == (static_cast<int64_t>(full.size()) % config.full_every == 0);
  }
  if (!fits) config.full_every = period_of(full);
}

void read_window(const Fields& fields, DecoderConfig& config) {
  switch (config.family) {
    case Family::kQwen2:
    case Family::kQwen3:
      return check_qwen_window(fields, config);
    case Family::kMistral:
      if (fields.null("sliding_window")) return;
      config.window = fields.count("sliding_window", 4096, kMostTokens);
      return;
    case Family::kQwen3Moe:
      fields.has("sliding_window");  // without an effect
      return fields.need("use_sliding_window", false);
    case Family::kMixtral:
      if (fields.has("sliding_window"))
        config.window = fields.count("sliding_window", {}, kMostTokens);
      return;
    case Family::kDots1:
      return check_dots_window(fields, config);
    case Family::kPhi3:
      fields.has("original_max_position_embeddings");  // without an effect unless LongRoPE's
      if (fields.has("sliding_window"))
        config.window = fields.count("sliding_window", {}, kMostTokens);
      return;
    case Family::kGemma3:
      config.window = fields.count("sliding_window", 4096, kMostTokens);
      return read_gemma_layers(fields, config);
    case Family::kSmolLM3:
      fields.has("sliding_window");  // without an effect
      return fields.need("use_sliding_window", false);
    default:
      return;
  }
}

void check_layer_types(const Fields& fields, const DecoderConfig& config) {
  if (!fields.has("layer_types")) return;
  const Json& types = fields["layer_types"];
  if (!types.is_array() || static_cast<int64_t>(types.size()) != config.layers)
    fields.refuse("layer_types isn't a list with a type for each layer");
  for (int64_t layer = 0; layer < config.layers; ++layer)
    if (types[static_cast<size_t>(layer)] !=
        (window_of(config, layer) > 0 ? "sliding_attention" : "full_attention"))
      fields.refuse("layer_types",
                    formatted("has another type for layer {} than models of this family", layer));
}

void read_layers_without_positions(const Fields& fields, DecoderConfig& config) {
  config.no_rope_every = fields.count("no_rope_layer_interval", 4, kMostLayers);
  if (!fields.has("no_rope_layers")) return;
  const Json& list = fields["no_rope_layers"];  // 1: with positions
  if (!list.is_array() || static_cast<int64_t>(list.size()) < config.layers)
    fields.refuse("no_rope_layers isn't a list with a number for each layer");
  std::vector<bool> without;
  for (int64_t layer = 0; layer < config.layers; ++layer)
    without.push_back(list[static_cast<size_t>(layer)] == 0);
  config.no_rope_every = period_of(without);
  for (int64_t layer = 0; layer < config.layers; ++layer)
    if (has_positions(config, layer) == without[static_cast<size_t>(layer)])
      fields.refuse("no_rope_layers", "isn't each n-th layer, as the models here have it");
}

// --- experts ---

constexpr int64_t kMostExperts = 1'000'000;

void read_experts(const Fields& fields, DecoderConfig& config) {
  const Family family = config.family;
  Mixture& mixture = *config.mixture;
  for (const char* key : {"output_router_logits", "router_aux_loss_coef"})
    fields.has(key);  // about training: the run decides
  const auto count = [&](const char* key, int64_t otherwise) {
    return fields.count(key, otherwise, kMostExperts);
  };
  const auto experts = [&](const char* key, int64_t otherwise) {
    return fields.count(key, "num_local_experts", otherwise, kMostExperts);
  };
  switch (family) {
    case Family::kMixtral:
      mixture.experts = count("num_local_experts", 8);
      mixture.top_k = count("num_experts_per_tok", 2);
      return fields.need_number("router_jitter_noise", 0);
    case Family::kQwen3Moe:
      mixture.experts = experts("num_experts", 128);
      mixture.top_k = count("num_experts_per_tok", 8);
      mixture.ffn = fields.count("moe_intermediate_size", 768, 10 * kWidest);
      mixture.normalize = fields.flag("norm_topk_prob", false);
      fields.need_number("decoder_sparse_step", 1);
      if (fields.has("mlp_only_layers") && !fields["mlp_only_layers"].empty())
        fields.refuse("mlp_only_layers", "names layers, which the models here don't support");
      return;
    case Family::kOlmoe:
      mixture.experts = experts("num_experts", 64);
      mixture.top_k = count("num_experts_per_tok", 8);
      mixture.normalize = fields.flag("norm_topk_prob", false);
      if (fields.has("clip_qkv"))
        fields.refuse("clip_qkv", "is set, which the models here don't support");
      return;
    default:
      break;
  }
  mixture.experts = fields.count(
      fields.has("n_routed_experts") ? "n_routed_experts" : "num_local_experts", {}, kMostExperts);
  mixture.top_k = fields.count("num_experts_per_tok", {}, kMostExperts);
  mixture.shared = fields.count("n_shared_experts", {}, 1024);
  mixture.ffn = fields.count("moe_intermediate_size", 1408, 10 * kWidest);
  mixture.normalize = fields.flag("norm_topk_prob", false);
  mixture.scale = fields.number("routed_scaling_factor", 1);
  const double dense = fields.number("first_k_dense_replace", 0);
  if (dense > static_cast<double>(config.layers) || dense != std::floor(dense))
    fields.refuse("first_k_dense_replace", "isn't a number of layers");
  mixture.dense_layers = static_cast<int64_t>(dense);
  if (count("n_group", 1) != count("topk_group", 1))
    fields.refuse("topk_group", "isn't n_group: choosing groups of experts isn't supported");
  fields.need_text("scoring_func", {"sigmoid"});
  fields.need_text("topk_method", {"noaux_tc"});
  fields.need_number("moe_layer_freq", 1);
}

void add_experts(Json& json, const DecoderConfig& c) {
  const Mixture& mixture = *c.mixture;
  json["num_experts_per_tok"] = mixture.top_k;
  json["output_router_logits"] = false;
  if (c.family == Family::kMixtral) {
    json["num_local_experts"] = mixture.experts;
    json["sliding_window"] = c.window > 0 ? Json(c.window) : Json();
    return;
  }
  json["attention_bias"] = false;
  json["norm_topk_prob"] = mixture.normalize;
  if (c.family != Family::kDots1) json["num_experts"] = mixture.experts;
  if (c.family == Family::kOlmoe)
    json.erase("head_dim");
  else
    json["moe_intermediate_size"] = mixture.ffn;
  if (c.family == Family::kQwen3Moe) {
    json["use_sliding_window"] = false;
    json["decoder_sparse_step"] = 1;
    json["mlp_only_layers"] = Json::array();
  }
  if (c.family != Family::kDots1) return;
  json["sliding_window"] = Json();
  json["n_routed_experts"] = mixture.experts;
  json["n_shared_experts"] = mixture.shared;
  json["routed_scaling_factor"] = mixture.scale;
  json["first_k_dense_replace"] = mixture.dense_layers;
  json["n_group"] = 1;
  json["topk_group"] = 1;
}

// --- the rest ---

void read_sizes(const Fields& fields, const FamilyRow& row, DecoderConfig& config) {
  config.vocab = fields.count("vocab_size", {}, kMostTokens);
  config.dim = fields.count("hidden_size", {}, kWidest);
  config.layers = fields.count("num_hidden_layers", {}, kMostLayers);
  config.heads = fields.count("num_attention_heads", {}, kWidest);
  if (!row.all_kv_heads && !fields.has("num_key_value_heads"))
    fields.refuse("num_key_value_heads is missing");
  config.kv_heads = fields.count("num_key_value_heads", config.heads, kWidest);
  config.head_dim = fields.has("head_dim") ? fields.count("head_dim", {}, kWidest) : row.head_dim;
  config.ffn = fields.count("intermediate_size", {}, 10 * kWidest);
}

void check_supported(const Fields& fields, const DecoderConfig& config) {
  if (config.family == Family::kGemma3) {
    fields.need_text("hidden_activation", {"gelu_pytorch_tanh"});
    for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"})
      if (fields.has(key)) fields.refuse(key, "is set, which the models here don't support");
    fields.need("use_bidirectional_attention", false);
  } else {
    fields.need_text("hidden_act", {"silu", "swish"});
  }
  if (config.family == Family::kQwen2)
    fields.has("attention_bias");  // always there, whatever this says
  else
    fields.need("attention_bias", false);
  fields.need("mlp_bias", false);
  fields.need("use_mrope", false);
  fields.need("rope_interleaved", false);
  for (const char* key : {"attention_dropout", "resid_pdrop", "embd_pdrop"})
    fields.need_number(key, 0);
}

Json scaling_json(const DecoderConfig& c) {
  if (c.rope_scaling)
    return {{"rope_type", "llama3"},
            {"factor", c.rope_scaling->factor},
            {"low_freq_factor", c.rope_scaling->low_freq_factor},
            {"high_freq_factor", c.rope_scaling->high_freq_factor},
            {"original_max_position_embeddings", c.rope_scaling->original_max_position_embeddings}};
  if (c.yarn)
    return {{"rope_type", "yarn"},
            {"factor", c.yarn->factor},
            {"beta_fast", c.yarn->beta_fast},
            {"beta_slow", c.yarn->beta_slow},
            {"attention_factor",
             c.yarn->attention_factor > 0 ? c.yarn->attention_factor : mscale(c.yarn->factor, 1)},
            {"truncate", c.yarn->truncate},
            {"original_max_position_embeddings", c.yarn->original_max_position_embeddings}};
  if (c.linear_rope > 0) return {{"rope_type", "linear"}, {"factor", c.linear_rope}};
  if (c.long_rope)  // transformers 4 refuses any further key
    return {{"type", "longrope"},
            {"short_factor", c.long_rope->short_factors},
            {"long_factor", c.long_rope->long_factors}};
  return {};
}

// What gives rotary_dim back when it is multiplied by head_dim and cut.
double rotary_share(const DecoderConfig& c) {
  const auto head = static_cast<double>(c.head_dim);
  double share = static_cast<double>(c.rotary_dim) / head;
  while (static_cast<int64_t>(share * head) < c.rotary_dim) share = std::nextafter(share, 1.0);
  return share;
}

int64_t positions_of(const DecoderConfig& c, int64_t max_positions) {
  if (c.long_rope) return c.long_rope->max_position_embeddings;  // the ratio has an effect
  if (max_positions > 0) return max_positions;
  const auto times = [](double factor, int64_t original) {
    return static_cast<int64_t>(std::min(1e9, factor * static_cast<double>(original)));
  };
  if (c.yarn) return times(c.yarn->factor, c.yarn->original_max_position_embeddings);
  if (!c.rope_scaling) return row_of(c.family).max_positions;
  return times(c.rope_scaling->factor, c.rope_scaling->original_max_position_embeddings);
}

// Keys that not all families have, but for those of experts.
void add_own(Json& json, const DecoderConfig& c) {
  const auto window = c.window > 0 ? Json(c.window) : Json();
  // transformers' default may be outside of the vocabulary.
  if (c.family > Family::kMistral) json["pad_token_id"] = Json();
  switch (c.family) {
    case Family::kLlama:
      json["attention_bias"] = false;
      json["mlp_bias"] = false;
      break;
    case Family::kQwen2:
      json["use_sliding_window"] = false;
      break;
    case Family::kQwen3:
      json["attention_bias"] = false;
      json["use_sliding_window"] = false;
      break;
    case Family::kMistral:
      json["sliding_window"] = window;
      break;
    case Family::kSmolLM3:
      json["use_sliding_window"] = false;
      json["no_rope_layers"] = Json::array();
      for (int64_t layer = 0; layer < c.layers; ++layer)
        json["no_rope_layers"].push_back(has_positions(c, layer) ? 1 : 0);
      break;
    case Family::kOlmo2:
      json["attention_bias"] = false;
      break;
    case Family::kPhi3:
      json["sliding_window"] = window;
      if (rotary_dim(c) < c.head_dim) json["partial_rotary_factor"] = rotary_share(c);
      json["original_max_position_embeddings"] =
          c.long_rope ? c.long_rope->original_max_position_embeddings : int64_t{4096};
      break;
    case Family::kGemma3:
      json.erase("hidden_act");
      json["hidden_activation"] = "gelu_pytorch_tanh";
      json["attention_bias"] = false;
      json["query_pre_attn_scalar"] =
          c.query_pre_attn_scalar > 0 ? c.query_pre_attn_scalar : c.head_dim;
      json["rope_local_base_freq"] = c.local_rope_base > 0 ? c.local_rope_base : c.rope_base;
      json["sliding_window"] = std::max<int64_t>(1, c.window);
      if (c.full_every > 0) json["sliding_window_pattern"] = c.full_every;
      json["layer_types"] = Json::array();
      for (int64_t layer = 0; layer < c.layers; ++layer)
        json["layer_types"].push_back(window_of(c, layer) > 0 ? "sliding_attention"
                                                              : "full_attention");
      break;
    default:  // add_experts()
      break;
  }
}

}  // namespace

DecoderConfig read_decoder(const Fields& fields, const FamilyRow& row) {
  DecoderConfig config = of_family(row.family, {});
  read_sizes(fields, row, config);
  config.tied = fields.flag("tie_word_embeddings", row.tied);
  config.norm_eps = fields.number("rms_norm_eps", row.norm_eps);
  config.init_std = fields.number("initializer_range", 0.02);
  if (row.family == Family::kGemma3)
    config.query_pre_attn_scalar = fields.count("query_pre_attn_scalar", 256, kWidest);
  read_rope(fields, row, config);
  check_supported(fields, config);
  read_window(fields, config);
  if (config.mixture) read_experts(fields, config);
  check_layer_types(fields, config);
  if (row.family == Family::kSmolLM3) read_layers_without_positions(fields, config);
  return checked(config);
}

Json decoder_json(const DecoderConfig& c, int64_t max_positions) {
  check_family(c);
  const FamilyRow& row = row_of(c.family);
  Json json = {{"architectures", {std::string(row.architecture)}},
               {"model_type", std::string(row.type)},
               {"vocab_size", c.vocab},
               {"hidden_size", c.dim},
               {"intermediate_size", c.ffn},
               {"num_hidden_layers", c.layers},
               {"num_attention_heads", c.heads},
               {"num_key_value_heads", c.kv_heads},
               {"head_dim", c.head_dim},
               {"hidden_act", "silu"},
               {"max_position_embeddings", positions_of(c, max_positions)},
               {"initializer_range", c.init_std},
               {"rms_norm_eps", c.norm_eps},
               {"rope_theta", c.rope_base},
               {"rope_scaling", scaling_json(c)},
               {"tie_word_embeddings", c.tied},
               {"attention_dropout", 0.0},
               {"use_cache", true}};
  add_own(json, c);
  if (c.mixture) add_experts(json, c);
  return json;
}

}  // namespace fsdp::models
