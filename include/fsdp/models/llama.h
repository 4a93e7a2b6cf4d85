// Llama: pre-norm with RMSNorm, rotary positions, grouped-query attention, SwiGLU. Qwen2 (and 2.5)
// is a Llama whose queries, keys and values have biases.
//
// Parameters: model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, …,
// model.norm.weight, lm_head.weight. The units of sharding are LlamaBlock, for Qwen2 too.
#pragma once

#include <torch/nn/modules/container/modulelist.h>

#include <optional>
#include <vector>

#include "fsdp/models/causal_lm.h"
#include "fsdp/nn/modules.h"

namespace fsdp::models {

// Llama 3.1's longer context: frequencies whose wave is longer than the context that a model was
// trained with, divided by low_freq_factor, turn `factor` times slower; those with a wave shorter
// than the context divided by high_freq_factor stay; between them it is mixed.
struct RopeScaling {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_position_embeddings = 8192;
};

struct LlamaConfig {
  int64_t vocab = 32000;
  int64_t dim = 2048;
  int64_t layers = 16;
  int64_t heads = 16;    // of queries
  int64_t kv_heads = 0;  // of keys and values, a divisor of heads; 0: as many as heads
  int64_t head_dim = 0;  // even; 0: dim / heads
  int64_t ffn = 0;       // width of the feed-forward; 0: 8/3 of dim, rounded up to 256
  bool tied = false;     // the head is the embedding
  bool qkv_bias = false;
  double norm_eps = 1e-5;
  double rope_base = 10000;
  std::optional<RopeScaling> rope_scaling = {};
  double init_std = 0.02;  // of every matrix; norms begin at one, biases at zero
};

// `config` with its zeros filled in; an Error where the numbers do not fit each other.
LlamaConfig checked(LlamaConfig config);
int64_t parameter_count(const LlamaConfig& config);  // a tied matrix counts once
// `sizes` with what all models of Qwen2 and Qwen2.5 have: qkv_bias, rope_base 1e6, norm_eps 1e-6.
// (Those up to 3B are tied.)
LlamaConfig qwen2(LlamaConfig sizes);

// cos and sin of position · frequency, for each position and element of a head.
struct RotaryTables {
  at::Tensor cos, sin;  // [tokens, head_dim] or, where positions differ from sequence to sequence,
                        // [batch, tokens, head_dim]; the second half of a row repeats the first
};
// For positions 0 to tokens - 1, in float32.
RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device,
                           const std::optional<RopeScaling>& scaling = {});
// Turns each pair (x[i], x[i + head_dim / 2]) by the angle of its position.
// x: [batch, heads, tokens, head_dim]
at::Tensor rotate(const at::Tensor& x, const RotaryTables& tables);

class LlamaAttentionImpl : public torch::nn::Module {
 public:
  LlamaAttentionImpl(const LlamaConfig& config, int64_t layer);
  // qkv: what the three projections gave, side by side; it is overwritten. → [batch, tokens, dim]
  at::Tensor forward(const at::Tensor& qkv, const RotaryTables& tables, const Attending& attending);

  std::vector<at::Tensor> projections() const;  // the weights of q, k and v
  std::vector<at::Tensor> biases() const;       // theirs; empty: they have none

  nn::Linear q_proj = nullptr, k_proj = nullptr, v_proj = nullptr, o_proj = nullptr;

 private:
  int64_t heads_, kv_heads_, layer_;
};
TORCH_MODULE(LlamaAttention);

class SwiGLUImpl : public torch::nn::Module {
 public:
  SwiGLUImpl(int64_t dim, int64_t width);
  // gate_up: what the two projections gave, side by side. → [.., dim]
  at::Tensor forward(const at::Tensor& gate_up);

  std::vector<at::Tensor> projections() const;  // the weights of gate and up

  nn::Linear gate_proj = nullptr, up_proj = nullptr, down_proj = nullptr;
};
TORCH_MODULE(SwiGLU);

class LlamaBlockImpl : public torch::nn::Module {
 public:
  // `config` as checked() returns it; `layer` says which part of a cache is its own.
  explicit LlamaBlockImpl(const LlamaConfig& config, int64_t layer = 0);
  Stream forward(const Stream& stream, const RotaryTables& tables, const Attending& attending = {});

  nn::RMSNorm input_layernorm = nullptr, post_attention_layernorm = nullptr;
  LlamaAttention self_attn = nullptr;
  SwiGLU mlp = nullptr;
};
TORCH_MODULE(LlamaBlock);

// Everything below the head.
class LlamaModelImpl : public torch::nn::Module {
 public:
  explicit LlamaModelImpl(const LlamaConfig& config);  // as checked() returns it
  at::Tensor forward(const TextInputs& inputs);        // [batch, tokens, dim]

  nn::Embedding embed_tokens = nullptr;
  torch::nn::ModuleList layers;
  nn::RMSNorm norm = nullptr;

 private:
  RotaryTables tables_for(const at::Tensor& x, const Attending& attending);
  const RotaryTables& tables_of(const at::Tensor& x, int64_t tokens, bool more);

  LlamaConfig config_;
  // By dtype and device; no parameters and no buffers. None is ever let go: a recorded step may
  // read it.
  std::vector<RotaryTables> tables_;
};
TORCH_MODULE(LlamaModel);

class LlamaImpl : public CausalLMImpl {
 public:
  explicit LlamaImpl(const LlamaConfig& config = {});

  at::Tensor hidden(const TextInputs& inputs) override;
  at::Tensor head() const override { return lm_head->weight; }
  int64_t vocab() const override { return config_.vocab; }
  int64_t layers() const override { return config_.layers; }
  double flops_per_token(int64_t tokens) const override;

  const LlamaConfig& config() const { return config_; }

  LlamaModel model = nullptr;
  LMHead lm_head = nullptr;

 private:
  LlamaConfig config_;
};
TORCH_MODULE(Llama);

}  // namespace fsdp::models
