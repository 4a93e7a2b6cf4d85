// Names of dtypes in PyTorch's files.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>

namespace fsdp::checkpoint {

const char* dtype_name(c10::ScalarType type);  // "float32"; an Error if the type has no name
std::optional<c10::ScalarType> dtype_of(const std::string& name);

// The storage class ("FloatStorage"); null for newer types, which have none.
const char* storage_name(c10::ScalarType type);
std::optional<c10::ScalarType> dtype_of_storage(const std::string& name);

}  // namespace fsdp::checkpoint
