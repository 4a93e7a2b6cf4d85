// Shared by all language models: losses, the head and weight initialization.
#include "fsdp/models/causal_lm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <torch/nn/init.h>

#include <cmath>
#include <set>

#include "fsdp/nn/functional.h"

namespace fsdp::models {
namespace {

// `loss` with the gradient of `added` as well, `times` times.
at::Tensor with_gradient_of(const at::Tensor& loss, const at::Tensor& added,
                            const at::Tensor& times) {
  return loss + (added - added.detach()) * times;
}

}  // namespace

at::Tensor CausalLMImpl::logits(const TextInputs& inputs) {
  return nn::linear(hidden(inputs), head());
}

at::Tensor CausalLMImpl::forward(const at::Tensor& ids, const at::Tensor& targets) {
  const at::Tensor loss = nn::linear_cross_entropy(hidden({.ids = ids}), head(), targets);
  const at::Tensor routers = take_router_loss();
  return routers.defined() ? with_gradient_of(loss, routers, at::ones({}, loss.options())) : loss;
}

at::Tensor CausalLMImpl::loss_sum(const TextInputs& inputs, const at::Tensor& targets) {
  const at::Tensor loss =
      nn::linear_cross_entropy(hidden(inputs), head(), targets, {.reduction = nn::Reduction::kSum});
  const at::Tensor routers = take_router_loss();
  return routers.defined() ? with_gradient_of(loss, routers, targets.ne(-100).sum()) : loss;
}

at::Tensor CausalLMImpl::losses(const TextInputs& inputs, const at::Tensor& targets) {
  return nn::linear_cross_entropy(hidden(inputs), head(), targets,
                                  {.reduction = nn::Reduction::kNone})
      .view(targets.sizes());
}

void CausalLMImpl::init_weights() {
  std::set<const c10::TensorImpl*> filled;  // tied parameters have two names
  for (const auto& parameter : named_parameters())
    if (filled.insert(parameter.value().unsafeGetTensorImpl()).second)
      init_tensor_(parameter.value(), initial(parameter.key(), parameter.value().sizes()));
}

LMHeadImpl::LMHeadImpl(int64_t dim, int64_t vocab) : tied_(false) {
  weight = register_parameter("weight", at::empty({vocab, dim}));
  reset_parameters();
}

LMHeadImpl::LMHeadImpl(const at::Tensor& embedding) : tied_(true) {
  weight = register_parameter("weight", embedding);
}

// Initializes like torch::nn::Linear, so that a model draws the same random numbers as one built
// from those.
void LMHeadImpl::reset_parameters() {
  if (!tied_) torch::nn::init::kaiming_uniform_(weight, std::sqrt(5));
}

at::Tensor LMHeadImpl::forward(const at::Tensor& x) {
  return nn::linear(x, weight);
}

}  // namespace fsdp::models
