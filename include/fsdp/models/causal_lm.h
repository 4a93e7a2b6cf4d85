/// @file
/// What every language model here can do.
///
///     std::shared_ptr<models::CausalLMImpl> model = models::Llama(config).ptr();
///     at::Tensor loss = model->forward(ids, targets);
///
/// To generate, make one pass for the prompt and one for each token after it:
///
///     torch::NoGradGuard no_grad;
///     models::KVCache cache(model->layers());
///     at::Tensor scores = model->logits({.ids = prompt, .cache = &cache});
///     scores = model->logits({.ids = next, .cache = &cache});  // next: [batch, 1]
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/context_parallel.h"
#include "fsdp/init_parameters.h"

/// Models to train.
namespace fsdp::models {

/// Keys and values of the tokens that a model has seen, so that later tokens needn't recompute
/// them.
///
/// For generation: it keeps no gradients. One cache serves one batch.
class KVCache {
 public:
  /// Empty, for a model with this many layers.
  explicit KVCache(int64_t layers);

  /// Number of layers.
  int64_t layers() const { return static_cast<int64_t>(layers_.size()); }
  /// Tokens seen in each sequence.
  int64_t tokens() const { return tokens_; }
  /// Number of sequences; 0 before the first token.
  int64_t batch() const;
  /// Forgets all tokens and keeps the memory.
  void reset();

  /// @name For models
  /// @{

  /// [batch, heads, tokens, head_dim] each.
  using KeysValues = std::pair<at::Tensor, at::Tensor>;
  /// Appends a layer's new keys and values and returns all of them. They count as seen after
  /// advance(), so the next pass overwrites those of a pass that failed.
  KeysValues append(int64_t layer, const at::Tensor& keys, const at::Tensor& values);
  /// Counts new tokens as seen.
  void advance(int64_t tokens) { tokens_ += tokens; }
  /// bool [batch, tokens()], true for real tokens. Undefined: all are.
  at::Tensor padding;

  /// @}

 private:
  std::vector<KeysValues> layers_;  // with room for more tokens than were seen
  int64_t tokens_ = 0;
};

/// Inputs of a language model.
struct TextInputs {
  at::Tensor ids;             ///< int64 [batch, tokens].
  at::Tensor padding = {};    ///< bool [batch, tokens], true for real tokens. Undefined: all are.
  at::Tensor documents = {};  ///< cumulative_lengths(): attention stays within each document.
  bool restart_positions = false;  ///< Positions count from 0 in each document.
  KVCache* cache = nullptr;        ///< The ids continue the tokens in it, and are added to it.

  /// The ranks that share the sequences: ids are this rank's part of each, padding and documents
  /// describe whole sequences.
  Context context = {};
};

/// Where documents begin, for TextInputs::documents.
///
/// `numbers`: int64 [batch, tokens] on the CPU; a document is a stretch of equal numbers in a
/// sequence. The result is int32 [batch · room + 1]: where each begins in the flattened batch, and
/// the end of the last. Each sequence has as many entries as `room` says; those that it doesn't
/// need are its end. So batches with other documents have the same shape, which recorded steps
/// need. 0: as many as these documents need.
at::Tensor cumulative_lengths(const at::Tensor& numbers, int64_t room = 0);
/// The document of each of the first `tokens` tokens: int64 [tokens], counted in `documents`.
at::Tensor document_of_token(const at::Tensor& documents, int64_t tokens);

/// Which tokens of a pass see each other: what TextInputs mean to the attention of each layer.
struct Attending {
  at::Tensor mask = {};       ///< bool [batch or 1, 1, tokens, past + tokens], true: seen.
  at::Tensor documents = {};  ///< TextInputs::documents, on the device.
  at::Tensor positions =
      {};  ///< int64 [batch, tokens], or [tokens] of all. Undefined: past, past + 1, …
  at::Tensor lengths =
      {};  ///< int64 [batch, tokens]: of each token's document, if positions restart.
  int64_t past = 0;           ///< Tokens in the cache.
  int64_t end = 0;            ///< Tokens of a whole sequence, with those in the cache.
  KVCache* cache = nullptr;   ///< TextInputs::cache.
  Context context = {};       ///< TextInputs::context.
};

/// Checks the inputs of a model with `layers` layers and `max_tokens` positions (0: any number),
/// and says which tokens see each other.
///
/// A padded token is seen only by itself, so that no row of the softmax is empty; its output is
/// finite and meaningless. Positions count from a sequence's first real token, wherever the padding
/// is, as in Hugging Face's generate(). (Their forward() counts padding. That shifts GPT-2's
/// learned positions and makes no difference to Llama's relative ones.) Documents restrict
/// attention, as in Llama 3's training; positions run on across them, or restart, and then each
/// document scores as it does alone.
Attending plan_attention(const TextInputs& inputs, int64_t layers, int64_t max_tokens = 0);

/// Options of attend().
struct AttendOptions {
  double dropout = 0;                ///< On the attention weights.
  std::optional<double> scale = {};  ///< Of the scores. Default: 1 / sqrt(head_dim).
  int64_t window = 0;                ///< Tokens that a token sees, with itself. 0: all before it.
};
/// softmax(queries · keys · scale) · values.
///
/// queries [batch, heads, tokens, head_dim]; keys and values may have fewer heads, by a whole
/// factor. Without a mask it uses the fast causal operator; no mask is made for documents.
at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const Attending& attending, int64_t layer, const AttendOptions& options = {});

/// What a block passes on: the residual stream, and what its last layer adds to it. The next norm
/// adds both in the pass that reads them.
struct Stream {
  at::Tensor x;           ///< [batch, tokens, dim].
  at::Tensor delta = {};  ///< [batch, tokens, dim]. Undefined: nothing.
  at::Tensor loss = {};   ///< Of the routers so far. Undefined: none.
};

/// The base of language models.
class CausalLMImpl : public torch::nn::Module {
 public:
  /// The input of the head, [batch, tokens, dim].
  virtual at::Tensor hidden(const TextInputs& inputs) = 0;
  /// The head's matrix, [vocab, dim].
  virtual at::Tensor head() const = 0;
  /// [batch, tokens, vocab].
  at::Tensor logits(const TextInputs& inputs);

  /// Mean cross-entropy in float32, without holding all logits. ids, targets: int64 [batch,
  /// tokens]; targets of -100 don't count. In training the gradient of the routers' losses is added
  /// to its own; its value isn't changed by them.
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& targets);
  /// Sum of the cross-entropy in float32 over the targets that aren't -100. The routers' losses
  /// count once for each of them.
  at::Tensor loss_sum(const TextInputs& inputs, const at::Tensor& targets);
  /// The cross-entropy of each target in float32, [batch, tokens]; 0 for targets of -100.
  at::Tensor losses(const TextInputs& inputs, const at::Tensor& targets);

  /// Number of token ids.
  virtual int64_t vocab() const = 0;
  /// Number of blocks.
  virtual int64_t layers() const = 0;
  /// Longest sequence; 0: unlimited.
  virtual int64_t max_tokens() const { return 0; }
  /// A cache of up to this many tokens can't be continued beyond them: make a new one from all
  /// tokens. 0: any can.
  virtual int64_t cache_limit() const { return 0; }
  /// Computes the feed-forwards of all blocks, with their norms, this many tokens at a time, and
  /// recomputes them in backward (tiled()). 0: all tokens at once, as after construction.
  virtual void tile_feed_forward(int64_t tokens) = 0;
  /// Floating-point operations of forward and backward in a sequence of this length: 6 per weight
  /// in a matrix product (the head counts, the embedding doesn't), and attention over the causal
  /// half of all pairs.
  virtual double flops_per_token(int64_t tokens) const = 0;
  /// How a parameter starts: an InitRule for init_parameters(). The constructor draws from the same
  /// distributions with torch's generator.
  virtual Distribution initial(const std::string& name, at::IntArrayRef sizes) const = 0;

 protected:
  CausalLMImpl() = default;
  /// The routers' losses of the last hidden(), once. Undefined: none.
  virtual at::Tensor take_router_loss() { return {}; }
  /// Fills every parameter as initial() says; a tied one once.
  void init_weights();
};

/// The matrix that gives the scores: its own, or the embedding's.
class LMHeadImpl : public torch::nn::Module {
 public:
  /// With its own matrix.
  LMHeadImpl(int64_t dim, int64_t vocab);
  /// Tied: one parameter under two names.
  explicit LMHeadImpl(const at::Tensor& embedding);
  /// Fills its own matrix. The embedding fills a tied one.
  void reset_parameters();
  /// [.., dim] → [.., vocab].
  at::Tensor forward(const at::Tensor& x);

  /// Whether the matrix is the embedding's.
  bool tied() const { return tied_; }

  at::Tensor weight;  ///< [vocab, dim].

 private:
  bool tied_;
};
/// Holder of LMHeadImpl.
TORCH_MODULE(LMHead);

}  // namespace fsdp::models
