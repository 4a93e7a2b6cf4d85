// The parameters of a model by name and shape, without making the model: a large one has more of
// them than fit into memory.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/models/hugging_face.h"

namespace fsdp::models {

using ParameterShapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

// In the order of the modules; the head comes last, also where it is tied to the embedding.
ParameterShapes parameter_shapes(const AnyConfig& config);

// The name of the embedding that a tied head is; the head's name.
const char* embedding_name(const AnyConfig& config);
inline constexpr const char* kHeadName = "lm_head.weight";
bool is_tied(const AnyConfig& config);

}  // namespace fsdp::models
