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
    if (c.fused_projections) {
      add(block + "mlp.gate_up_proj.weight", {2 * c.ffn, c.dim});
    } else {
      add(block + "mlp.gate_proj.weight", {c.ffn, c.dim});
      add(block + "mlp.up_proj.weight", {c.ffn, c.dim});
    }
    add(block + "mlp.down_proj.weight", {c.dim, c.ffn});
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

const char* embedding_name(const AnyConfig& config) {
  return std::holds_alternative<GPT2Config>(config) ? "transformer.wte.weight"
                                                    : "model.embed_tokens.weight";
}

bool is_tied(const AnyConfig& config) {
  return std::visit([](const auto& one) { return one.tied; }, config);
}

}  // namespace fsdp::models
