// Attention over a ring: the keys and values of every rank pass by all ranks of a context.
//
// Each rank keeps its queries. In size - 1 steps it hands keys and values to the next rank while it
// computes with those it has, and combines the results by their logsumexp. In backward the
// gradients of keys and values travel with them, and one step further, to their owner. A rank sends
// (size - 1) · (k + v) elements in forward, and in backward as many again plus size · (k + v) in
// float32.
//
// Parts are in zig-zag order (ContextKind::RING): rank r has chunks r and 2 · size - 1 - r of a
// sequence. Every rank then computes the same number of causal scores in every step.
#pragma once

#include "fsdp/nn/functional.h"

namespace fsdp::nn {

// attention() with options.context of kind RING. Collective over its ranks.
at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const AttentionOptions& options);

}  // namespace fsdp::nn
