/// @file
/// Frozen linears in few bits, for adapters on models that wouldn't fit otherwise (QLoRA):
///
///     nn::add_lora(*model, {.rank = 16});
///     nn::quantise_linears(*model, {.quant = nn::Quant::kNf4});
///     auto sharded = fully_shard(model, …);
///     checkpoint::load(base, sharded, nullptr, {.only = …, .made_of =
///     nn::quantised_rows(*model)});
///
/// A weight [out, in] becomes bytes [out, …], rows of codes and scales. They are sharded and
/// gathered as bytes, and restored for each product, in forward and again in backward: beside the
/// bytes, one restored weight exists at a time. NF4 has the codes and the scales of bitsandbytes.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/checkpoint.h"
#include "fsdp/nn/functional.h"

namespace fsdp::nn {

/// Which linears are quantised, and how.
struct QuantPolicy {
  Quant quant = Quant::kNf4;  ///< How.

  /// Linears for which this is false stay as they are. Empty: all are quantised. Names are those of
  /// modules: "model.layers.0.mlp.down_proj".
  std::function<bool(const std::string& name)> where = {};
};

/// What quantise_linears() did with a linear.
struct QuantisedLinear {
  std::string name;     ///< Of the module.
  std::string why_not;  ///< Empty: it is quantised.
};

/// Quantises the weights of the fsdp::nn::Linear layers of a module, and returns all its linears.
///
/// A linear whose inputs aren't a multiple of 64 stays as it is, and so do torch's linears and all
/// other layers. Call it before fully_shard(), on every rank. Weights without values
/// (deferred_init) get theirs when a checkpoint is loaded with quantised_rows().
std::vector<QuantisedLinear> quantise_linears(torch::nn::Module& module,
                                              const QuantPolicy& policy = {});

/// For LoadOptions::made_of: the weights of the quantised linears of a module are made of a
/// checkpoint's numbers. Each rank quantises its part.
std::function<std::optional<checkpoint::MadeOfRows>(const std::string& name)> quantised_rows(
    const torch::nn::Module& module);

}  // namespace fsdp::nn
