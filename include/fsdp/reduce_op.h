/// @file
/// How a reduction combines the values of several ranks.
#pragma once

#include <cstdint>

namespace fsdp {

/// How a reduction combines the values of several ranks. Names as in torch.distributed.
enum class ReduceOp : uint8_t {
  SUM,      ///< Sum.
  AVG,      ///< Sum divided by the number of ranks.
  MAX,      ///< Largest.
  MIN,      ///< Smallest.
  PRODUCT,  ///< Product.
};

}  // namespace fsdp
