/// @file
/// Llama and Qwen2 by their names. A Llama is a decoder with the default description; Qwen2 (and
/// 2.5) is one whose queries, keys and values have biases.
#pragma once

#include "fsdp/models/decoder.h"

namespace fsdp::models {

using LlamaConfig = DecoderConfig;        ///< The shape of a Llama.
using Llama = Decoder;                    ///< `models::Llama model(config)`.
using LlamaImpl = DecoderImpl;            ///< What a Llama holds.
using LlamaBlock = DecoderBlock;          ///< The unit to shard by.
using LlamaBlockImpl = DecoderBlockImpl;  ///< What a LlamaBlock holds.
using LlamaModel = DecoderModel;          ///< Everything below the head.
using LlamaAttention = DecoderAttention;  ///< Attention of one block.
using SwiGLU = GatedFeedForward;          ///< Feed-forward of one block.

}  // namespace fsdp::models
