// A norm and the linears that follow it, as one node. It saves the sum that was normalised and one
// or two numbers per row. In backward, the pass that computes the gradient of the sum also returns
// the normalised rows, which the gradients of the weights need.
#include <ATen/ops/cat.h>

#include <algorithm>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/functional.h"
#include "nn/fp8_products.h"
#include "nn/norm.h"

namespace fsdp::nn {
namespace {

using kernels::fp8::Bytes;
using kernels::fp8::Source;

// Whether the norm's output is quantised as it is computed, and never stored.
bool is_fused(Fp8 fp8, const Norm& norm) {
  return fp8 != Fp8::kNone && !norm.layer;
}

// Inputs: x, residual, the norm's weight and bias, then the weights, then the biases. Outputs: the
// products, and the sum if there is a residual. Saved: the sum (or x), mean, rstd, the norm's
// weight and bias, the largest magnitude of the normalised rows and the weights' factors (fp8), and
// the weights if the gradient passes through them.
struct NormLinearsNode : Node {
  Norm norm;  // without its tensors
  WeightLayout layout = WeightLayout::kOutIn;
  Fp8 fp8 = Fp8::kNone;
  Target norm_weight, norm_bias;
  std::vector<Target> weights, biases;
  std::vector<int64_t> widths;

  std::string name() const override {
    return norm.layer ? "fsdp::layer_norm_linears" : "fsdp::norm_linears";
  }

  // Null for targets whose gradients aren't needed. The first one is input `first` of the node.
  std::vector<const Target*> wanted(const std::vector<Target>& targets, size_t first) const {
    std::vector<const Target*> some(targets.size(), nullptr);
    for (size_t i = 0; i < targets.size(); ++i)
      if (wants(first + i)) some[i] = &targets[i];
    return some;
  }

  // The columns of the norm's output in fp8; undefined where the output itself is needed.
  Bytes columns_of(const at::Tensor& x, const at::Tensor& rstd, const Norm& whole,
                   const at::Tensor& amax) const {
    if (!is_fused(fp8, whole) || !quantises_gradients(fp8)) return {};
    const Source source = Source::normed(as_rows(x), rstd, whole.weight);
    if (fp8 == Fp8::kTensorwise) return kernels::fp8::cast(source, {.columns = amax}).columns;
    return kernels::fp8::quantise(source, scaling_of(fp8), {.columns = true}).columns;
  }

  Tensors backward(const Tensors& gradients) override {
    size_t first_bias = 4 + weights.size();
    Tensors result(first_bias + biases.size());
    at::Tensor grad_sum = gradients.size() > 1 ? gradients[1] : at::Tensor();
    if (!gradients[0].defined()) {
      result[0] = result[1] = grad_sum;
      return result;
    }
    if (grad_sum.defined()) grad_sum = grad_sum.contiguous();
    at::Tensor grad = as_rows(gradients[0]);
    Tensors kept = saved();
    const at::Tensor &x = kept[0], &mean = kept[1], &rstd = kept[2];
    Norm whole{kept[3], kept[4], norm.eps, norm.layer};
    std::vector<const Target*> to_weights = wanted(weights, 4),
                               to_biases = wanted(biases, first_bias);
    bool some_weight = std::any_of(to_weights.begin(), to_weights.end(), [](auto* t) { return t; });
    bool some_bias = std::any_of(to_biases.begin(), to_biases.end(), [](auto* t) { return t; });

    if (some_bias) {
      Tensors made = bias_gradients(grad, to_biases, widths);
      std::move(made.begin(), made.end(), result.begin() + static_cast<int64_t>(first_bias));
    }
    at::Tensor rows;  // the input of the linears
    const bool to_x = wants(0) || wants(1) || wants(2) || wants(3);
    const ProductsBackward back_of(fp8, gradients[0], to_x, some_weight);
    const Bytes columns = some_weight ? columns_of(x, rstd, whole, kept[5]) : Bytes();
    const bool want_rows = some_weight && !columns.data.defined();
    if (to_x) {
      Tensors matrices(kept.begin() + 7, kept.end());
      at::Tensor grad_rows = back_of.to_x(matrices, layout, kept[6]).view(x.sizes());
      NormBackward back = norm_backward(grad_rows, grad_sum, x, mean, rstd, whole,
                                        wants(2) ? &norm_weight : nullptr,
                                        wants(3) ? &norm_bias : nullptr, want_rows);
      if (wants(0)) result[0] = back.x;
      if (wants(1)) result[1] = back.x;
      result[2] = back.weight;
      result[3] = back.bias;
      rows = back.out;
    } else if (want_rows) {
      rows = normalised(x, {}, whole).out;
    }
    if (some_weight) {
      if (want_rows) rows = as_rows(rows);
      Tensors made = back_of.to_weights(rows, columns, to_weights, widths, layout);
      std::move(made.begin(), made.end(), result.begin() + 4);
    }
    return result;
  }
};

NormedLinears fused_norm_linears(const at::Tensor& given, const at::Tensor& added, const Norm& norm,
                                 const Tensors& weights, const Tensors& biases, WeightLayout layout,
                                 Fp8 wished) {
  at::Tensor x = given.contiguous();
  const Fp8 fp8 = usable(wished, x, weights, layout);
  at::Tensor residual = added.defined() ? added.contiguous() : added;
  std::vector<int64_t> sizes = x.sizes().vec();
  kernels::Normed normed;
  at::Tensor out, amax;
  Fp8Kept made;
  {
    Unrecorded unrecorded;
    if (is_fused(fp8, norm)) {
      const auto bytes =
          kernels::fp8::rms_norm(x, residual, norm.weight, norm.eps, scaling_of(fp8));
      normed = {.sum = bytes.sum, .rstd = bytes.rstd};
      amax = bytes.amax;
      out = fp8_products(fp8, bytes.rows, weights, biases, x.scalar_type(), made);
    } else {
      normed = normalised(x, residual, norm);
      out = products_as(fp8, as_rows(normed.out), weights, biases, layout, made);
    }
    sizes.back() = out.size(-1);
    shard::ViewsOnly views;
    out = out.view(sizes);
  }
  normed.out.reset();
  Tensors inputs{x, residual, norm.weight, norm.bias};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  inputs.insert(inputs.end(), biases.begin(), biases.end());
  if (auto node = record<NormLinearsNode>(inputs)) {
    node->norm = {.eps = norm.eps, .layer = norm.layer};
    node->layout = layout;
    node->fp8 = fp8;
    node->norm_weight = Target(norm.weight);
    node->norm_bias = Target(norm.bias);
    for (const at::Tensor& weight : weights) node->weights.emplace_back(weight);
    for (const at::Tensor& bias : biases) node->biases.emplace_back(bias);
    node->widths = widths_of(weights, layout);
    Tensors kept{residual.defined() ? normed.sum.tensor_data() : x,
                 normed.mean,
                 normed.rstd,
                 norm.weight,
                 norm.bias,
                 fp8 == Fp8::kTensorwise ? amax : at::Tensor(),
                 made.weight_factors};
    if (node->will_want(0) || node->will_want(1) || node->will_want(2) || node->will_want(3))
      kept.insert(kept.end(), weights.begin(), weights.end());
    node->save(kept);
    node->returns(out);
    if (residual.defined()) node->returns(normed.sum);
  }
  return {out, residual.defined() ? normed.sum : given};
}

NormedLinears normed_linears(const at::Tensor& x, const at::Tensor& residual, const Norm& norm,
                             const Tensors& weights, const Tensors& biases, WeightLayout layout,
                             Fp8 fp8) {
  if (weights.empty() || (!biases.empty() && biases.size() != weights.size()))
    throw Error(formatted("norm_linears was called with {} weights and {} biases.", weights.size(),
                          biases.size()),
                "pass at least one weight, and one bias per weight or none.");
  Tensors all{x, norm.weight};
  for (const at::Tensor& tensor : {residual, norm.bias})
    if (tensor.defined()) all.push_back(tensor);
  all.insert(all.end(), weights.begin(), weights.end());
  all.insert(all.end(), biases.begin(), biases.end());
  bool alike = has_kernels(x) && norm.weight.dim() == 1 &&
               (!residual.defined() || residual.sizes() == x.sizes()) &&
               std::all_of(all.begin(), all.end(), [&](const at::Tensor& tensor) {
                 return tensor.defined() && tensor.scalar_type() == x.scalar_type();
               });
  if (alike) return fused_norm_linears(x, residual, norm, weights, biases, layout, fp8);

  NormedSum normed = norm.layer ? add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
                                : add_rms_norm(x, residual, norm.weight, norm.eps);
  Tensors outs;
  for (size_t i = 0; i < weights.size(); ++i)
    outs.push_back(
        linear(normed.out, weights[i], biases.empty() ? at::Tensor() : biases[i], layout, fp8));
  return {outs.size() == 1 ? outs[0] : at::cat(outs, -1), normed.sum};
}

}  // namespace

NormedLinears norm_linears(const at::Tensor& x, const at::Tensor& residual,
                           const at::Tensor& norm_weight, double eps,
                           const std::vector<at::Tensor>& weights,
                           const std::vector<at::Tensor>& biases, Fp8 fp8) {
  Norm norm{.weight = norm_weight, .eps = eps};
  return normed_linears(x, residual, norm, weights, biases, WeightLayout::kOutIn, fp8);
}

NormedLinears layer_norm_linears(const at::Tensor& x, const at::Tensor& residual,
                                 const at::Tensor& norm_weight, const at::Tensor& norm_bias,
                                 double eps, const std::vector<at::Tensor>& weights,
                                 const std::vector<at::Tensor>& biases, WeightLayout layout,
                                 Fp8 fp8) {
  Norm norm{.weight = norm_weight, .bias = norm_bias, .eps = eps, .layer = true};
  return normed_linears(x, residual, norm, weights, biases, layout, fp8);
}

}  // namespace fsdp::nn
