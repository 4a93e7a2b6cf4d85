// Which linears compute in fp8.
#include "fsdp/nn/fp8.h"

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/modules.h"

namespace fsdp::nn {
namespace {

std::string why_not(const std::string& name, const LinearImpl& linear, const Fp8Policy& policy) {
  const int64_t out = linear.weight.size(0), in = linear.weight.size(1);
  if (policy.where && !policy.where(name)) return "excluded by name";
  if (in % 16 != 0 || out % 16 != 0)
    return formatted("its sizes, {} x {}, aren't multiples of 16", out, in);
  if (in < policy.least || out < policy.least)
    return formatted("{} x {} is less than {} wide", out, in, policy.least);
  return "";
}

}  // namespace

std::vector<Fp8Linear> convert_to_fp8(torch::nn::Module& module, const Fp8Policy& policy) {
  if (policy.recipe == Fp8::kNone)
    throw Error("convert_to_fp8() was called without a recipe.",
                "set Fp8Policy::recipe to kTensorwise, kRowwise or kRowwiseBf16Grad.");
  std::vector<Fp8Linear> linears;
  const auto visit = [&](const std::string& name, torch::nn::Module& one) {
    auto* linear = one.as<LinearImpl>();
    if (!linear) return;
    linears.push_back({name, why_not(name, *linear, policy)});
    if (linears.back().why_not.empty()) linear->fp8 = policy.recipe;
  };
  visit("", module);
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    visit(item.key(), *item.value());
  if (linears.empty())
    throw Error("convert_to_fp8() found no fsdp::nn::Linear.",
                "build the model from fsdp::nn::Linear, which takes torch's options.");
  return linears;
}

}  // namespace fsdp::nn
