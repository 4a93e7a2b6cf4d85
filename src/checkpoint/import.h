// Makes a checkpoint of ours from another directory's tensors, in one process and without the model
// in memory.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/stream.h"
#include "fsdp/checkpoint.h"

namespace fsdp::checkpoint {

struct Imported {
  std::string from;                // name in the source ("model.lm_head.weight")
  std::vector<std::string> names;  // of the parameter; several for a tied one
  at::ScalarType dtype;            // in the new checkpoint
};

// Writes the checkpoint `dir` (model and extra values, no optimizer) with a manifest, as save()
// does: it appears under its name once it is durable, and replaces a checkpoint of that name. The
// link `latest` doesn't change. Large tensors are stored in rectangles of kPieceBytes.
void import_checkpoint(Source& source, const std::filesystem::path& dir,
                       const std::vector<Imported>& tensors, const Extra& extra,
                       const Advance& advance);

}  // namespace fsdp::checkpoint
