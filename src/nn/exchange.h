// Exchanges between the ranks of a context: parts of all heads become wholes of some heads.
#pragma once

#include <vector>

#include "fsdp/context_parallel.h"

namespace fsdp::nn {

// Each [batch, heads, part of tokens, width] → [batch, heads / ranks, tokens, width]; rank r gets
// the r-th part of the heads. One all-to-all for all tensors. Collective.
std::vector<at::Tensor> exchange_to_heads(const std::vector<at::Tensor>& parts,
                                          const Context& context);
// The way back. Collective.
std::vector<at::Tensor> exchange_to_tokens(const std::vector<at::Tensor>& wholes,
                                           const Context& context);

}  // namespace fsdp::nn
