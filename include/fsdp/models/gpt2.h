/// @file
/// GPT-2: pre-norm with LayerNorm, learned positions, one matrix for queries, keys and values, GELU
/// (tanh), biases everywhere.
///
/// Parameters: transformer.wte.weight, transformer.wpe.weight, transformer.h.0.attn.c_attn.weight,
/// …, transformer.ln_f.bias, lm_head.weight. Shard it by GPT2Block.
#pragma once

#include <torch/nn/modules/container/modulelist.h>

#include "fsdp/models/causal_lm.h"
#include "fsdp/nn/modules.h"

namespace fsdp::models {

/// The shape of a GPT-2. The defaults are GPT-2 with 124M parameters.
struct GPT2Config {
  int64_t vocab = 50257;      ///< Number of token ids.
  int64_t max_tokens = 1024;  ///< Number of positions.
  int64_t dim = 768;          ///< Width of the residual stream.
  int64_t layers = 12;        ///< Number of blocks.
  int64_t heads = 12;         ///< Attention heads.
  int64_t ffn = 0;            ///< Width of the feed-forward. 0: 4 · dim.
  bool tied = true;           ///< The head is the embedding.
  double norm_eps = 1e-5;     ///< Of the LayerNorms.
  double embd_dropout = 0;    ///< On the sum of token and position.
  double attn_dropout = 0;    ///< On the attention weights.
  double resid_dropout = 0;   ///< On what is added to the residual stream.

  /// Standard deviation of the initial matrices. Those that end in the residual stream are smaller
  /// by sqrt(2 · layers).
  double init_std = 0.02;
};

/// `config` with its zeros filled in. Throws Error if the numbers don't fit each other.
GPT2Config checked(GPT2Config config);
/// Number of parameters; a tied matrix counts once.
int64_t parameter_count(const GPT2Config& config);

/// A linear with a transposed weight, as in GPT-2's files.
class Conv1DImpl : public torch::nn::Module, public nn::Adaptable {
 public:
  /// Draws the weight from a normal distribution with a deviation of 0.02.
  Conv1DImpl(int64_t in, int64_t out);
  /// [.., in] → [.., out].
  at::Tensor forward(const at::Tensor& x);
  Product product() override;

  at::Tensor weight;  ///< [in, out].
  at::Tensor bias;    ///< [out].
};
/// Holder of Conv1DImpl.
TORCH_MODULE(Conv1D);

/// Attention of one block.
class GPT2AttentionImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it; `layer` is the block's index in a cache.
  GPT2AttentionImpl(const GPT2Config& config, int64_t layer);
  /// qkv: the output of c_attn. → [batch, tokens, dim].
  at::Tensor forward(const at::Tensor& qkv, const Attending& attending);

  Conv1D c_attn = nullptr;  ///< To queries, keys and values.
  Conv1D c_proj = nullptr;  ///< Back to the residual stream.

 private:
  int64_t heads_, layer_;
  double attn_dropout_, resid_dropout_;
};
/// Holder of GPT2AttentionImpl.
TORCH_MODULE(GPT2Attention);

/// Feed-forward of one block.
class GPT2MLPImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it.
  explicit GPT2MLPImpl(const GPT2Config& config);
  /// x: the output of c_fc. → [.., dim].
  at::Tensor forward(const at::Tensor& x);

  Conv1D c_fc = nullptr;    ///< To the width of the feed-forward.
  Conv1D c_proj = nullptr;  ///< Back to the residual stream.

 private:
  double dropout_;
};
/// Holder of GPT2MLPImpl.
TORCH_MODULE(GPT2MLP);

/// One block: the unit to shard by.
class GPT2BlockImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it; `layer` is the block's index in a cache.
  explicit GPT2BlockImpl(const GPT2Config& config, int64_t layer = 0);
  /// Same shapes as `stream`.
  Stream forward(const Stream& stream, const Attending& attending = {});

  nn::LayerNorm ln_1 = nullptr;  ///< Before attention.
  nn::LayerNorm ln_2 = nullptr;  ///< Before the feed-forward.
  GPT2Attention attn = nullptr;  ///< Attention.
  GPT2MLP mlp = nullptr;         ///< Feed-forward.

  /// Tokens of the feed-forward and its norm that are computed at a time (tiled()). 0: all.
  int64_t tile = 0;
};
/// Holder of GPT2BlockImpl.
TORCH_MODULE(GPT2Block);

/// Everything below the head.
class GPT2ModelImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it.
  explicit GPT2ModelImpl(const GPT2Config& config);
  /// [batch, tokens, dim].
  at::Tensor forward(const TextInputs& inputs);

  nn::Embedding wte = nullptr;   ///< Embedding of tokens.
  nn::Embedding wpe = nullptr;   ///< Embedding of positions.
  torch::nn::ModuleList h;       ///< Blocks.
  nn::LayerNorm ln_f = nullptr;  ///< Final norm.

 private:
  GPT2Config config_;
};
/// Holder of GPT2ModelImpl.
TORCH_MODULE(GPT2Model);

/// A GPT-2 with its head.
class GPT2Impl : public CausalLMImpl {
 public:
  /// Initializes the weights.
  explicit GPT2Impl(const GPT2Config& config = {});

  at::Tensor hidden(const TextInputs& inputs) override;
  at::Tensor head() const override { return lm_head->weight; }
  int64_t vocab() const override { return config_.vocab; }
  int64_t layers() const override { return config_.layers; }
  int64_t max_tokens() const override { return config_.max_tokens; }
  void tile_feed_forward(int64_t tokens) override;
  double flops_per_token(int64_t tokens) const override;
  Distribution initial(const std::string& name, at::IntArrayRef sizes) const override;

  /// The checked configuration.
  const GPT2Config& config() const { return config_; }

  GPT2Model transformer = nullptr;  ///< Everything below the head.
  LMHead lm_head = nullptr;         ///< The head.

 private:
  GPT2Config config_;
};
/// Holder of GPT2Impl: `models::GPT2 model(config)`.
TORCH_MODULE(GPT2);

}  // namespace fsdp::models
