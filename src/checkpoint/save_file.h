// A rank's file of a checkpoint.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "checkpoint/messages.h"
#include "checkpoint/save_plan.h"

namespace fsdp::checkpoint {

std::string file_of(int rank);

// Passes on the bytes of a chunk. Chunks are read in the plan's order.
using ReadChunk = std::function<void(const PlannedChunk& chunk,
                                     const std::function<void(const void*, size_t)>& use)>;

// Writes what the plan says, if it says that this rank writes, and returns what it wrote.
SaveReport write_file(const SavePlan& plan, const ReadChunk& read,
                      const std::filesystem::path& folder, int rank);

}  // namespace fsdp::checkpoint
