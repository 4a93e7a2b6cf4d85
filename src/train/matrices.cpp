#include "train/matrices.h"

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "train/model_shape.h"

namespace fsdp::train {
namespace {

using Split = std::function<MatrixSplit(const std::string& name, const at::Tensor& parameter)>;

std::vector<int64_t> in_parts_of(int64_t part, int64_t sum) {
  return std::vector<int64_t>(static_cast<size_t>(sum / part), part);
}

// GPT-2's weights are [in, out].
Split gpt2_split(const models::GPT2Config& shape, bool per_head) {
  const int64_t part = per_head ? shape.dim / shape.heads : shape.dim;
  return [sizes = in_parts_of(part, 3 * shape.dim)](const std::string& name, const at::Tensor&) {
    return name.ends_with("c_attn.weight") ? MatrixSplit{1, sizes} : MatrixSplit{};
  };
}

Split decoder_split(const models::DecoderConfig& shape, bool per_head) {
  const int64_t head = shape.head_dim, queries = shape.heads * head, keys = shape.kv_heads * head;
  const int64_t expert = shape.mixture ? shape.mixture->ffn : 0;
  return [=, ffn = shape.ffn](const std::string& name, const at::Tensor&) -> MatrixSplit {
    if (name.ends_with("gate_up_proj.weight")) return {0, {ffn, ffn}};
    if (name.ends_with("experts.gate_up_proj")) return {0, {expert, expert}};
    const bool fused = name.ends_with("qkv_proj.weight");
    if (fused && !per_head) return {0, {queries, keys, keys}};
    if (fused) return {0, in_parts_of(head, queries + 2 * keys)};
    if (!per_head) return {};
    if (name.ends_with("q_proj.weight")) return {0, in_parts_of(head, queries)};
    if (name.ends_with("k_proj.weight") || name.ends_with("v_proj.weight"))
      return {0, in_parts_of(head, keys)};
    return {};
  };
}

}  // namespace

MatrixParameters matrix_parameters(const Config& config) {
  const bool per_head = config.optim.muon_per_head;
  // Adapters are cut as little as the mlp's weights: the base is frozen.
  if (config.model.type == models::ModelType::kMlp || config.lora.rank > 0) return {};
  const models::AnyConfig shape = model_shape(config, std::max<int64_t>(1, config.model.vocab));
  if (const auto* gpt2 = std::get_if<models::GPT2Config>(&shape))
    return {.split = gpt2_split(models::checked(*gpt2), per_head)};
  return {.split =
              decoder_split(models::checked(std::get<models::DecoderConfig>(shape)), per_head)};
}

}  // namespace fsdp::train
