// Models with one difficulty each; see more_models.cpp.
#pragma once

#include <vector>

#include "shard/models.h"

namespace fsdp::testing {

std::vector<ModelCase> more_model_cases();

}  // namespace fsdp::testing
