// Safetensors files made of a checkpoint's tensors, piece by piece.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "checkpoint/stream.h"

namespace fsdp::checkpoint {

// Writes the file `path`, which is on the disk when it returns. Wide dtypes come first, so that
// each tensor begins at a multiple of its elements' size; beyond that the order stays.
void write_safetensors(Source& source, const std::filesystem::path& path,
                       std::vector<Copied> tensors, const SafeMetadata& metadata,
                       const Advance& advance);

// Writes into `dir` what transformers calls a model's weights: model.safetensors, or, where that
// would be larger than `most` bytes, model-00001-of-00003.safetensors, … and the index that says
// which tensor is in which. A tensor is never cut: one that is larger has a file of its own.
void write_safetensors_shards(Source& source, const std::filesystem::path& dir,
                              const std::vector<Copied>& tensors, int64_t most,
                              const SafeMetadata& metadata, const Advance& advance);

// Whether a file of this name is one that write_safetensors_shards writes.
bool is_safetensors_shard(const std::string& name);

}  // namespace fsdp::checkpoint
