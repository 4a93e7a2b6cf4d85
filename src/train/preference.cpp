#include "train/preference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "fsdp/nn/lora.h"

namespace fsdp::train {
namespace {

// The sums of `values` [samples, seq] over each document, in float64: [pairs, 2].
at::Tensor by_pair(const at::Tensor& values, const at::Tensor& document, int64_t documents) {
  at::Tensor sums = at::zeros({documents}, values.options().dtype(at::kDouble));
  return sums.index_add(0, document, values.flatten().to(at::kDouble)).view({-1, 2});
}

}  // namespace

at::Tensor preference_loss(models::CausalLMImpl& model, const Samples& samples, double beta,
                           const at::Tensor& tally) {
  const models::TextInputs inputs{
      .ids = samples.inputs, .documents = samples.lengths, .restart_positions = true};
  at::Tensor base;
  {
    at::NoGradGuard no_grad;
    const nn::WithoutAdapters without(model);
    base = model.losses(inputs, samples.targets);
  }
  const at::Tensor losses = model.losses(inputs, samples.targets);
  const int64_t documents = samples.lengths.size(0) - 1;
  const at::Tensor document = models::document_of_token(samples.lengths, samples.inputs.numel());
  const at::Tensor counted =
      by_pair(samples.targets.ne(-100).to(at::kDouble), document, documents).gt(0).all(1);
  const at::Tensor whole = counted.to(at::kDouble);
  const at::Tensor rewards = by_pair(base - losses, document, documents) * beta;
  const at::Tensor margin = rewards.select(1, 0) - rewards.select(1, 1);
  if (tally.defined()) {
    at::NoGradGuard no_grad;
    const at::Tensor seen = rewards.detach();
    tally.add_(at::stack({whole.sum(), (seen.select(1, 0) * whole).sum(),
                          (seen.select(1, 1) * whole).sum(),
                          margin.detach().gt(0).logical_and(counted).to(at::kDouble).sum()}));
  }
  return -(at::log_sigmoid(margin) * whole).sum().to(at::kFloat);
}

}  // namespace fsdp::train
