// What can be said about how a model is sharded: strategies, dtypes, resharding, and the options of
// fully_shard. Plain aggregates; every field has the default most people want.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/mesh.h"

namespace fsdp {

enum class ShardingStrategy {
  FULL_SHARD,     // parameters, gradients and states over all ranks; parameters leave after forward
  SHARD_GRAD_OP,  // the same, but parameters stay gathered from forward to backward
  NO_SHARD,       // every rank has everything; gradients are averaged (as DDP does)
  HYBRID_SHARD,   // FULL_SHARD along the mesh's "shard", copies along its "replicate"
};

const char* name(ShardingStrategy strategy);

// What happens to a unit's full parameters between its forward and its backward.
//   none   FSDP2's default: the root keeps them, every other unit gives them up
//   bool   true: given up; false: kept
//   int n  each rank keeps 1/n of the unit, so that backward gathers among n neighbours only
struct ReshardAfterForward {
  ReshardAfterForward() = default;
  ReshardAfterForward(bool reshard) : keep_parts(reshard ? 0 : 1) {}  // NOLINT: meant to convert
  ReshardAfterForward(int parts) : keep_parts(parts) {}               // NOLINT: meant to convert

  std::optional<int> keep_parts;  // 0: nothing is kept; 1: all; n: 1/n
};

struct MixedPrecision {
  using Chosen = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

  std::optional<at::ScalarType> param_dtype;   // of parameters in forward and backward
  std::optional<at::ScalarType> reduce_dtype;  // of gradients on their way; default: param_dtype
  std::optional<at::ScalarType> buffer_dtype;  // of floating-point buffers
  std::optional<at::ScalarType> output_dtype;  // of what Sharded::forward returns
  std::optional<at::ScalarType> master_dtype;  // of what the optimizer updates; default: as built
  std::optional<at::ScalarType> grad_dtype;    // of gradients that wait for it; default: its own
  bool split_master = true;  // a float32 master of bfloat16 parameters is kept as these and the 16
                             // bits they lack: 4 bytes instead of 6, and every bit is there
  bool cast_forward_inputs = true;  // operators that read a parameter get their inputs cast to it
  bool norms_in_fp32 = false;       // parameters of normalisation layers keep float32
  Chosen keep_fp32;                 // further parameters that keep float32
};

// How a flat buffer is cut into shards.
enum class Cut {
  AUTO,     // ROW where that costs at most 1 % of padding, else ELEMENT
  ROW,      // between rows: a rank's part of a parameter is one rectangle
  ELEMENT,  // anywhere: a part may begin and end inside a row
  TENSOR,   // between parameters: each is whole on one rank
};

// What lies in host memory instead of the device's. Numbers are the same, to within what a CPU's
// and a GPU's arithmetic differ by.
struct Offload {
  bool parameters = false;  // shards: a gather begins with a copy to the device
  bool gradients = false;   // reduced shards: they leave during backward
  bool optimizer = false;   // masters and states: the update runs on the CPU, and gradients leave
  double fraction = 1;      // of all that, in whole units, the last ones first
  bool pin_memory = true;   // false: pageable, so that copies do not overlap with compute
  std::string directory = {};  // masters and states in files here instead, read and written ahead
  bool any() const { return parameters || gradients || optimizer || !directory.empty(); }
};

// What may differ from unit to unit. What is not set comes from ShardOptions.
struct UnitOptions {
  std::optional<MixedPrecision> mixed_precision;
  std::optional<ReshardAfterForward> reshard_after_forward;
};

}  // namespace fsdp
