#include "models/parameter_shapes.h"

#include "base/format.h"

namespace fsdp::models {
namespace {

void add_attention(ParameterShapes& shapes, const DecoderConfig& c, const std::string& name) {
  const int64_t queries = c.heads * c.head_dim, keys = c.kv_heads * c.head_dim;
  const auto add = [&](const char* part, std::vector<int64_t> sizes) {
    shapes.emplace_back(name + part, std::move(sizes));
  };
  if (c.fused_projections) {
    add("qkv_proj.weight", {queries + 2 * keys, c.dim});
  } else {
    for (const auto& [part, rows] :
         {std::pair("q_proj", queries), std::pair("k_proj", keys), std::pair("v_proj", keys)}) {
      add(formatted("{}.weight", part).c_str(), {rows, c.dim});
      if (c.qkv_bias) add(formatted("{}.bias", part).c_str(), {rows});
    }
  }
  add("o_proj.weight", {c.dim, queries});
  if (c.qk_norm == QKNorm::kNone) return;
  const bool heads = c.qk_norm == QKNorm::kHead;
  add("q_norm.weight", {heads ? c.head_dim : queries});
  add("k_norm.weight", {heads ? c.head_dim : keys});
}

void add_feed_forward(ParameterShapes& shapes, const DecoderConfig& c, const std::string& name,
                      int64_t ffn) {
  const auto add = [&](const char* part, std::vector<int64_t> sizes) {
    shapes.emplace_back(name + part, std::move(sizes));
  };
  if (c.fused_projections) {
    add("gate_up_proj.weight", {2 * ffn, c.dim});
  } else {
    add("gate_proj.weight", {ffn, c.dim});
    add("up_proj.weight", {ffn, c.dim});
  }
  add("down_proj.weight", {c.dim, ffn});
}

void add_experts(ParameterShapes& shapes, const DecoderConfig& c, const std::string& name) {
  const Mixture& mixture = *c.mixture;
  shapes.emplace_back(name + "gate.weight", std::vector{mixture.experts, c.dim});
  shapes.emplace_back(name + "experts.gate_up_proj",
                      std::vector{mixture.experts, 2 * mixture.ffn, c.dim});
  shapes.emplace_back(name + "experts.down_proj", std::vector{mixture.experts, c.dim, mixture.ffn});
  if (mixture.shared > 0)
    add_feed_forward(shapes, c, name + "shared_experts.", mixture.shared * mixture.ffn);
}

ParameterShapes shapes_of(const DecoderConfig& given) {
  const DecoderConfig c = checked(given);
  ParameterShapes shapes;
  const auto add = [&](const std::string& name, std::vector<int64_t> sizes) {
    shapes.emplace_back(name, std::move(sizes));
  };
  add("model.embed_tokens.weight", {c.vocab, c.dim});
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const std::string block = formatted("model.layers.{}.", layer);
    if (c.norms != NormPlacement::kAfter) add(block + "input_layernorm.weight", {c.dim});
    add_attention(shapes, c, block + "self_attn.");
    add(block + "post_attention_layernorm.weight", {c.dim});
    if (c.norms == NormPlacement::kAround) add(block + "pre_feedforward_layernorm.weight", {c.dim});
    if (has_experts(c, layer))
      add_experts(shapes, c, block + "mlp.");
    else
      add_feed_forward(shapes, c, block + "mlp.", c.ffn);
    if (c.norms != NormPlacement::kBefore)
      add(block + "post_feedforward_layernorm.weight", {c.dim});
  }
  add("model.norm.weight", {c.dim});
  add(kHeadName, {c.vocab, c.dim});
  return shapes;
}

ParameterShapes shapes_of(const GPT2Config& given) {
  const GPT2Config c = checked(given);
  ParameterShapes shapes;
  const auto add = [&](const std::string& name, std::vector<int64_t> sizes) {
    shapes.emplace_back(name, std::move(sizes));
  };
  const auto add_norm = [&](const std::string& name) {
    add(name + ".weight", {c.dim});
    add(name + ".bias", {c.dim});
  };
  const auto add_linear = [&](const std::string& name, int64_t in, int64_t out) {
    add(name + ".weight", {in, out});
    add(name + ".bias", {out});
  };
  add("transformer.wte.weight", {c.vocab, c.dim});
  add("transformer.wpe.weight", {c.max_tokens, c.dim});
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    const std::string block = formatted("transformer.h.{}.", layer);
    add_norm(block + "ln_1");
    add_linear(block + "attn.c_attn", c.dim, 3 * c.dim);
    add_linear(block + "attn.c_proj", c.dim, c.dim);
    add_norm(block + "ln_2");
    add_linear(block + "mlp.c_fc", c.dim, c.ffn);
    add_linear(block + "mlp.c_proj", c.ffn, c.dim);
  }
  add_norm("transformer.ln_f");
  add(kHeadName, {c.vocab, c.dim});
  return shapes;
}

}  // namespace

ParameterShapes parameter_shapes(const AnyConfig& config) {
  return std::visit([](const auto& one) { return shapes_of(one); }, config);
}

ParameterShapes buffer_shapes(const AnyConfig& config) {
  ParameterShapes shapes;
  const auto* decoder = std::get_if<DecoderConfig>(&config);
  if (!decoder || !decoder->mixture || !decoder->mixture->biased) return shapes;
  for (int64_t layer = decoder->mixture->dense_layers; layer < decoder->layers; ++layer)
    shapes.emplace_back(formatted("model.layers.{}.mlp.gate.e_score_correction_bias", layer),
                        std::vector{decoder->mixture->experts});
  return shapes;
}

std::vector<FilePart> file_parts(const AnyConfig& config, const std::string& name,
                                 const std::vector<int64_t>& sizes) {
  constexpr std::string_view kExperts = ".mlp.experts.", kMlp = ".mlp.";
  const auto* decoder = std::get_if<DecoderConfig>(&config);
  const bool mixtral = decoder && decoder->family == Family::kMixtral;
  const size_t experts = name.find(kExperts), mlp = name.find(kMlp);
  std::string renamed = name;
  if (mixtral && mlp != std::string::npos) renamed.replace(mlp, kMlp.size(), ".block_sparse_moe.");
  if (experts == std::string::npos)
    return {{renamed, std::vector<int64_t>(sizes.size(), 0), sizes}};
  const bool down = name.ends_with(".down_proj");
  const std::string before = renamed.substr(0, renamed.rfind('.') + 1);
  const std::vector<const char*> parts =
      down ? std::vector{mixtral ? "w2" : "down_proj"}
           : std::vector{mixtral ? "w1" : "gate_proj", mixtral ? "w3" : "up_proj"};
  const int64_t rows = sizes[1] / static_cast<int64_t>(parts.size());
  std::vector<FilePart> all;
  for (int64_t expert = 0; expert < sizes[0]; ++expert)
    for (size_t part = 0; part < parts.size(); ++part)
      all.push_back({formatted("{}{}.{}.weight", before, expert, parts[part]),
                     {expert, static_cast<int64_t>(part) * rows, 0},
                     {1, rows, sizes[2]}});
  return all;
}

const char* embedding_name(const AnyConfig& config) {
  return std::holds_alternative<GPT2Config>(config) ? "transformer.wte.weight"
                                                    : "model.embed_tokens.weight";
}

bool is_tied(const AnyConfig& config) {
  return std::visit([](const auto& one) { return one.tied; }, config);
}

}  // namespace fsdp::models
