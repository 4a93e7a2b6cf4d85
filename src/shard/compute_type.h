// In which dtype a sharded parameter is computed with where its own can't say: that of bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fsdp::shard {

// The dtype that MixedPrecision casts the inputs of the parameter's unit to; nullopt: it casts
// none, or the tensor isn't a sharded parameter.
std::optional<at::ScalarType> compute_type_of(const at::Tensor& parameter);

}  // namespace fsdp::shard
