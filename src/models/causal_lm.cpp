// Shared by all language models: losses, the head and weight initialization.
#include "fsdp/models/causal_lm.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/nn/init.h>

#include <cmath>

#include "fsdp/models/gpt2.h"
#include "fsdp/nn/functional.h"

namespace fsdp::models {

at::Tensor CausalLMImpl::logits(const TextInputs& inputs) {
  return nn::linear(hidden(inputs), head());
}

at::Tensor CausalLMImpl::forward(const at::Tensor& ids, const at::Tensor& targets) {
  return nn::linear_cross_entropy(hidden({.ids = ids}), head(), targets);
}

at::Tensor CausalLMImpl::loss_sum(const TextInputs& inputs, const at::Tensor& targets) {
  return nn::linear_cross_entropy(hidden(inputs), head(), targets,
                                  {.reduction = nn::Reduction::kSum});
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

void init_weights(torch::nn::Module& module, double std) {
  if (auto* head = dynamic_cast<LMHeadImpl*>(&module); head && head->tied()) return;
  if (auto* conv = dynamic_cast<Conv1DImpl*>(&module)) std *= conv->init_scale();
  torch::NoGradGuard no_grad;
  for (auto& parameter : module.named_parameters(/*recurse=*/false)) {
    if (parameter.value().dim() > 1)
      torch::nn::init::normal_(parameter.value(), 0.0, std);
    else if (parameter.key() == "bias")
      torch::nn::init::zeros_(parameter.value());
    else
      torch::nn::init::ones_(parameter.value());
  }
}

}  // namespace fsdp::models
