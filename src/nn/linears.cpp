// Several linears of one input, as one node.
#include <ATen/ops/cat.h>

#include <algorithm>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/functional.h"
#include "nn/fp8_products.h"

namespace fsdp::nn {
namespace {

// Inputs: x, the weights, the biases. Saved: x (in fp8: its columns and their factors) if the
// gradient of a weight is needed, the weights' factors in fp8, and the weights if the gradient of x
// is needed.
struct LinearsNode : Node {
  Fp8 fp8 = Fp8::kNone;
  std::vector<Target> weights, biases;
  std::vector<int64_t> sizes, widths;  // of x; of the weights

  std::string name() const override { return "fsdp::linears"; }

  std::vector<const Target*> needed(const std::vector<Target>& targets, size_t first) const {
    std::vector<const Target*> some(targets.size(), nullptr);
    for (size_t i = 0; i < targets.size(); ++i)
      if (wants(first + i)) some[i] = &targets[i];
    return some;
  }

  Tensors backward(const Tensors& gradients) override {
    const size_t first_bias = 1 + weights.size();
    Tensors result(first_bias + biases.size());
    at::Tensor grad = as_rows(gradients[0]);
    Tensors kept = saved();
    auto put = [&](Tensors made, size_t first) {
      std::move(made.begin(), made.end(), result.begin() + static_cast<int64_t>(first));
    };
    auto some = [](const std::vector<const Target*>& targets) {
      return std::any_of(targets.begin(), targets.end(), [](const Target* one) { return one; });
    };
    std::vector<const Target*> to_weights = needed(weights, 1),
                               to_biases = needed(biases, first_bias);
    if (some(to_biases)) put(bias_gradients(grad, to_biases, widths), first_bias);
    const ProductsBackward back_of(fp8, gradients[0], wants(0), some(to_weights));
    if (wants(0))
      result[0] = back_of.to_x(Tensors(kept.begin() + 4, kept.end()), WeightLayout::kOutIn, kept[3])
                      .view(sizes);
    const at::Tensor rows = kept[0].defined() ? as_rows(kept[0]) : at::Tensor();
    if (some(to_weights))
      put(back_of.to_weights(rows, {kept[1], kept[2]}, to_weights, widths, WeightLayout::kOutIn),
          1);
    return result;
  }
};

}  // namespace

at::Tensor linears(const at::Tensor& given, const std::vector<at::Tensor>& weights,
                   const std::vector<at::Tensor>& biases, Fp8 wished) {
  if (weights.empty() || (!biases.empty() && biases.size() != weights.size()))
    throw Error(formatted("linears was called with {} weights and {} biases.", weights.size(),
                          biases.size()),
                "pass at least one weight, and one bias per weight or none.");
  Tensors all = weights;
  all.insert(all.end(), biases.begin(), biases.end());
  bool alike = has_kernels(given) && std::all_of(all.begin(), all.end(), [&](const auto& tensor) {
                 return tensor.defined() && tensor.scalar_type() == given.scalar_type();
               });
  if (!alike) {
    Tensors outs;
    for (size_t i = 0; i < weights.size(); ++i)
      outs.push_back(linear(given, weights[i], biases.empty() ? at::Tensor() : biases[i],
                            WeightLayout::kOutIn, wished));
    return outs.size() == 1 ? outs[0] : at::cat(outs, -1);
  }
  at::Tensor x = given.contiguous(), out;
  const Fp8 fp8 = usable(wished, x, weights, WeightLayout::kOutIn);
  Fp8Kept made;
  made.wants_columns = quantises_gradients(fp8) && at::GradMode::is_enabled() &&
                       torch::autograd::any_variable_requires_grad(weights);
  {
    Unrecorded unrecorded;
    out = products_as(fp8, as_rows(x), weights, biases, WeightLayout::kOutIn, made);
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = out.size(-1);
    shard::ViewsOnly views;
    out = out.view(sizes);
  }
  Tensors inputs{x};
  inputs.insert(inputs.end(), all.begin(), all.end());
  if (auto node = record<LinearsNode>(inputs)) {
    for (const at::Tensor& weight : weights) node->weights.emplace_back(weight);
    for (const at::Tensor& bias : biases) node->biases.emplace_back(bias);
    node->fp8 = fp8;
    node->sizes = x.sizes().vec();
    node->widths = widths_of(weights, WeightLayout::kOutIn);
    bool need_x = false;
    for (size_t i = 0; i < weights.size(); ++i) need_x = need_x || node->will_want(1 + i);
    Tensors kept{need_x && !made.wants_columns ? x : at::Tensor(), made.columns.data,
                 made.columns.factors, made.weight_factors};
    if (node->will_want(0)) kept.insert(kept.end(), weights.begin(), weights.end());
    node->save(kept);
    node->returns(out);
  }
  return out;
}

}  // namespace fsdp::nn
