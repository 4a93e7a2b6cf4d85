// Attention within documents that lie one after another.
#pragma once

#include "fsdp/nn/functional.h"

namespace fsdp::nn {

// attention() with options.documents: flash attention by cumulative lengths, or else one document
// after another. Pairs of tokens of different documents aren't computed.
at::Tensor document_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const AttentionOptions& options);

}  // namespace fsdp::nn
