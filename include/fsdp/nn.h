// Layers for models of one's own, and the functions they are made of. They are used like those of
// torch::nn, sharded or not, on the CPU and on CUDA; where a module is sharded, each writes its
// weight's gradient where it is reduced from, and nothing is copied.
//
//   struct BlockImpl : torch::nn::Module {
//     at::Tensor forward(const at::Tensor& x) { return x + down(fsdp::nn::gelu(up(norm(x)))); }
//     fsdp::nn::RMSNorm norm = register_module("norm", fsdp::nn::RMSNorm(512));
//     fsdp::nn::Linear up = register_module("up", fsdp::nn::Linear(512, 2048)), …
//   };
//
//   nn/functional.h   functions, one or several layers at once
//   nn/modules.h      Linear, RMSNorm, LayerNorm, Embedding
#pragma once

#include "fsdp/nn/functional.h"
#include "fsdp/nn/modules.h"
