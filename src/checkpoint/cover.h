// Whether the parts of a tensor that .metadata lists make up the whole.
#pragma once

#include <string>

#include "checkpoint/metadata.h"

namespace fsdp::checkpoint {

// What is wrong with the parts: "has no part for 12 of its 40 elements …". "" is good.
std::string cover_problem(const TensorEntry& entry);

}  // namespace fsdp::checkpoint
