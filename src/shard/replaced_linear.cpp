#include "shard/replaced_linear.h"

#include "shard/flat.h"

namespace fsdp::shard {

bool replace_linear(const at::Tensor& weight, LinearFunction function) {
  Flat* flat = flat_of(weight);
  const size_t parameter = flat ? flat->index_of(weight) : 0;
  if (!flat || parameter == flat->parameters().size()) return false;
  flat->replace_linear(parameter, std::move(function));
  return true;
}

}  // namespace fsdp::shard
