// Attention within a sliding window.
#pragma once

#include "fsdp/nn/functional.h"

namespace fsdp::nn {

// attention() where options.window is shorter than the keys. On CUDA flash attention skips what is
// outside of the window. Elsewhere blocks of queries see the blocks of keys that their window
// touches: tokens · (window + 2 blocks) scores instead of tokens².
at::Tensor window_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const AttentionOptions& options);

}  // namespace fsdp::nn
