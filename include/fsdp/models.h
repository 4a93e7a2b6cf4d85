/// @file
/// Models to train, made of fsdp::nn's layers. Nothing in them knows about sharding.
///
///     models::Llama model({.vocab = 32000, .dim = 2048, .layers = 16, .heads = 16});
///     models::Llama qwen(models::qwen2({.vocab = 151936, .dim = 896, .heads = 14, .kv_heads =
///     2})); models::GPT2 gpt2; at::Tensor loss = model->forward(ids, targets);
///
/// Parameters have Hugging Face's names and shapes, so weights fit both ways.
///
/// - models/causal_lm.h: what all language models have: logits, losses, masks, a cache.
/// - models/decoder.h: Llama, Qwen, Mistral, SmolLM3, OLMo 2, Phi-3, Gemma 3: one decoder.
/// - models/llama.h: its names for a Llama.
/// - models/gpt2.h: GPT-2.
/// - models/mlp.h: linears and nothing else.
/// - models/hugging_face.h: Hugging Face's configurations.
#pragma once

#include "fsdp/models/causal_lm.h"
#include "fsdp/models/decoder.h"
#include "fsdp/models/gpt2.h"
#include "fsdp/models/hugging_face.h"
#include "fsdp/models/llama.h"
#include "fsdp/models/mlp.h"
