// ReduceOp: how values of several ranks become one. Names as in torch.distributed.
#pragma once

#include <cstdint>

namespace fsdp {

enum class ReduceOp : uint8_t { SUM, AVG, MAX, MIN, PRODUCT };

}  // namespace fsdp
