// Flash attention: what is outside of a window or a document isn't computed.
#pragma once

#include <string>

#include "fsdp/nn/functional.h"

namespace fsdp::nn {

// Causal attention of options.window and options.documents, on CUDA in half precision. Undefined if
// these inputs aren't for it, or if it failed: `problem` then says why.
at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const AttentionOptions& options, std::string& problem);

// Another computation worked where flash attention failed: it isn't tried again, which is said
// once.
void give_up_flash(const std::string& problem);

}  // namespace fsdp::nn
