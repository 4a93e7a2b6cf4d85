// Writes safetensors files from a checkpoint's tensors, piece by piece.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "checkpoint/stream.h"

namespace fsdp::checkpoint {

// Writes the file `path`, which is durable on return. Wide dtypes come first, so that each tensor
// starts at a multiple of its element size; apart from that the order is kept.
void write_safetensors(Source& source, const std::filesystem::path& path,
                       std::vector<Copied> tensors, const SafeMetadata& metadata,
                       const Advance& advance);

// Writes a model's weights into `dir` as transformers does: model.safetensors, or, if that would be
// larger than `most` bytes, model-00001-of-00003.safetensors, … and the index of which tensor is in
// which. A tensor is never split: a larger one has a file of its own.
void write_safetensors_shards(Source& source, const std::filesystem::path& dir,
                              const std::vector<Copied>& tensors, int64_t most,
                              const SafeMetadata& metadata, const Advance& advance);

// Whether write_safetensors_shards writes files of this name.
bool is_safetensors_shard(const std::string& name);

}  // namespace fsdp::checkpoint
