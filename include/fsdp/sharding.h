/// @file
/// How a model is sharded: strategies, dtypes, resharding, cuts and offload.
///
/// Plain aggregates. The defaults suit most models.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/mesh.h"

namespace fsdp {

/// What is sharded, and what stays gathered between forward and backward.
enum class ShardingStrategy {
  /// Parameters, gradients and states over all ranks; units reshard after forward.
  FULL_SHARD,
  /// The same, but units stay gathered from forward to backward.
  SHARD_GRAD_OP,
  /// Every rank holds everything, and gradients are averaged, as in DDP.
  NO_SHARD,
  /// FULL_SHARD along the mesh's "shard", copies along its "replicate".
  HYBRID_SHARD,
};

/// "FULL_SHARD" and so on.
const char* name(ShardingStrategy strategy);

/// What happens to a unit's gathered parameters between its forward and its backward.
///
/// - Unset: the strategy decides. With FULL_SHARD the root stays gathered and other units reshard,
///   as in FSDP2.
/// - `true`: reshard. `false`: stay gathered.
/// - A number n: each rank keeps 1/n of the unit, and backward gathers among n neighbours only.
struct ReshardAfterForward {
  /// Unset.
  ReshardAfterForward() = default;
  /// Reshard or stay gathered.
  ReshardAfterForward(bool reshard) : keep_parts(reshard ? 0 : 1) {}  // NOLINT: meant to convert
  /// Keep 1/parts. Throws fsdp::Error if parts is below 1.
  ReshardAfterForward(int parts);  // NOLINT: meant to convert

  std::optional<int> keep_parts;  ///< 0: keep nothing; 1: everything; n: 1/n.
};

/// How numbers travel between ranks.
enum class Wire {
  PLAIN,  ///< As they are.
  BF16,   ///< Rounded to bfloat16. Only for gradients.
  FP8,    ///< One byte: float8_e4m3fn, with a power of two as the scale of each 256 numbers.
  INT8,   ///< One byte: an integer, with a float32 as the scale of each 256 numbers.
};

/// "PLAIN" and so on.
const char* name(Wire wire);

/// Dtypes of a sharded model. Unset ones keep the dtype that the module was built with, except as
/// noted.
struct MixedPrecision {
  /// Chooses parameters by name, sizes or dtype.
  using Chosen = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

  std::optional<at::ScalarType> param_dtype;   ///< Parameters in forward and backward.
  std::optional<at::ScalarType> reduce_dtype;  ///< Gradients in reductions; default: param_dtype.
  std::optional<at::ScalarType> buffer_dtype;  ///< Floating-point buffers of the whole model.
  std::optional<at::ScalarType> output_dtype;  ///< Tensors that ShardedModule::forward() returns.
  std::optional<at::ScalarType> master_dtype;  ///< Masters, which the optimizer updates.
  std::optional<at::ScalarType> grad_dtype;    ///< Reduced gradients; default: the master's dtype.

  /// Stores a float32 master of a bfloat16 parameter as the parameter and the 16 bits it lacks: 4
  /// bytes instead of 6, and exact.
  bool split_master = true;
  /// Casts the other inputs of an operator that reads a parameter to the parameter's dtype.
  bool cast_forward_inputs = true;
  /// Keeps parameters of normalization layers in float32.
  bool norms_in_fp32 = false;
  /// Further parameters to keep in float32.
  Chosen keep_fp32;
  /// Parameters that are frozen at fully_shard() have masters like others, so that they may be
  /// trained later. False: they are kept in param_dtype alone; leave them frozen.
  bool frozen_masters = true;

  /// How parameters are gathered. FP8 and INT8: matrices (parameters of at least two dimensions
  /// that aren't kept in float32) are rounded on the rank that owns them and sent in one byte.
  /// Every rank computes with the rounded values, the owner too; masters, states and checkpoints
  /// are exact.
  Wire gather = Wire::PLAIN;
  /// How gradients of the same parameters are reduced over "shard". Anything but PLAIN: each rank
  /// sends its whole gradient in parts, rounded, and sums what it receives in float32, in rank
  /// order. Gradients still accumulate in reduce_dtype on each rank, and over "replicate" they are
  /// reduced in it.
  Wire reduce = Wire::PLAIN;
};

/// Where a flat buffer is cut into shards.
enum class Cut {
  AUTO,     ///< ROW if its padding is at most 0.9 % of the unit, else ELEMENT.
  ROW,      ///< Between rows: a rank's part of a parameter is one rectangle.
  ELEMENT,  ///< Anywhere: a part may begin and end inside a row.
  TENSOR,   ///< Between parameters: each is whole on one rank.
};

/// What to keep in host memory instead of the device's.
///
/// Results are the same, up to the difference between CPU and GPU arithmetic.
struct Offload {
  bool parameters = false;  ///< Shards: a gather begins with a copy to the device.
  bool gradients = false;   ///< Reduced shards: copied out during backward.
  bool optimizer = false;   ///< Masters and states: gradients leave, and the CPU runs the update.
  double fraction = 1;      ///< Fraction of the model to offload, in whole units, last ones first.
  bool pin_memory = true;   ///< False: pageable memory, so copies don't overlap with compute.

  /// Keeps masters and states in files here, read and written ahead. Needs `optimizer`.
  std::string directory = {};
  /// Whether anything is offloaded.
  bool any() const { return parameters || gradients || optimizer || !directory.empty(); }
};

/// Options of one unit. Unset ones come from ShardOptions.
struct UnitOptions {
  std::optional<MixedPrecision> mixed_precision;             ///< An empty policy casts nothing.
  std::optional<ReshardAfterForward> reshard_after_forward;  ///< Overrides the model's.
  std::optional<bool> uneven_use;                            ///< Overrides the model's.
};

}  // namespace fsdp
