// SavePlan: what one rank writes into a checkpoint.
#pragma once

#include <vector>

#include "checkpoint/metadata.h"
#include "checkpoint/param_groups.h"
#include "checkpoint/parts.h"
#include "fsdp/checkpoint.h"

namespace fsdp::checkpoint {

struct PlannedChunk {
  std::vector<KeyPath> paths;  // several for a parameter with several names: the bytes are shared
  std::vector<int64_t> sizes;  // of the whole tensor
  Part part;                   // the memory is the model's own, until it is copied
};

struct SavePlan {
  std::vector<PlannedChunk> chunks;
  std::vector<PlainValue> values;

  int64_t bytes() const;  // of the file, at most
};

SavePlan plan_save(shard::Model& model, const Optimizer* optimizer, const SaveOptions& options);

}  // namespace fsdp::checkpoint
