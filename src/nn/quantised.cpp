// Linears whose frozen weights are stored in few bits. Each product restores its weight first,
// which costs a pass over it; a restored weight is freed before the next one is made.
#include "fsdp/nn/quantised.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/modules.h"
#include "kernels/quantised.h"
#include "nn/products.h"
#include "shard/compute_type.h"

namespace fsdp::nn {
namespace {

// Inputs: x, then the biases. Saved: the weights, as bytes.
struct QuantisedNode : Node {
  Quant quant = Quant::kNone;
  std::vector<Target> biases;
  std::vector<int64_t> sizes, widths;  // of x; of the weights

  std::string name() const override { return "fsdp::quantised_linears"; }

  Tensors backward(const Tensors& gradients) override {
    Tensors result(1 + biases.size());
    const at::Tensor grad = as_rows(gradients[0]);
    std::vector<const Target*> to_biases(biases.size(), nullptr);
    for (size_t i = 0; i < biases.size(); ++i)
      if (wants(1 + i)) to_biases[i] = &biases[i];
    if (std::any_of(to_biases.begin(), to_biases.end(), [](auto* one) { return one; })) {
      Tensors made = bias_gradients(grad, to_biases, widths);
      std::move(made.begin(), made.end(), result.begin() + 1);
    }
    if (!wants(0)) return result;
    at::Tensor sum;
    int64_t first = 0;
    for (const at::Tensor& bytes : saved()) {
      const at::Tensor weight = kernels::dequantise(bytes, quant, grad.scalar_type());
      const at::Tensor part = grad.narrow(-1, first, weight.size(0));
      if (sum.defined())
        sum.addmm_(part, weight);
      else
        sum = at::mm(part, weight);
      first += weight.size(0);
    }
    result[0] = sum.view(sizes);
    return result;
  }
};

at::Tensor forward_products(const at::Tensor& x, const Tensors& weights, const Tensors& biases,
                            Quant quant, const std::vector<int64_t>& widths) {
  const int64_t width = std::accumulate(widths.begin(), widths.end(), int64_t{0});
  const at::Tensor out = at::empty({x.size(0), width}, x.options());
  int64_t first = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor weight = kernels::dequantise(weights[i], quant, x.scalar_type());
    at::Tensor part = out.narrow(-1, first, widths[i]);
    if (biases.empty())
      at::mm_out(part, x, weight.t());
    else
      at::addmm_out(part, biases[i], x, weight.t());
    first += widths[i];
  }
  return out;
}

std::string why_not_quantised(const std::string& name, const torch::nn::LinearImpl& linear,
                              const QuantPolicy& policy) {
  const int64_t in = linear.options.in_features();
  if (policy.where && !policy.where(name)) return "excluded by name";
  if (!dynamic_cast<const LinearImpl*>(&linear)) return "it is a torch::nn::Linear";
  if (in % kernels::quantised::kBlock != 0) return formatted("its {} inputs aren't a multiple of 64", in);
  return "";
}

}  // namespace

at::Tensor quantised_linears(const at::Tensor& given, const std::vector<at::Tensor>& weights,
                             const std::vector<at::Tensor>& biases, Quant quant) {
  if (weights.empty() || (!biases.empty() && biases.size() != weights.size()))
    throw Error(formatted("quantised_linears was called with {} weights and {} biases.",
                          weights.size(), biases.size()),
                "pass at least one weight, and one bias per weight or none.");
  at::Tensor x = given;
  if (const auto type = shard::compute_type_of(weights[0]))
    x = x.to(*type);
  else if (!biases.empty())
    x = like_weight(x, biases[0]);
  x = x.contiguous();
  const std::vector<int64_t> widths = widths_of(weights, WeightLayout::kOutIn);
  at::Tensor out;
  {
    Unrecorded unrecorded;
    out = forward_products(as_rows(x), weights, biases, quant, widths);
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = out.size(-1);
    shard::ViewsOnly views;
    out = out.view(sizes);
  }
  Tensors inputs{x};
  inputs.insert(inputs.end(), biases.begin(), biases.end());
  if (auto node = record<QuantisedNode>(inputs)) {
    node->quant = quant;
    for (const at::Tensor& bias : biases) node->biases.emplace_back(bias);
    node->sizes = x.sizes().vec();
    node->widths = widths;
    node->save(node->will_want(0) ? weights : Tensors());
    node->returns(out);
  }
  return out;
}

std::vector<QuantisedLinear> quantise_linears(torch::nn::Module& module,
                                              const QuantPolicy& policy) {
  std::vector<QuantisedLinear> linears;
  const auto visit = [&](const std::string& name, torch::nn::Module& one) {
    auto* linear = one.as<torch::nn::LinearImpl>();
    if (!linear) return;
    linears.push_back({name, why_not_quantised(name, *linear, policy)});
    if (linears.back().why_not.empty()) one.as<LinearImpl>()->quantise(policy.quant);
  };
  visit("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    visit(item.key(), *item.value());
  if (std::none_of(linears.begin(), linears.end(),
                   [](const QuantisedLinear& one) { return one.why_not.empty(); }))
    throw Error("quantise_linears() found no linear to quantise.",
                "build the model from fsdp::nn::Linear with multiples of 64 inputs.");
  return linears;
}

std::function<std::optional<checkpoint::MadeOfRows>(const std::string& name)> quantised_rows(
    const torch::nn::Module& module) {
  std::map<std::string, checkpoint::MadeOfRows> rows;  // by parameter
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    const auto* linear = item.value()->as<LinearImpl>();
    if (!linear || linear->quant() == Quant::kNone) continue;
    rows[item.key() + ".weight"] = {
        linear->options.in_features(),
        [quant = linear->quant()](const at::Tensor& of) { return kernels::quantise(of, quant); }};
  }
  return [rows = std::move(rows)](const std::string& name) {
    const auto found = rows.find(name);
    return found == rows.end() ? std::nullopt : std::optional(found->second);
  };
}

}  // namespace fsdp::nn
