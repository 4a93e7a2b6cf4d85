#include "shard/compute_type.h"

#include "shard/flat.h"
#include "shard/unit.h"

namespace fsdp::shard {

std::optional<at::ScalarType> compute_type_of(const at::Tensor& parameter) {
  const Flat* flat = flat_of(parameter);
  return flat && flat->unit().cast_inputs ? flat->unit().precision.param_dtype : std::nullopt;
}

}  // namespace fsdp::shard
