/// @file
/// Mixtures of experts: a router sends each token to a few of many feed-forwards.
///
///     nn::MoE mixture({.dim = 512, .ffn = 256, .experts = 64, .top_k = 8, .balance = 0.01});
///     auto [out, loss] = mixture(x);  // add `loss` to the model's
///
/// No token is dropped. Tokens are sorted by expert and multiplied group by group; on CUDA in
/// bfloat16 the sizes of groups stay on the device, so the host doesn't wait. Gradients of experts
/// are written into the buffer that is reduced. docs/layers.md has the formulas.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>

#include "fsdp/nn/modules.h"

namespace fsdp::nn {

/// What the router makes of its logits.
enum class RouterScore {
  kSoftmax,  ///< Their softmax over all experts.
  kSigmoid,  ///< The sigmoid of each.
};

/// How tokens are sent to experts.
struct RouteOptions {
  int64_t top_k = 2;                          ///< Experts of a token.
  RouterScore score = RouterScore::kSoftmax;  ///< Of experts.
  bool normalize = true;                      ///< The weights of a token add up to `scale`.
  double scale = 1;                           ///< Of the weights.
};

/// Where tokens go. The rows of a routing are pairs of a token and one of its experts, sorted by
/// expert.
struct Routing {
  at::Tensor chosen;   ///< int64 [tokens, top_k]: the experts of each token.
  at::Tensor weights;  ///< [tokens, top_k]: what their outputs are multiplied by.
  at::Tensor scores;   ///< [tokens, experts].
  at::Tensor order;    ///< int64 [rows]: token · top_k + choice of each row.
  at::Tensor place;    ///< int64 [rows]: the row of each token and choice.
  at::Tensor ends;     ///< int32 [experts]: where the rows of each expert end.
};

/// x [.., dim] · weightᵀ in float32 (in float64 if x is), weight [experts, dim] → [tokens,
/// experts].
at::Tensor router_logits(const at::Tensor& x, const at::Tensor& weight);

/// Chooses each token's experts: those with the highest score + bias. Weights are the scores alone.
/// `bias` [experts] is optional.
Routing route(const at::Tensor& logits, const RouteOptions& options = {},
              const at::Tensor& bias = {});

/// The number of tokens that each expert got: int64 [experts].
at::Tensor load_of(const Routing& routing);

/// Each token through its experts, down(silu(gate) · up), and their weighted sum. x [.., dim],
/// gate_up [experts, 2 · width, dim] with the gate first, down [experts, dim, width] → [.., dim].
at::Tensor mix_experts(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down,
                       const Routing& routing);

/// experts · Σ (tokens of an expert / tokens) · (mean of its normalized scores): at least top_k,
/// which it is when all experts get the same.
at::Tensor balance_loss(const Routing& routing);

/// The mean square of the log-sum-exp of a token's logits.
at::Tensor router_z_loss(const at::Tensor& logits);

/// The router of a mixture.
class RouterImpl : public torch::nn::Cloneable<RouterImpl> {
 public:
  /// `biased`: whether it has a bias for the choice of experts.
  RouterImpl(int64_t dim, int64_t experts, bool biased);
  /// Registers its tensors; Cloneable calls it.
  void reset() override;

  at::Tensor weight;  ///< [experts, dim].

  /// [experts], a buffer that update_bias() changes; undefined without one. The name is Hugging
  /// Face's.
  at::Tensor e_score_correction_bias;

 private:
  int64_t dim_, experts_;
  bool biased_;
};
/// Holder of RouterImpl.
TORCH_MODULE(Router);

/// The experts of a mixture: one parameter for each of their products.
class ExpertsImpl : public torch::nn::Cloneable<ExpertsImpl> {
 public:
  /// Draws each matrix as torch draws a linear's.
  ExpertsImpl(int64_t dim, int64_t ffn, int64_t experts);
  /// Registers the parameters; Cloneable calls it.
  void reset() override;

  at::Tensor gate_up_proj;  ///< [experts, 2 · ffn, dim], the gate first.
  at::Tensor down_proj;     ///< [experts, dim, ffn].

 private:
  int64_t dim_, ffn_, experts_;
};
/// Holder of ExpertsImpl.
TORCH_MODULE(Experts);

/// The feed-forward of shared experts, which every token goes through.
class SharedExpertsImpl : public torch::nn::Cloneable<SharedExpertsImpl> {
 public:
  /// `ffn`: the width of all of them together.
  SharedExpertsImpl(int64_t dim, int64_t ffn);
  /// Registers the linears; Cloneable calls it.
  void reset() override;
  /// down(silu(gate) · up), the shape of x.
  at::Tensor forward(const at::Tensor& x);

  Linear gate_proj = nullptr;  ///< To the gate.
  Linear up_proj = nullptr;    ///< To what is gated.
  Linear down_proj = nullptr;  ///< Back.

 private:
  int64_t dim_, ffn_;
};
/// Holder of SharedExpertsImpl.
TORCH_MODULE(SharedExperts);

/// Options of MoE.
struct MoEOptions {
  int64_t dim = 512;        ///< Width of tokens.
  int64_t ffn = 512;        ///< Width of an expert.
  int64_t experts = 8;      ///< Number of experts.
  int64_t shared_ffn = 0;   ///< Width of the shared experts together. 0: there are none.
  RouteOptions route = {};  ///< How tokens are sent.
  bool biased = false;      ///< The router has a bias that update_bias() changes.
  double balance = 0;       ///< Coefficient of balance_loss().
  double z = 0;             ///< Coefficient of router_z_loss().
};

/// What a mixture returns.
struct MoEOutput {
  at::Tensor out;  ///< The shape of x.
  at::Tensor
      loss;  ///< To add to the model's. Undefined in evaluation and if no coefficient is set.
};

/// What a mixture counted in training since reset_tally().
struct MoETally {
  at::Tensor load;     ///< float64 [experts]: tokens that each expert got.
  at::Tensor entropy;  ///< float64: the sum of the entropies of tokens' normalized scores.
  at::Tensor tokens;   ///< float64.
};

/// A mixture of experts.
///
/// Parameters: gate.weight, experts.gate_up_proj, experts.down_proj, and with shared experts
/// shared_experts.gate_proj.weight, ….
class MoEImpl : public torch::nn::Cloneable<MoEImpl> {
 public:
  /// Throws Error if the numbers don't fit each other.
  explicit MoEImpl(const MoEOptions& options);
  /// Registers its modules; Cloneable calls it.
  void reset() override;
  /// x [.., dim].
  MoEOutput forward(const at::Tensor& x);

  /// The options.
  const MoEOptions& options() const { return options_; }

  /// Of this rank, in tensors that later passes add to. Recomputation counts nothing twice. Empty
  /// before the first pass in training.
  MoETally tally() const;
  /// Sets the tally to zero.
  void reset_tally();
  /// Counts into `place`, float64 [experts + 2] (load, entropy, tokens), from now on: a part of
  /// TrainStepOptions::tally, for example.
  void tally_into(const at::Tensor& place);
  /// Adds `rate` to the bias of experts that got less than the mean of `load` [experts], and
  /// subtracts it from those that got more. Ranks must pass the same load.
  void update_bias(const at::Tensor& load, double rate);

  Router gate = nullptr;                   ///< The router.
  Experts experts = nullptr;               ///< The experts.
  SharedExperts shared_experts = nullptr;  ///< Null without them.

 private:
  void count(const Routing& routing);

  MoEOptions options_;
  at::Tensor tally_;  // float64 [experts + 2]: load, entropy, tokens; no buffer, not saved
};
/// Holder of MoEImpl: `nn::MoE mixture(options)`.
TORCH_MODULE(MoE);

}  // namespace fsdp::nn
