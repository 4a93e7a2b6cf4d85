/// @file
/// What can be read from a sharded model: where a parameter is, which bytes the engine holds, and
/// what it did.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {

/// A part of a tensor: `sizes` elements from `offsets` on, in each dimension.
struct Rectangle {
  std::vector<int64_t> offsets;  ///< First element, per dimension.
  std::vector<int64_t> sizes;    ///< Number of elements, per dimension.

  /// Whether both are the same part.
  bool operator==(const Rectangle&) const = default;
};

/// Where a parameter is, and this rank's part of it.
struct ShardInfo {
  std::string name;                   ///< The parameter's name in the module.
  std::string unit;                   ///< The name of its unit.
  std::vector<int64_t> global_shape;  ///< Shape of the whole parameter.
  std::string mesh;                   ///< "shard=4" or "replicate=2 x shard=4".
  std::string placement;              ///< "Shard(0)", "Replicate()", or "Ragged" (cut inside rows).

  /// This rank's part: empty if it has none, one if cut between rows, up to three per dimension if
  /// cut inside rows.
  std::vector<Rectangle> rectangles;
  /// This rank's part of the master in memory order, in the shape of the rectangle if there is one,
  /// else flat. Read-only: it is a view or, with MixedPrecision::split_master, a copy.
  at::Tensor local;
  /// The same part of the gradient; undefined if there is none.
  at::Tensor local_grad;
};

/// A part of a tensor with its values.
struct StateShard {
  Rectangle rectangle;  ///< Which part.
  at::Tensor values;    ///< In the rectangle's sizes.
};

/// A tensor of a state dict: whole, or this rank's part of it.
struct StateTensor {
  StateTensor() = default;
  /// A whole tensor.
  StateTensor(const at::Tensor& whole);  // NOLINT: implicit
  /// Parts of a tensor.
  StateTensor(std::vector<int64_t> sizes, at::ScalarType dtype, std::vector<StateShard> shards);

  std::vector<int64_t> sizes;         ///< Sizes of the whole tensor.
  at::ScalarType dtype = at::kFloat;  ///< Dtype of the values.

  /// Full: one shard with everything. Sharded: none if this rank has no part of the tensor, several
  /// if it is cut inside rows.
  std::vector<StateShard> shards;

  /// The whole tensor. Throws Error if only parts are here.
  const at::Tensor& full() const;
  /// full()
  operator const at::Tensor&() const { return full(); }  // NOLINT: implicit
};

/// Tensors by name: a model's (Sharded::full_state_dict), or those of a model and its optimizer
/// (checkpoint::state_dict).
using StateDict = std::map<std::string, StateTensor>;

/// Every byte that the engine holds on this rank, by kind.
struct MemoryReport {
  int64_t parameters = 0;      ///< Master shards; if split, the 16 bits that the shards lack.
  int64_t gathered_from = 0;   ///< Shards in param_dtype, if that isn't the master's dtype.
  int64_t gradients = 0;       ///< Reduced shards. On a GPU zero from zero_grad to backward.
  int64_t optimizer = 0;       ///< Optimizer states.
  int64_t unsharded = 0;       ///< Gathered units: the ring, and units with a buffer of their own.
  int64_t ring = 0;            ///< The ring alone, with its messages (part of `unsharded`).
  int64_t secondary = 0;       ///< Parts that reshard_after_forward = n keeps.
  int64_t reduce_buffers = 0;  ///< Whole gradients waiting to be reduced, and their messages.
  int64_t accumulated = 0;     ///< Whole gradients that no_sync keeps.
  int64_t shared_window = 0;   ///< This rank's shards in shared memory, counted above.
  int64_t padding = 0;         ///< Part of `parameters` that belongs to no parameter.
  int64_t host = 0;            ///< Part of all these that is offloaded to host memory.

  /// The most that autograd kept for backward, without parameters, in the whole process. Counted
  /// while Sharded::count_activations() is on, else 0. Not the engine's, so not in total().
  int64_t activations = 0;
  /// Host memory reserved for offloaded activations (Recompute::OFFLOAD) in the whole process,
  /// counted or not. It is kept between steps. Not in total().
  int64_t host_activations = 0;
  /// Bytes that the engine holds, on the device and the host.
  int64_t total() const {
    return parameters + gathered_from + gradients + optimizer + unsharded + secondary +
           reduce_buffers + accumulated;
  }
  /// The kinds and their bytes as text.
  std::string table() const;
};

/// Bytes that this rank sent, and time spent on communication.
///
/// An all-gather or reduce-scatter over n ranks sends (n-1)/n of the full buffer, an all-reduce
/// twice that. Reads from shared memory count too.
struct Traffic {
  int64_t all_gather = 0;                 ///< Bytes sent by gathers.
  int64_t reduce_scatter = 0;             ///< Bytes sent by reductions over "shard".
  int64_t all_reduce = 0;                 ///< Bytes sent by reductions over "replicate".
  int64_t all_to_all = 0;                 ///< Bytes sent by optimizers that need whole matrices.
  std::chrono::nanoseconds host_time{0};  ///< Host time inside the communicators' calls.

  /// Time that compute waited for communication. On the CPU this is host_time; on a GPU it is the
  /// time that the compute stream waited while Sharded::measure_exposed() was on.
  std::chrono::nanoseconds exposed{0};
};

/// Something the engine did to a unit; see Sharded::record_events().
struct Event {
  /// What happened.
  enum Kind {
    kGatherIssued,   ///< The unit's gather started.
    kReady,          ///< Its parameters became usable.
    kResharded,      ///< Its gathered parameters were freed.
    kReduceIssued,   ///< The reduction of its gradients started.
    kReduced,        ///< The reduction was queued (on the CPU: finished).
  } kind;            ///< What happened.
  std::string unit;  ///< Name of the unit.
  bool backward;     ///< Whether it happened in backward.
  bool ahead;        ///< Whether a gather started before anything read the unit (prefetch).
  std::chrono::steady_clock::time_point at;  ///< When, on the host.
};

}  // namespace fsdp
