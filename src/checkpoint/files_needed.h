// Which files of a checkpoint this rank reads when it loads it. They needn't all be there; the
// metadata and rank 0's file must.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "fsdp/checkpoint.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"

namespace fsdp::checkpoint {

std::set<std::string> files_needed(const std::filesystem::path& dir, const Sharded& model,
                                   const Optimizer* optimizer, const LoadOptions& options);

}  // namespace fsdp::checkpoint
