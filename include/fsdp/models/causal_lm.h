// CausalLM: what every language model here can do, whatever it is made of.
//
//   std::shared_ptr<models::CausalLMImpl> model = models::Llama(config).ptr();
//   at::Tensor loss = model->forward(ids, targets);
//
// Generating, one pass for the prompt and one for each token after it:
//
//   torch::NoGradGuard no_grad;
//   models::KVCache cache(model->layers());
//   at::Tensor scores = model->logits({.ids = prompt, .cache = &cache});
//   scores = model->logits({.ids = next, .cache = &cache});  // next: [batch, 1]
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace fsdp::models {

// Keys and values of the tokens that a model has seen, so that later tokens need not compute them
// again. For generation: what is kept carries no gradient. One cache serves one batch.
class KVCache {
 public:
  explicit KVCache(int64_t layers);

  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t tokens() const { return tokens_; }  // seen in each sequence
  int64_t batch() const;                      // sequences; 0 before the first token
  void reset();                               // forgets them, keeps the memory

  // --- for models ---
  using KeysValues = std::pair<at::Tensor, at::Tensor>;  // [batch, heads, tokens, head_dim] each
  // Puts a layer's new keys and values behind those of the tokens seen; returns all of them. They
  // count as seen after advance(), so a pass that failed is overwritten by the next.
  KeysValues append(int64_t layer, const at::Tensor& keys, const at::Tensor& values);
  void advance(int64_t tokens) { tokens_ += tokens; }
  at::Tensor padding;  // bool [batch, tokens()], true: a real token; undefined: all are

 private:
  std::vector<KeysValues> layers_;  // with room for more tokens than were seen
  int64_t tokens_ = 0;
};

struct TextInputs {
  at::Tensor ids;             // int64 [batch, tokens]
  at::Tensor padding = {};    // bool [batch, tokens], true: a real token. Undefined: all are
  at::Tensor documents = {};  // int64 [batch, tokens]: attention stays among equal numbers
  KVCache* cache = nullptr;   // ids follow the tokens in it, and are added
};

// How the tokens of one pass see each other; what TextInputs mean to the attention of each layer.
struct Attending {
  at::Tensor mask = {};       // bool [batch or 1, 1, tokens, past + tokens], true: is seen
  at::Tensor positions = {};  // int64 [batch, tokens]. Undefined: past, past + 1, …
  int64_t past = 0;           // tokens in the cache
  KVCache* cache = nullptr;
};

// Checks the inputs of a model with this many layers that has `max_tokens` positions (0: any
// number).
//
// Nobody sees a padded token but itself (so that no row of the softmax is empty: what comes out
// there is finite and means nothing). The positions of a sequence count from its first real token,
// wherever the padding is, as in Hugging Face's generate(); their forward() alone counts padding,
// which shifts GPT-2's learned positions and leaves Llama's, which are relative, as they are.
// Documents only restrict who sees whom, as when Llama 3 was trained; positions run on through all
// of them.
Attending plan_attention(const TextInputs& inputs, int64_t layers, int64_t max_tokens = 0);

// softmax(queries · keys / sqrt(head_dim)) · values. queries: [batch, heads, tokens, head_dim];
// keys and values may have fewer heads, by a whole factor. Without a mask: the fast causal
// operator.
at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const Attending& attending, int64_t layer, double dropout = 0.0);

// What a block hands on: the residual stream, and what its last layer adds to it. The next norm
// does the adding, in the pass in which it reads both.
struct Stream {
  at::Tensor x;           // [batch, tokens, dim]
  at::Tensor delta = {};  // likewise; undefined: nothing
};

class CausalLMImpl : public torch::nn::Module {
 public:
  // What the head reads, [batch, tokens, dim], and its matrix, [vocab, dim].
  virtual at::Tensor hidden(const TextInputs& inputs) = 0;
  virtual at::Tensor head() const = 0;
  at::Tensor logits(const TextInputs& inputs);  // [batch, tokens, vocab]

  // Mean cross-entropy in float32, without holding the logits of all tokens. ids, targets: int64
  // [batch, tokens]; targets of -100 do not count.
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& targets);
  // Summed cross-entropy in float32 over the targets that are not -100.
  at::Tensor loss_sum(const TextInputs& inputs, const at::Tensor& targets);

  virtual int64_t vocab() const = 0;
  virtual int64_t layers() const = 0;
  virtual int64_t max_tokens() const { return 0; }  // in a sequence; 0: unlimited
  // Of forward and backward in a sequence of this length: 6 for each weight that is in a matrix
  // product (the head is, looking up an embedding is none), and the attention of the half of all
  // pairs that are causal.
  virtual double flops_per_token(int64_t tokens) const = 0;

 protected:
  CausalLMImpl() = default;
};

// The matrix that gives the scores: of its own, or the embedding's.
class LMHeadImpl : public torch::nn::Module {
 public:
  LMHeadImpl(int64_t dim, int64_t vocab);
  explicit LMHeadImpl(const at::Tensor& embedding);  // tied: one parameter under two names
  void reset_parameters();                           // a tied one is the embedding's to fill
  at::Tensor forward(const at::Tensor& x);           // [.., dim] → [.., vocab]

  bool tied() const { return tied_; }

  at::Tensor weight;  // [vocab, dim]

 private:
  bool tied_;
};
TORCH_MODULE(LMHead);

// Fills a module's own parameters (not those of modules in it) as these models begin: matrices from
// a normal distribution, biases with zero, norms with one. What the constructors do, and what
// Sharded::materialize can be given.
void init_weights(torch::nn::Module& module, double std = 0.02);

}  // namespace fsdp::models
