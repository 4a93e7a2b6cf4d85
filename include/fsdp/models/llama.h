/// @file
/// Llama: pre-norm with RMSNorm, rotary positions, grouped-query attention, SwiGLU. Qwen2 (and 2.5)
/// is a Llama whose queries, keys and values have biases.
///
/// Parameters: model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, …,
/// model.norm.weight, lm_head.weight. Shard it by LlamaBlock, Qwen2 too.
#pragma once

#include <torch/nn/modules/container/modulelist.h>

#include <optional>
#include <vector>

#include "fsdp/models/causal_lm.h"
#include "fsdp/nn/modules.h"

namespace fsdp::models {

/// Llama 3.1's extension to longer contexts, by the wavelength of each rotary frequency.
///
/// Frequencies with a wavelength above context / low_freq_factor rotate `factor` times slower.
/// Those below context / high_freq_factor stay. Between the two they are interpolated.
struct RopeScaling {
  double factor = 8;                                ///< How much slower.
  double low_freq_factor = 1;                       ///< Bound of the slow ones.
  double high_freq_factor = 4;                      ///< Bound of the unchanged ones.
  int64_t original_max_position_embeddings = 8192;  ///< The context that it was trained with.
};

/// The shape of a Llama.
struct LlamaConfig {
  int64_t vocab = 32000;     ///< Number of token ids.
  int64_t dim = 2048;        ///< Width of the residual stream.
  int64_t layers = 16;       ///< Number of blocks.
  int64_t heads = 16;        ///< Query heads.
  int64_t kv_heads = 0;      ///< Key and value heads, a divisor of heads. 0: as many as heads.
  int64_t head_dim = 0;      ///< Even. 0: dim / heads.
  int64_t ffn = 0;           ///< Width of the feed-forward. 0: 8/3 of dim, rounded up to 256.
  bool tied = false;         ///< The head is the embedding.
  bool qkv_bias = false;     ///< Biases of queries, keys and values (Qwen2).
  double norm_eps = 1e-5;    ///< Of the RMSNorms.
  double rope_base = 10000;  ///< Base of the rotary frequencies.
  std::optional<RopeScaling> rope_scaling = {};  ///< For longer contexts.

  /// Standard deviation of the initial matrices. Norms start at one, biases at zero.
  double init_std = 0.02;
};

/// `config` with its zeros filled in. Throws Error if the numbers don't fit each other.
LlamaConfig checked(LlamaConfig config);
/// Number of parameters; a tied matrix counts once.
int64_t parameter_count(const LlamaConfig& config);
/// `sizes` with what all Qwen2 and Qwen2.5 models have: qkv_bias, rope_base 1e6, norm_eps 1e-6.
/// (Those up to 3B are also tied.)
LlamaConfig qwen2(LlamaConfig sizes);

/// cos and sin of position · frequency, for each position and element of a head.
///
/// [tokens, head_dim], or [batch, tokens, head_dim] if positions differ between sequences. The
/// second half of a row repeats the first.
struct RotaryTables {
  at::Tensor cos;  ///< Cosines.
  at::Tensor sin;  ///< Sines.
};
/// The tables of positions 0 to tokens - 1, in float32.
RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device,
                           const std::optional<RopeScaling>& scaling = {});
/// Rotates each pair (x[i], x[i + head_dim / 2]) by the angle of its position.
/// x [batch, heads, tokens, head_dim].
at::Tensor rotate(const at::Tensor& x, const RotaryTables& tables);

/// Attention of one block.
class LlamaAttentionImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it; `layer` is the block's index in a cache.
  LlamaAttentionImpl(const LlamaConfig& config, int64_t layer);
  /// qkv: the outputs of the three projections side by side; overwritten. → [batch, tokens, dim].
  at::Tensor forward(const at::Tensor& qkv, const RotaryTables& tables, const Attending& attending);

  /// Weights of q, k and v.
  std::vector<at::Tensor> projections() const;
  /// Biases of q, k and v. Empty if they have none.
  std::vector<at::Tensor> biases() const;

  nn::Linear q_proj = nullptr;  ///< To queries.
  nn::Linear k_proj = nullptr;  ///< To keys.
  nn::Linear v_proj = nullptr;  ///< To values.
  nn::Linear o_proj = nullptr;  ///< Back to the residual stream.

 private:
  int64_t heads_, kv_heads_, layer_;
};
/// Holder of LlamaAttentionImpl.
TORCH_MODULE(LlamaAttention);

/// Feed-forward of one block: down(silu(gate) · up).
class SwiGLUImpl : public torch::nn::Module {
 public:
  /// From `dim` to `width` and back.
  SwiGLUImpl(int64_t dim, int64_t width);
  /// gate_up: the outputs of the two projections side by side. → [.., dim].
  at::Tensor forward(const at::Tensor& gate_up);

  /// Weights of gate and up.
  std::vector<at::Tensor> projections() const;

  nn::Linear gate_proj = nullptr;  ///< To the gate.
  nn::Linear up_proj = nullptr;    ///< To what is gated.
  nn::Linear down_proj = nullptr;  ///< Back to the residual stream.
};
/// Holder of SwiGLUImpl.
TORCH_MODULE(SwiGLU);

/// One block: the unit to shard by.
class LlamaBlockImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it; `layer` is the block's index in a cache.
  explicit LlamaBlockImpl(const LlamaConfig& config, int64_t layer = 0);
  /// Same shapes as `stream`.
  Stream forward(const Stream& stream, const RotaryTables& tables, const Attending& attending = {});

  nn::RMSNorm input_layernorm = nullptr;           ///< Before attention.
  nn::RMSNorm post_attention_layernorm = nullptr;  ///< Before the feed-forward.
  LlamaAttention self_attn = nullptr;              ///< Attention.
  SwiGLU mlp = nullptr;                            ///< Feed-forward.
};
/// Holder of LlamaBlockImpl.
TORCH_MODULE(LlamaBlock);

/// Everything below the head.
class LlamaModelImpl : public torch::nn::Module {
 public:
  /// `config` as checked() returns it.
  explicit LlamaModelImpl(const LlamaConfig& config);
  /// [batch, tokens, dim].
  at::Tensor forward(const TextInputs& inputs);

  nn::Embedding embed_tokens = nullptr;  ///< Embedding of tokens.
  torch::nn::ModuleList layers;          ///< Blocks.
  nn::RMSNorm norm = nullptr;            ///< Final norm.

 private:
  RotaryTables tables_for(const at::Tensor& x, const Attending& attending);
  const RotaryTables& tables_of(const at::Tensor& x, int64_t tokens, bool more);

  LlamaConfig config_;
  // By dtype and device; not parameters or buffers. They are never freed, because a recorded step
  // may read them.
  std::vector<RotaryTables> tables_;
};
/// Holder of LlamaModelImpl.
TORCH_MODULE(LlamaModel);

/// A Llama with its head.
class LlamaImpl : public CausalLMImpl {
 public:
  /// Initializes the weights.
  explicit LlamaImpl(const LlamaConfig& config = {});

  at::Tensor hidden(const TextInputs& inputs) override;
  at::Tensor head() const override { return lm_head->weight; }
  int64_t vocab() const override { return config_.vocab; }
  int64_t layers() const override { return config_.layers; }
  double flops_per_token(int64_t tokens) const override;
  Distribution initial(const std::string& name, at::IntArrayRef sizes) const override;

  /// The checked configuration.
  const LlamaConfig& config() const { return config_; }

  LlamaModel model = nullptr;  ///< Everything below the head.
  LMHead lm_head = nullptr;    ///< The head.

 private:
  LlamaConfig config_;
};
/// Holder of LlamaImpl: `models::Llama model(config)`.
TORCH_MODULE(Llama);

}  // namespace fsdp::models
