// GPT-2: pre-norm with LayerNorm, learned positions, one matrix for queries, keys and values, GELU
// (tanh), biases everywhere.
//
// Parameters: transformer.wte.weight, transformer.wpe.weight, transformer.h.0.attn.c_attn.weight,
// …, transformer.ln_f.bias, lm_head.weight. The units of sharding are GPT2Block.
#pragma once

#include <torch/nn/modules/container/modulelist.h>

#include "fsdp/models/causal_lm.h"
#include "fsdp/nn/modules.h"

namespace fsdp::models {

struct GPT2Config {  // the defaults are GPT-2 of 124M parameters
  int64_t vocab = 50257;
  int64_t max_tokens = 1024;  // positions there are
  int64_t dim = 768;
  int64_t layers = 12;
  int64_t heads = 12;
  int64_t ffn = 0;   // width of the feed-forward; 0: 4 · dim
  bool tied = true;  // the head is the embedding
  double norm_eps = 1e-5;
  double embd_dropout = 0;   // of the sum of token and position
  double attn_dropout = 0;   // of the shares of attention
  double resid_dropout = 0;  // of what is added to the residual stream
  double init_std = 0.02;    // of matrices; those that end in the residual stream begin smaller, by
                             // sqrt(2 · layers)
};

// `config` with its zeros filled in; an Error where the numbers do not fit each other.
GPT2Config checked(GPT2Config config);
int64_t parameter_count(const GPT2Config& config);  // a tied matrix counts once

// A linear whose weight lies the other way round, as the files of GPT-2 have it.
class Conv1DImpl : public torch::nn::Module {
 public:
  Conv1DImpl(int64_t in, int64_t out, double init_scale = 1.0);
  at::Tensor forward(const at::Tensor& x);  // [.., in] → [.., out]

  double init_scale() const { return init_scale_; }  // init_weights multiplies the spread by it

  at::Tensor weight;  // [in, out]
  at::Tensor bias;    // [out]

 private:
  double init_scale_;
};
TORCH_MODULE(Conv1D);

class GPT2AttentionImpl : public torch::nn::Module {
 public:
  GPT2AttentionImpl(const GPT2Config& config, int64_t layer);
  // qkv: what c_attn gave. → [batch, tokens, dim]
  at::Tensor forward(const at::Tensor& qkv, const Attending& attending);

  Conv1D c_attn = nullptr, c_proj = nullptr;

 private:
  int64_t heads_, layer_;
  double attn_dropout_, resid_dropout_;
};
TORCH_MODULE(GPT2Attention);

class GPT2MLPImpl : public torch::nn::Module {
 public:
  explicit GPT2MLPImpl(const GPT2Config& config);
  at::Tensor forward(const at::Tensor& x);  // what c_fc gave → [.., dim]

  Conv1D c_fc = nullptr, c_proj = nullptr;

 private:
  double dropout_;
};
TORCH_MODULE(GPT2MLP);

class GPT2BlockImpl : public torch::nn::Module {
 public:
  // `config` as checked() returns it; `layer` says which part of a cache is its own.
  explicit GPT2BlockImpl(const GPT2Config& config, int64_t layer = 0);
  Stream forward(const Stream& stream, const Attending& attending = {});

  nn::LayerNorm ln_1 = nullptr, ln_2 = nullptr;
  GPT2Attention attn = nullptr;
  GPT2MLP mlp = nullptr;
};
TORCH_MODULE(GPT2Block);

// Everything below the head.
class GPT2ModelImpl : public torch::nn::Module {
 public:
  explicit GPT2ModelImpl(const GPT2Config& config);  // as checked() returns it
  at::Tensor forward(const TextInputs& inputs);      // [batch, tokens, dim]

  nn::Embedding wte = nullptr, wpe = nullptr;
  torch::nn::ModuleList h;
  nn::LayerNorm ln_f = nullptr;

 private:
  GPT2Config config_;
};
TORCH_MODULE(GPT2Model);

class GPT2Impl : public CausalLMImpl {
 public:
  explicit GPT2Impl(const GPT2Config& config = {});

  at::Tensor hidden(const TextInputs& inputs) override;
  at::Tensor head() const override { return lm_head->weight; }
  int64_t vocab() const override { return config_.vocab; }
  int64_t layers() const override { return config_.layers; }
  int64_t max_tokens() const override { return config_.max_tokens; }
  double flops_per_token(int64_t tokens) const override;

  const GPT2Config& config() const { return config_; }

  GPT2Model transformer = nullptr;
  LMHead lm_head = nullptr;

 private:
  GPT2Config config_;
};
TORCH_MODULE(GPT2);

}  // namespace fsdp::models
