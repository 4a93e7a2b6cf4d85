// [context], [lora] and [fp8] of a run's config.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/options.h"
#include "fsdp/nn/functional.h"

namespace fsdp::nn {

constexpr auto enum_table(Quant) {
  return std::to_array<EnumName>({{"plain", "in shard.precision"},
                                  {"nf4", "4 bits per number, as QLoRA's"},
                                  {"nf4_double", "nf4 with scales of 8 bits"},
                                  {"int8", "8 bits per number"}});
}

enum class ContextChoice { kAuto, kUlysses, kRing };
constexpr auto enum_table(ContextChoice) {
  return std::to_array<EnumName>({{"auto", "ulysses where heads can be divided, else ring"},
                                  {"ulysses", "all-to-alls exchange heads"},
                                  {"ring", "keys and values pass by all ranks"}});
}

struct ContextConfig {
  int64_t size = 1;  // ranks that share each sequence
  ContextChoice kind = ContextChoice::kAuto;
};

struct LoRAConfig {
  int64_t rank = 0;  // 0: no adapters
  double alpha = 16;
  double dropout = 0;
  std::vector<std::string> targets = {};  // ends of names; empty: all linears of blocks
  bool rslora = false;
  Quant base = Quant::kNone;
  std::string init_from = "";  // PEFT's directory; empty: new adapters
};

enum class Fp8Recipe { kTensorwise, kRowwise, kRowwiseBf16Grad };
constexpr auto enum_table(Fp8Recipe) {
  return std::to_array<EnumName>(
      {{"tensorwise", "one factor per matrix, the fastest"},
       {"rowwise", "one per row of each operand"},
       {"rowwise_bf16_grad", "rowwise, but gradients of weights are products in bf16"}});
}

struct Fp8Config {  // with shard.precision = fp8
  Fp8Recipe recipe = Fp8Recipe::kTensorwise;
  std::vector<std::string> skip = {};  // ends of names
  int64_t least = 128;                 // inputs and outputs of a linear
};

inline void describe(Fp8Config& fp8, OptionList& list) {
  list.section("fp8", "Matrix products of one-byte numbers: shard.precision = fp8");
  list.add("recipe", fp8.recipe, "How numbers are scaled before they are rounded");
  list.add(
      "skip", fp8.skip,
      "Linears that stay in bf16, by the end of their names: o_proj, layers.0.mlp.down_proj, …");
  list.add("least", fp8.least, "Linears with fewer inputs or outputs stay in bf16",
           {.least = 16, .most = 1e9});
}

inline void describe(ContextConfig& context, OptionList& list) {
  list.section("context", "Sequences that several ranks share");
  list.add("size", context.size,
           "Ranks that share each sequence, each with a part of it; 1: whole sequences",
           {.least = 1, .most = 1e6});
  list.add("kind", context.kind, "How attention sees the tokens of other ranks");
}

inline void describe(LoRAConfig& lora, OptionList& list) {
  list.section("lora", "Adapters: train small matrices beside frozen linears");
  list.add("rank", lora.rank, "Rank of the adapters; 0: no adapters, all parameters are trained",
           {.least = 0, .most = 65536});
  list.add("alpha", lora.alpha, "Adapters are multiplied by alpha / rank", {.least = 0});
  list.add("dropout", lora.dropout, "Dropout probability on the input of adapters",
           {.least = 0, .most = 0.999999});
  list.add("targets", lora.targets,
           "Linears that have adapters, by the end of their names: q_proj, v_proj, …; empty: all "
           "but the output layer");
  list.add("rslora", lora.rslora, "Adapters are multiplied by alpha / sqrt(rank) instead");
  list.add("base", lora.base,
           "How the weights of the frozen linears are stored, gathered and kept on each rank");
  list.add("init_from", lora.init_from,
           "Start from the adapters in this directory, as PEFT writes it (adapter_config.json and "
           "adapter_model.safetensors), with its rank, alpha, targets and rslora; empty: new ones");
}

}  // namespace fsdp::nn
