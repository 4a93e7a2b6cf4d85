// SavePlan: what one rank writes into a checkpoint.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/metadata.h"
#include "checkpoint/param_groups.h"
#include "checkpoint/parts.h"
#include "fsdp/checkpoint.h"
#include "shard/on_disk.h"

namespace fsdp::checkpoint {

// Where a part is read from. A master may have to be assembled and states read from a disk, so this
// is done per flat, not for all at once.
struct FlatSource {
  const shard::Flat* flat;
  std::optional<size_t> slot;  // of the state; nullopt: the master
  size_t parameter, piece;
  at::Device device;
};

struct PlannedChunk {
  std::vector<KeyPath> paths;  // several for a parameter with several names, which share the bytes
  std::vector<int64_t> sizes;  // of the whole tensor
  Part part;                   // with a source, its memory is on the meta device until it is copied
  std::optional<FlatSource> source = {};

  at::Device device() const { return source ? source->device : part.memory.device(); }
};

struct SavePlan {
  std::vector<PlannedChunk> chunks;  // those of a flat are adjacent
  std::vector<PlainValue> values;
  const Optimizer* optimizer = nullptr;
  // The rank whose file it is. In a checkpoint on each host with whole copies of the model on
  // several hosts, the first copy on a host writes the same files as the first of all, and others
  // write none: each host then has all that a load needs.
  int file = 0;
  bool is_copy = false, writes = true;

  int64_t bytes() const;  // upper bound of the file's size
};

// Reads chunks one after the other. Only the flat of the last one is in memory.
class ChunkReader {
 public:
  explicit ChunkReader(const SavePlan& plan) : optimizer_(plan.optimizer) {}

  bool is_at(const PlannedChunk& chunk) const { return !chunk.source || chunk.source->flat == at_; }
  // The result is valid until a chunk of another flat is read.
  at::Tensor read(const PlannedChunk& chunk);

 private:
  const Optimizer* optimizer_;
  const shard::Flat* at_ = nullptr;
  std::optional<shard::StatesHere> here_;
  at::Tensor master_;
  std::vector<at::Tensor> slots_;
};

// The ranks of a copy of the model if every host has whole copies, in the order of its ranks; else 0.
int ranks_of_a_copy(const shard::Engine& model);

SavePlan plan_save(shard::Engine& model, const Optimizer* optimizer, const SaveOptions& options);

}  // namespace fsdp::checkpoint
