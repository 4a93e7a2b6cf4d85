// What mixtures of experts share: sorting tokens (experts.cpp) after they were routed (moe.cpp).
#pragma once

#include "fsdp/nn/moe.h"

namespace fsdp::nn {

// Sets order, place and ends by `chosen`.
void sort_by_expert(Routing& routing, int64_t experts);

}  // namespace fsdp::nn
