// The modules of a mixture of experts, the choice of experts and the losses.
#include "nn/moe.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/diff.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "fsdp/error.h"
#include "shard/tape_hook.h"

namespace fsdp::nn {
namespace {

constexpr double kTiny = 1e-20;  // keeps a sum of scores from zero

at::Tensor normalized(const at::Tensor& scores) {
  return scores / (scores.sum(-1, /*keepdim=*/true) + kTiny);
}

// A matrix, or several, as torch draws the weight of a linear.
at::Tensor drawn(at::IntArrayRef sizes) {
  const double bound = 1 / std::sqrt(static_cast<double>(sizes.back()));
  return torch::nn::init::uniform_(at::empty(sizes), -bound, bound);
}

// Whether its weight alone says what it computes.
bool is_plain(const Linear& linear) {
  return !linear->uses_adapter() && linear->quant() == Quant::kNone;
}

void check_moe(const MoEOptions& options) {
  for (int64_t size : {options.dim, options.ffn, options.experts})
    if (size < 1) throw Error("a mixture's sizes must be positive.", "set each to 1 or more.");
  if (options.shared_ffn < 0)
    throw Error("shared experts can't have a negative width.", "0 leaves them out.");
  if (options.route.top_k < 1 || options.route.top_k > options.experts)
    throw Error(
        formatted("a token can't go to {} of {} experts.", options.route.top_k, options.experts),
        "set top_k to a number from 1 to that of the experts.");
  if (!(options.balance >= 0) || !(options.z >= 0))
    throw Error("the coefficients of a router's losses must not be negative.",
                "0 leaves a loss out.");
}

}  // namespace

// --- functions ---

Routing route(const at::Tensor& logits, const RouteOptions& options, const at::Tensor& bias) {
  const bool softmax = options.score == RouterScore::kSoftmax;
  Routing routing;
  routing.scores = softmax ? at::softmax(logits, -1) : at::sigmoid(logits);
  // The scores rather than the logits: two large logits may have one score, as in transformers.
  const at::Tensor wish = bias.defined() ? routing.scores.detach() + bias : routing.scores.detach();
  routing.chosen = std::get<1>(at::topk(wish, options.top_k, -1));
  routing.weights = routing.scores.gather(-1, routing.chosen);
  if (options.normalize) routing.weights = normalized(routing.weights);
  if (options.scale != 1) routing.weights = routing.weights * options.scale;
  sort_by_expert(routing, logits.size(-1));
  return routing;
}

at::Tensor load_of(const Routing& routing) {
  const at::Tensor zero = at::zeros({1}, routing.ends.options());
  return at::diff(routing.ends, 1, -1, zero).to(at::kLong);
}

at::Tensor balance_loss(const Routing& routing) {
  const auto tokens = static_cast<double>(std::max<int64_t>(1, routing.scores.size(0)));
  const at::Tensor shares = load_of(routing).to(routing.scores.scalar_type()) / tokens;
  const at::Tensor means = normalized(routing.scores).sum(0) / tokens;
  return (shares * means).sum() * routing.scores.size(1);
}

at::Tensor router_z_loss(const at::Tensor& logits) {
  const auto tokens = static_cast<double>(std::max<int64_t>(1, logits.size(0)));
  return at::logsumexp(logits, -1).square().sum() / tokens;
}

// --- modules ---

RouterImpl::RouterImpl(int64_t dim, int64_t experts, bool biased)
    : dim_(dim), experts_(experts), biased_(biased) {
  RouterImpl::reset();
}

void RouterImpl::reset() {
  weight = register_parameter("weight", drawn({experts_, dim_}));
  if (biased_)
    e_score_correction_bias =
        register_buffer("e_score_correction_bias", torch::nn::init::zeros_(at::empty({experts_})));
}

ExpertsImpl::ExpertsImpl(int64_t dim, int64_t ffn, int64_t experts)
    : dim_(dim), ffn_(ffn), experts_(experts) {
  ExpertsImpl::reset();
}

void ExpertsImpl::reset() {
  gate_up_proj = register_parameter("gate_up_proj", drawn({experts_, 2 * ffn_, dim_}));
  down_proj = register_parameter("down_proj", drawn({experts_, dim_, ffn_}));
}

SharedExpertsImpl::SharedExpertsImpl(int64_t dim, int64_t ffn) : dim_(dim), ffn_(ffn) {
  SharedExpertsImpl::reset();
}

void SharedExpertsImpl::reset() {
  const auto linear = [&](const char* name, int64_t in, int64_t out) {
    return register_module(name, Linear(torch::nn::LinearOptions(in, out).bias(false)));
  };
  gate_proj = linear("gate_proj", dim_, ffn_);
  up_proj = linear("up_proj", dim_, ffn_);
  down_proj = linear("down_proj", ffn_, dim_);
}

at::Tensor SharedExpertsImpl::forward(const at::Tensor& x) {
  if (!is_plain(gate_proj) || !is_plain(up_proj) || !is_plain(down_proj))
    return down_proj(swiglu(at::cat({gate_proj(x), up_proj(x)}, -1)));
  const Fp8 fp8 = gate_proj->fp8 == up_proj->fp8 ? gate_proj->fp8 : Fp8::kNone;
  return swiglu_linear(linears(x, {gate_proj->weight, up_proj->weight}, {}, fp8), down_proj->weight,
                       {}, WeightLayout::kOutIn, down_proj->fp8);
}

MoEImpl::MoEImpl(const MoEOptions& options) : options_(options) {
  check_moe(options_);
  MoEImpl::reset();
}

void MoEImpl::reset() {
  tally_ = at::Tensor();
  gate = register_module("gate", Router(options_.dim, options_.experts, options_.biased));
  experts = register_module("experts", Experts(options_.dim, options_.ffn, options_.experts));
  if (options_.shared_ffn > 0)
    shared_experts =
        register_module("shared_experts", SharedExperts(options_.dim, options_.shared_ffn));
}

MoEOutput MoEImpl::forward(const at::Tensor& x) {
  const bool trains = is_training() && at::GradMode::is_enabled();
  const at::Tensor logits = router_logits(x, gate->weight);
  const Routing routing = nn::route(logits, options_.route, gate->e_score_correction_bias);
  MoEOutput made{.out = mix_experts(x, experts->gate_up_proj, experts->down_proj, routing)};
  if (shared_experts) made.out = made.out + shared_experts(x);
  if (!trains) return made;
  count(routing);
  if (options_.balance > 0) made.loss = nn::balance_loss(routing) * options_.balance;
  if (options_.z > 0) {
    const at::Tensor z = router_z_loss(logits) * options_.z;
    made.loss = made.loss.defined() ? made.loss + z : z;
  }
  return made;
}

// Recomputation doesn't see it, so it is done once.
void MoEImpl::count(const Routing& routing) {
  const shard::ViewsOnly unseen;
  const at::NoGradGuard no_grad;
  const at::Tensor shares = normalized(routing.scores.detach());
  const auto doubles = routing.scores.options().dtype(at::kDouble);
  const at::Tensor entropy = shares.mul(shares.clamp_min(kTiny).log()).sum(at::kDouble).neg();
  const at::Tensor now = at::cat({load_of(routing).to(at::kDouble), entropy.view({1}),
                                  at::full({1}, static_cast<double>(shares.size(0)), doubles)});
  if (tally_.defined() && tally_.device() == now.device())
    tally_.add_(now);
  else if (!tally_.defined() || !now.is_meta())  // a plan counts nothing
    tally_ = now;
}

void MoEImpl::tally_into(const at::Tensor& place) {
  if (place.scalar_type() != at::kDouble || place.dim() != 1 ||
      place.size(0) != options_.experts + 2)
    throw Error(formatted("{} numbers can't hold the tally of {} experts.", place.numel(),
                          options_.experts),
                "pass float64 [experts + 2].");
  tally_ = place;
}

MoETally MoEImpl::tally() const {
  if (!tally_.defined()) return {};
  return {.load = tally_.narrow(0, 0, options_.experts),
          .entropy = tally_.select(0, options_.experts),
          .tokens = tally_.select(0, options_.experts + 1)};
}

void MoEImpl::reset_tally() {
  const at::NoGradGuard no_grad;
  if (tally_.defined()) tally_.zero_();
}

void MoEImpl::update_bias(const at::Tensor& load, double rate) {
  if (!options_.biased)
    throw Error("a mixture without a bias can't update it.", "set MoEOptions::biased.");
  const at::NoGradGuard no_grad;
  at::Tensor& bias = gate->e_score_correction_bias;
  const at::Tensor seen = load.to(bias.device(), at::kDouble);
  bias.add_(at::sign(seen.mean() - seen).to(bias.scalar_type()), rate);
}

}  // namespace fsdp::nn
