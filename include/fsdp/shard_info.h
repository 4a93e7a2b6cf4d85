// What can be seen of a sharded model: where a parameter lies, which bytes the engine holds, what
// it did.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {

// A part of a tensor: `sizes` elements from `offsets` on, in each dimension.
struct Rectangle {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;
  bool operator==(const Rectangle&) const = default;
};

struct ShardInfo {
  std::string name;
  std::string unit;
  std::vector<int64_t> global_shape;
  std::string mesh;                   // "shard=4" or "replicate=2 x shard=4"
  std::string placement;              // "Shard(0)", "Replicate()", "Ragged" (cut inside rows)
  std::vector<Rectangle> rectangles;  // this rank's part; empty where it has none, one when cut on
                                      // rows, up to three a dimension when cut inside them
  at::Tensor local;  // this rank's part of the master, in memory order; shaped as the rectangle
                     // when there is one, else flat. To be read: it is a view, or (split_master)
                     // a copy.
  at::Tensor local_grad;  // likewise; undefined when there is none
};

using StateDict = std::vector<std::pair<std::string, at::Tensor>>;  // in the module's order

// Every byte the engine holds on this rank, by kind.
struct MemoryReport {
  int64_t parameters = 0;      // master shards; where they are split, what the shards lack of them
  int64_t gathered_from = 0;   // shards in param_dtype, where that is not the master's
  int64_t gradients = 0;       // reduced shards; nothing on a GPU between zero_grad and backward
  int64_t optimizer = 0;       // states
  int64_t unsharded = 0;       // gathered units: the ring and the units that have their own buffer
  int64_t ring = 0;            //   of these, the ring
  int64_t secondary = 0;       // kept by reshard_after_forward = n
  int64_t reduce_buffers = 0;  // gradients on their way
  int64_t accumulated = 0;     // whole gradients kept by no_sync
  int64_t shared_window = 0;   // this rank's share of windows it reads the others' shards through
  int64_t padding = 0;         // of `parameters`, what belongs to no parameter
  int64_t host = 0;            // of all these, what was offloaded to host memory
  // What autograd kept for backward at its most, beside parameters: counted while
  // count_activations(true) is on, else 0. Not ours, so not in total().
  int64_t activations = 0;
  // Host memory that is there for offloaded activations (Recompute::OFFLOAD), of this whole
  // process, whether or not they are counted. It is kept from step to step. In no sum either.
  int64_t host_activations = 0;
  int64_t total() const {
    return parameters + gathered_from + gradients + optimizer + unsharded + secondary +
           reduce_buffers + accumulated;
  }
  std::string table() const;
};

// Bytes this rank sent (an all-gather or reduce-scatter over n ranks sends (n-1)/n of the full
// buffer, an all-reduce twice that). What ranks read in shared memory is counted too.
struct Traffic {
  int64_t all_gather = 0;
  int64_t reduce_scatter = 0;
  int64_t all_reduce = 0;
  std::chrono::nanoseconds host_time{0};  // spent inside the communicators' calls
  // How long computation stood still for communication. On the CPU that is host_time; on a GPU it
  // is the time that the compute stream waited, while Sharded::measure_exposed is on.
  std::chrono::nanoseconds exposed{0};
};

struct Event {
  enum Kind { kGatherIssued, kReady, kResharded, kReduceIssued, kReduced } kind;
  std::string unit;
  bool backward;
  bool ahead;  // a gather that was started before anybody asked for the unit
  std::chrono::steady_clock::time_point at;
};

}  // namespace fsdp
