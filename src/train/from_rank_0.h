// What rank 0 decides at the start of a run, for all ranks.
#pragma once

#include <functional>
#include <string>

#include "fsdp/world.h"

namespace fsdp::train {

// The string that `say` returns on rank 0, on all ranks; throws if it throws there. `key` is used
// once per world.
std::string from_rank_0(const World& world, const std::string& key,
                        const std::function<std::string()>& say);

}  // namespace fsdp::train
