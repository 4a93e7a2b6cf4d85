// Which linears compute in fp8.
#include "fsdp/nn/fp8.h"

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/modules.h"
#include "nn/fp8_products.h"
#include "shard/replaced_linear.h"

namespace fsdp::nn {
namespace {

std::string why_not(const std::string& name, const torch::nn::LinearImpl& linear,
                    const Fp8Policy& policy) {
  const int64_t out = linear.weight.size(0), in = linear.weight.size(1);
  if (policy.where && !policy.where(name)) return "excluded by name";
  if (!at::isFloatingType(linear.weight.scalar_type())) return "its weight is quantised";
  if (in % 16 != 0 || out % 16 != 0)
    return formatted("its sizes, {} x {}, aren't multiples of 16", out, in);
  if (in < policy.least || out < policy.least)
    return formatted("{} x {} is less than {} wide", out, in, policy.least);
  return "";
}

shard::LinearFunction in_fp8(Fp8 recipe) {
  return [recipe](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return linear_in_fp8(x, weight, bias, recipe);
  };
}

}  // namespace

std::vector<Fp8Linear> convert_to_fp8(torch::nn::Module& module, const Fp8Policy& policy) {
  if (policy.recipe == Fp8::kNone)
    throw Error("convert_to_fp8() was called without a recipe.",
                "set Fp8Policy::recipe to kTensorwise, kRowwise or kRowwiseBf16Grad.");
  std::vector<Fp8Linear> linears;
  const auto visit = [&](const std::string& name, torch::nn::Module& one) {
    auto* linear = one.as<torch::nn::LinearImpl>();
    if (!linear) return;
    linears.push_back({name, why_not(name, *linear, policy)});
    std::string& problem = linears.back().why_not;
    if (!problem.empty()) return;
    if (auto* own = dynamic_cast<LinearImpl*>(linear))
      own->fp8 = policy.recipe;
    else if (!shard::replace_linear(linear->weight, in_fp8(policy.recipe)))
      problem = "a torch::nn::Linear is converted after fully_shard(), not before";
  };
  visit("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    visit(item.key(), *item.value());
  if (linears.empty())
    throw Error("convert_to_fp8() found no linear.",
                "build the model from fsdp::nn::Linear or torch::nn::Linear.");
  return linears;
}

}  // namespace fsdp::nn
