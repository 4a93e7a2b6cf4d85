// A checkpoint of ours that is made of another directory's tensors, by one process and without a
// model in memory.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/stream.h"
#include "fsdp/checkpoint.h"

namespace fsdp::checkpoint {

struct Imported {
  std::string from;                // in the source ("model.lm_head.weight")
  std::vector<std::string> names;  // of the parameter; several for a tied one
  at::ScalarType dtype;            // what it becomes
};

// Writes the checkpoint `dir` (model and extra values, no optimizer) with a manifest, as save()
// does: it appears under its name when all of it is on the disk, and replaces a checkpoint of that
// name. The link `latest` stays what it is. Large tensors are stored in rectangles of kPieceBytes.
void import_checkpoint(Source& source, const std::filesystem::path& dir,
                       const std::vector<Imported>& tensors, const Extra& extra,
                       const Advance& advance);

}  // namespace fsdp::checkpoint
