// Models to train: modules like those of torch::nn, made of fsdp::nn's layers; nothing in them
// knows of sharding. Parameters have the names and shapes that Hugging Face gives them, so that
// weights of either side fit the other.
//
//   models::Llama model({.vocab = 32000, .dim = 2048, .layers = 16, .heads = 16});
//   models::Llama qwen(models::qwen2({.vocab = 151936, .dim = 896, .heads = 14, .kv_heads = 2}));
//   models::GPT2 gpt2;
//   at::Tensor loss = model->forward(ids, targets);
//
//   models/causal_lm.h      what all language models have: logits, losses, masks, a cache
//   models/llama.h          Llama 1 to 3 and Qwen2
//   models/gpt2.h           GPT-2
//   models/mlp.h            linears and nothing else
//   models/hugging_face.h   their configurations as Hugging Face writes them
#pragma once

#include "fsdp/models/causal_lm.h"
#include "fsdp/models/gpt2.h"
#include "fsdp/models/hugging_face.h"
#include "fsdp/models/llama.h"
#include "fsdp/models/mlp.h"
