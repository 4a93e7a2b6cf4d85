// Attention of sequences that several ranks share.
#pragma once

#include "fsdp/nn/functional.h"

namespace fsdp::nn {

// attention() with options.context. Collective over its ranks.
at::Tensor context_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionOptions& options);

// Whether all-to-alls can give each of `ranks` some heads of queries and of keys.
bool can_exchange(int64_t heads, int64_t kv_heads, int64_t ranks);
// Throws Error unless they can.
void check_exchange(int64_t heads, int64_t kv_heads, int64_t ranks);

}  // namespace fsdp::nn
