// Checkpoints on each host: in its memory, not on a file system that all share. Every host has the
// files that its ranks wrote, and the metadata of all. Together they have the whole checkpoint; what
// a rank needs of other hosts is brought to its host before it is loaded.
#pragma once

#include <filesystem>
#include <string>

#include "fsdp/checkpoint.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/world.h"

namespace fsdp::checkpoint {

// The name of the newest checkpoint in `folder` of which hosts together have every file; "": there is
// none. Each host may have a different path for the folder. Collective.
std::string newest_of_hosts(const World& world, const std::filesystem::path& folder);

// Whether every host has all files: it has whole copies of the model. Not if there is one host.
bool every_host_has_all(const Sharded& model);

// Copies to each host what its ranks need to load `dir` with these options, over the world's
// communicator. Collective.
void bring_to_hosts(const World& world, const std::filesystem::path& dir, const Sharded& model,
                    const Optimizer* optimizer, const LoadOptions& options = {});

}  // namespace fsdp::checkpoint
