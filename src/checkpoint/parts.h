// Parts: which tensors of a sharded model this rank holds, and which of them it writes.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/shard_info.h"
#include "shard/unit.h"

namespace fsdp::shard {
struct Engine;
}

namespace fsdp::checkpoint {

struct Part {  // a rectangle of a tensor, in memory
  Rectangle rectangle;
  at::Tensor memory;  // a view of the rectangle's sizes, dense in some order
};

// This rank's part of a parameter (of its master, or of a state; 1-d, in memory order) in pieces.
std::vector<Part> parts_of(const shard::Flat& flat, size_t parameter, const at::Tensor& mine);

// The whole of a tensor as one part.
inline Part whole(const at::Tensor& tensor) {
  return {{std::vector<int64_t>(tensor.dim(), 0), tensor.sizes().vec()}, tensor.detach()};
}

struct ShardedParameter {
  shard::Flat* flat;
  size_t index;
  const shard::Parameter& parameter() const { return flat->parameters()[index]; }
};
std::vector<ShardedParameter> sharded_parameters(const shard::Engine& model);

// The tensors that every rank holds completely, by name: buffers and unsharded parameters.
std::vector<std::pair<std::string, at::Tensor>> replicated_tensors(const shard::Engine& model);

// Decides which rank writes a shard that several ranks hold: its replicas take turns, balanced by
// bytes. Every rank must ask about the same parameters in the same order.
class Turns {
 public:
  bool mine(const ShardedParameter& parameter, int64_t bytes);

 private:
  std::map<const shard::Group*, std::vector<int64_t>> given_;  // bytes per replica so far
};

}  // namespace fsdp::checkpoint
