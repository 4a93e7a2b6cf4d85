#include "nn/norm.h"

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>

#include "fsdp/nn/functional.h"
#include "kernels/fp8.h"
#include "nn/known_amax.h"

namespace fsdp::nn {
namespace {

// Inputs: x, residual, weight, bias. Outputs: the normalised tensor, and the sum if there is a
// residual.
struct NormNode : Node {
  Norm norm;  // without its tensors
  Target weight, bias;

  std::string name() const override { return norm.layer ? "fsdp::layer_norm" : "fsdp::rms_norm"; }

  Tensors backward(const Tensors& gradients) override {
    Tensors kept = saved();
    const at::Tensor &x = kept[0], &mean = kept[1], &rstd = kept[2];
    at::Tensor grad_sum = gradients.size() > 1 ? gradients[1] : at::Tensor();
    if (!gradients[0].defined()) return {grad_sum, grad_sum, {}, {}};
    if (grad_sum.defined()) grad_sum = grad_sum.contiguous();
    Norm whole{kept[3], kept[4], norm.eps, norm.layer};
    NormBackward back =
        norm_backward(gradients[0].contiguous(), grad_sum, x, mean, rstd, whole,
                      wants(2) ? &weight : nullptr, wants(3) ? &bias : nullptr, false);
    return {back.x, wants(1) ? back.x : at::Tensor(), back.weight, back.bias};
  }
};

NormedSum fused_norm(const at::Tensor& given, const at::Tensor& added, const Norm& norm) {
  at::Tensor x = given.contiguous();
  at::Tensor residual = added.defined() ? added.contiguous() : added;
  kernels::Normed normed;
  {
    Unrecorded unrecorded;
    normed = normalised(x, residual, norm);
  }
  if (auto node = record<NormNode>({x, residual, norm.weight, norm.bias})) {
    node->norm = {.eps = norm.eps, .layer = norm.layer};
    node->weight = Target(norm.weight);
    node->bias = Target(norm.bias);
    at::Tensor rows = residual.defined() ? normed.sum.tensor_data() : x;
    node->save({rows, normed.mean, normed.rstd, norm.weight, norm.bias});
    node->returns(normed.out);
    if (residual.defined()) node->returns(normed.sum);
  }
  return {normed.out, residual.defined() ? normed.sum : given};
}

NormedSum add_norm(const at::Tensor& x, const at::Tensor& residual, const Norm& norm) {
  bool alike = has_kernels(norm.weight) && x.scalar_type() == norm.weight.scalar_type() &&
               norm.weight.dim() == 1 &&
               (!norm.bias.defined() || norm.bias.scalar_type() == x.scalar_type());
  bool same = !residual.defined() ||
              (residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type());
  if (alike && same) return fused_norm(x, residual, norm);
  // The residual stream keeps its dtype; the normalised tensor has the weight's.
  at::Tensor sum = residual.defined() ? x + residual : x;
  at::Tensor input = like_weight(sum, norm.weight);
  bool fits = has_kernels(norm.weight) && norm.weight.dim() == 1 &&
              (!norm.bias.defined() || norm.bias.scalar_type() == input.scalar_type());
  return {fits ? fused_norm(input, {}, norm).out : plain_norm(input, norm), sum};
}

}  // namespace

kernels::Normed normalised(const at::Tensor& x, const at::Tensor& residual, const Norm& norm) {
  return norm.layer ? kernels::layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
                    : kernels::rms_norm(x, residual, norm.weight, norm.eps);
}

NormBackward norm_backward(const at::Tensor& grad, const at::Tensor& grad_sum, const at::Tensor& x,
                           const at::Tensor& mean, const at::Tensor& rstd, const Norm& norm,
                           const Target* weight, const Target* bias, bool want_out) {
  Opened to_weight = weight ? weight->open() : Opened{};
  Opened to_bias = bias ? bias->open() : Opened{};
  // The kernel has one flag for both. They differ if one parameter was also used elsewhere.
  bool accumulate = to_weight.place.accumulate || to_bias.place.accumulate;
  for (const Opened* opened : {&to_weight, &to_bias})
    if (accumulate && opened->place.gradient.defined() && !opened->place.accumulate)
      opened->place.gradient.zero_();
  if (!norm.layer && KnownAmax::of_thread().wanted() && x.scalar_type() != at::kDouble) {
    const auto made = kernels::fp8::rms_norm_backward(
        grad, grad_sum, x, rstd, norm.weight, to_weight.place.gradient, accumulate, want_out);
    KnownAmax::of_thread().remember(made.x, made.amax);
    return {made.x, made.out, weight ? to_weight.close() : at::Tensor(), {}};
  }
  kernels::NormGradients made =
      norm.layer ? kernels::layer_norm_backward(grad, grad_sum, x, mean, rstd, norm.weight,
                                                norm.bias, to_weight.place.gradient,
                                                to_bias.place.gradient, accumulate, want_out)
                 : kernels::rms_norm_backward(grad, grad_sum, x, rstd, norm.weight,
                                              to_weight.place.gradient, accumulate, want_out);
  return {made.x, made.out, weight ? to_weight.close() : at::Tensor(),
          bias ? to_bias.close() : at::Tensor()};
}

at::Tensor plain_norm(const at::Tensor& x, const Norm& norm) {
  if (norm.layer)
    return at::layer_norm(x, norm.weight.sizes(), norm.weight,
                          norm.bias.defined() ? std::optional(norm.bias) : std::nullopt, norm.eps);
  return at::rms_norm(x, norm.weight.sizes(), norm.weight, norm.eps);
}

// --- public functions ---

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return add_rms_norm(x, {}, weight, eps).out;
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      double eps) {
  return add_layer_norm(x, {}, weight, bias, eps).out;
}

NormedSum add_rms_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                       double eps) {
  return add_norm(x, residual, {.weight = weight, .eps = eps});
}

NormedSum add_layer_norm(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight,
                         const at::Tensor& bias, double eps) {
  return add_norm(x, residual, {.weight = weight, .bias = bias, .eps = eps, .layer = true});
}

}  // namespace fsdp::nn
