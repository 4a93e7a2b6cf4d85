// The names that dtypes have in PyTorch's files.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

namespace fsdp::checkpoint {

const char* dtype_name(c10::ScalarType type);  // "float32"; an Error for what has none
std::optional<c10::ScalarType> dtype_of(const std::string& name);

// The class of storage ("FloatStorage"); null for the newer types, which have none of their own.
const char* storage_name(c10::ScalarType type);
std::optional<c10::ScalarType> dtype_of_storage(const std::string& name);

}  // namespace fsdp::checkpoint
