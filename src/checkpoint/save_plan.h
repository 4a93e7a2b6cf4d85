// SavePlan: what one rank writes into a checkpoint.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/metadata.h"
#include "checkpoint/param_groups.h"
#include "checkpoint/parts.h"
#include "fsdp/checkpoint.h"
#include "shard/on_disk.h"

namespace fsdp::checkpoint {

// Where a part is read from. A master may have to be joined, and states to come from a disk, so
// neither is done for all at once.
struct FlatSource {
  const shard::Flat* flat;
  std::string state;  // its name; empty: the master
  size_t parameter, piece;
  at::Device device;
};

struct PlannedChunk {
  std::vector<KeyPath> paths;  // several for a parameter with several names: the bytes are shared
  std::vector<int64_t> sizes;  // of the whole tensor
  Part part;                   // with a source its memory is on the meta device, until it is copied
  std::optional<FlatSource> source = {};

  at::Device device() const { return source ? source->device : part.memory.device(); }
};

struct SavePlan {
  std::vector<PlannedChunk> chunks;  // those of a flat in a row
  std::vector<PlainValue> values;
  const Optimizer* optimizer = nullptr;

  int64_t bytes() const;  // of the file, at most
};

// What chunks hold, one after the other: only the last one's flat is in memory for it.
class ChunkReader {
 public:
  explicit ChunkReader(const SavePlan& plan) : optimizer_(plan.optimizer) {}

  bool is_at(const PlannedChunk& chunk) const { return !chunk.source || chunk.source->flat == at_; }
  // Valid until a chunk is read that this is not at.
  at::Tensor read(const PlannedChunk& chunk);

 private:
  const Optimizer* optimizer_;
  const shard::Flat* at_ = nullptr;
  std::optional<shard::StatesHere> here_;
  at::Tensor master_;
  std::map<std::string, at::Tensor> states_;
};

SavePlan plan_save(shard::Model& model, const Optimizer* optimizer, const SaveOptions& options);

}  // namespace fsdp::checkpoint
