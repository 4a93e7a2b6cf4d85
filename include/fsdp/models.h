// Models to train: plain torch::nn modules that know nothing of sharding.
//
//   models::Llama model({.vocab = 32000, .dim = 2048, .layers = 16, .heads = 16});
//   at::Tensor loss = model->forward(ids, targets);
//
// Names of parameters: embedding.weight, layers.0.attn.q.weight, …, norm.weight, head.weight.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

namespace fsdp::models {

// --- Llama: pre-norm with RMSNorm, rotary positions, grouped-query attention, SwiGLU, a head of
// its own (not tied to the embedding) ---

struct LlamaConfig {
  int64_t vocab = 32000;
  int64_t dim = 2048;
  int64_t layers = 16;
  int64_t heads = 16;    // of queries; dim / heads must be even
  int64_t kv_heads = 0;  // of keys and values, a divisor of heads; 0: as many as heads
  int64_t ffn = 0;       // width of the feed-forward; 0: 8/3 of dim, rounded up to 256
  double norm_eps = 1e-5;
  double rope_base = 10000;
  double init_std = 0.02;  // of every matrix; norms begin at one
};

// `config` with its zeros filled in; an Error where the numbers do not fit each other.
LlamaConfig checked(LlamaConfig config);
int64_t parameter_count(const LlamaConfig& config);

// x / sqrt(mean(x²) + eps) · weight, over the last dimension.
class RMSNormImpl : public torch::nn::Module {
 public:
  RMSNormImpl(int64_t dim, double eps);
  void reset_parameters();
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;  // [dim]

 private:
  double eps_;
};
TORCH_MODULE(RMSNorm);

// cos and sin of position · frequency, for each position and element of a head.
struct RotaryTables {
  at::Tensor cos, sin;  // [tokens, head_dim]; the second half of a row repeats the first
};
RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device);
// Turns each pair (x[i], x[i + head_dim / 2]) by the angle of its position. x: [.., tokens,
// head_dim]
at::Tensor rotate(const at::Tensor& x, const RotaryTables& tables);

class LlamaAttentionImpl : public torch::nn::Module {
 public:
  explicit LlamaAttentionImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const RotaryTables& tables);  // [batch, tokens, dim]

  torch::nn::Linear q = nullptr, k = nullptr, v = nullptr, o = nullptr;

 private:
  int64_t heads_, kv_heads_, head_dim_;
};
TORCH_MODULE(LlamaAttention);

class SwiGLUImpl : public torch::nn::Module {
 public:
  SwiGLUImpl(int64_t dim, int64_t width);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear gate = nullptr, up = nullptr, down = nullptr;
};
TORCH_MODULE(SwiGLU);

class LlamaBlockImpl : public torch::nn::Module {
 public:
  explicit LlamaBlockImpl(const LlamaConfig& config);
  at::Tensor forward(const at::Tensor& x, const RotaryTables& tables);  // [batch, tokens, dim]

  RMSNorm attn_norm = nullptr, ffn_norm = nullptr;
  LlamaAttention attn = nullptr;
  SwiGLU ffn = nullptr;
};
TORCH_MODULE(LlamaBlock);

class LlamaImpl : public torch::nn::Module {
 public:
  explicit LlamaImpl(const LlamaConfig& config = {});

  // Mean cross-entropy over all tokens. ids, targets: int64 [batch, tokens]
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& targets);
  at::Tensor logits(const at::Tensor& ids);  // [batch, tokens, vocab]

  const LlamaConfig& config() const { return config_; }

  torch::nn::Embedding embedding = nullptr;
  torch::nn::ModuleList layers;
  RMSNorm norm = nullptr;
  torch::nn::Linear head = nullptr;

 private:
  const RotaryTables& tables_for(const at::Tensor& x);

  LlamaConfig config_;
  RotaryTables tables_;  // no parameter and no buffer: made again when dtype or device change
};
TORCH_MODULE(Llama);

// Fills a Llama module's own parameters (not those of modules in it): matrices from a normal
// distribution, norms with one. What the constructor does, and what Sharded::materialize can be
// given.
void init_weights(torch::nn::Module& module, double std = 0.02);

// --- MLP: linears of one width with ReLU between them ---

struct MLPConfig {
  int64_t width = 2048;
  int64_t layers = 8;
};
int64_t parameter_count(const MLPConfig& config);

class MLPImpl : public torch::nn::Module {
 public:
  explicit MLPImpl(const MLPConfig& config = {});

  // Mean squared error. x, targets: [batch, width]
  at::Tensor forward(const at::Tensor& x, const at::Tensor& targets);
  at::Tensor predict(const at::Tensor& x);

  torch::nn::Sequential layers;
};
TORCH_MODULE(MLP);

}  // namespace fsdp::models
