/// @file
/// Layers for your own models, and the functions that they are made of.
///
///     struct BlockImpl : torch::nn::Module {
///       at::Tensor forward(const at::Tensor& x) { return x + down(fsdp::nn::gelu(up(norm(x)))); }
///       fsdp::nn::RMSNorm norm = register_module("norm", fsdp::nn::RMSNorm(512));
///       fsdp::nn::Linear up = register_module("up", fsdp::nn::Linear(512, 2048)), …
///     };
///
/// Use them like torch::nn's, sharded or not, on the CPU and on CUDA. In a sharded module each
/// layer writes its weight's gradient straight into the buffer that is reduced.
///
/// - nn/functional.h: functions, some for several layers at once.
/// - nn/block_attention.h: attention that skips blocks of tokens.
/// - nn/modules.h: Linear, LayerNorm, Embedding and RMSNorm.
/// - nn/lora.h: adapters for fine-tuning.
/// - nn/fp8.h: linears whose matrix products have operands of one byte.
/// - nn/moe.h: mixtures of experts.
/// - nn/quantised.h: frozen linears in few bits.
#pragma once

#include "fsdp/nn/block_attention.h"
#include "fsdp/nn/fp8.h"
#include "fsdp/nn/functional.h"
#include "fsdp/nn/lora.h"
#include "fsdp/nn/modules.h"
#include "fsdp/nn/moe.h"
#include "fsdp/nn/quantised.h"
