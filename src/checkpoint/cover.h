// Checks that the parts of a tensor in .metadata cover it exactly.
#pragma once

#include <string>

#include "checkpoint/metadata.h"

namespace fsdp::checkpoint {

// What is wrong with the parts ("has parts that don't cover all of [5, 8]: …"); "" if nothing is.
std::string cover_problem(const TensorEntry& entry);

}  // namespace fsdp::checkpoint
