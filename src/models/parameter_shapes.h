// The parameters of a model by name and shape, without constructing the model, which may not fit in
// memory.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/models/hugging_face.h"

namespace fsdp::models {

using ParameterShapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

// In module order; the head comes last, even if it is tied to the embedding.
ParameterShapes parameter_shapes(const AnyConfig& config);
// The buffers that a model stores with its parameters.
ParameterShapes buffer_shapes(const AnyConfig& config);

// How transformers' files hold a parameter: as it is, or as a matrix of each expert.
struct FilePart {
  std::string name;
  std::vector<int64_t> offsets, sizes;  // in the parameter
};
std::vector<FilePart> file_parts(const AnyConfig& config, const std::string& name,
                                 const std::vector<int64_t>& sizes);

// The names of the embedding, which a tied head shares, and of the head.
const char* embedding_name(const AnyConfig& config);
inline constexpr const char* kHeadName = "lm_head.weight";
bool is_tied(const AnyConfig& config);

}  // namespace fsdp::models
