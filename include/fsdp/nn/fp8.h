/// @file
/// Linears whose matrix products are computed in fp8: activations, weights and gradients are
/// rounded to one byte each, with factors found anew at each use.
///
///     auto sharded = fully_shard(model, …);
///     for (const auto& linear : nn::convert_to_fp8(*model, {.recipe = nn::Fp8::kTensorwise}))
///       if (!linear.why_not.empty()) …
///
/// Parameters, gradients, checkpoints and everything that isn't a linear stay as they are. Products
/// in fp8 need a GPU of compute capability 8.9 (rowwise: 9.0); the CPU emulates them.
/// docs/precision.md says what each recipe rounds and costs.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/nn/functional.h"

namespace fsdp::nn {

/// Which linears compute in fp8, and how.
struct Fp8Policy {
  Fp8 recipe = Fp8::kTensorwise;  ///< How.

  /// Linears for which this is false stay as they are. Empty: all are converted. Names are those
  /// of modules: "model.layers.0.mlp.down_proj".
  std::function<bool(const std::string& name)> where = {};
  /// Linears with fewer inputs or outputs stay as they are: rounding would take longer than their
  /// products gain.
  int64_t least = 128;
};

/// What convert_to_fp8() did with a linear.
struct Fp8Linear {
  std::string name;     ///< Of the module.
  std::string why_not;  ///< Empty: it computes in fp8.
};

/// Makes the linears of a module compute in fp8, and returns all of them: those of fsdp::nn at any
/// time, a torch::nn::Linear from when it is sharded.
///
/// A linear stays as it is if a size isn't a multiple of 16, if it is small, or if the policy
/// excludes it. A call whose number of rows isn't a multiple of 16 (generation, a last odd batch)
/// computes in the weight's type. An embedding is never converted, nor is an output layer that
/// isn't a linear. Layers that read one input together (queries, keys and values) compute in
/// fp8 if all of them do.
std::vector<Fp8Linear> convert_to_fp8(torch::nn::Module& module, const Fp8Policy& policy = {});

}  // namespace fsdp::nn
