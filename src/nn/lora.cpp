// Adapters: which linears have one, and their sum beside fused layers.
#include "fsdp/nn/lora.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "base/format.h"
#include "fsdp/error.h"
#include "shard/deferred.h"
#include "shard/tensor_access.h"

namespace fsdp::nn {
namespace {

constexpr const char* kA = "lora_A";

void check_adapters(const LoRAOptions& options) {
  if (options.rank < 1)
    throw Error(formatted("an adapter can't have rank {}.", options.rank),
                "8 to 64 are usual; the number of trained parameters grows with it.");
  if (!std::isfinite(options.alpha))
    throw Error("the alpha of adapters isn't finite.", "one to two times the rank is usual.");
  if (!(options.dropout >= 0 && options.dropout < 1))
    throw Error(formatted("adapters can't have a dropout of {:f}.", options.dropout),
                "set it to at least 0 and below 1.");
}

using Linears = std::vector<std::pair<std::string, Adaptable*>>;  // by name

void choose(Linears& chosen, const std::string& name, torch::nn::Module& module,
            const LoRAOptions& options) {
  auto* linear = dynamic_cast<Adaptable*>(&module);
  if (!linear && !module.as<torch::nn::LinearImpl>()) return;
  if (options.where && !options.where(name)) return;
  if (!linear)
    throw Error(formatted("\"{}\" is a torch::nn::Linear, which can't have an adapter.", name),
                "make it an fsdp::nn::Linear, which takes the same options, or leave it out of "
                "LoRAOptions::where.");
  const at::Tensor weight = linear->product().weight;
  if (shard::tag_of(weight) && !shard::deferred::is_deferred(weight))
    throw Error(formatted("\"{}\" is sharded already.", name),
                "call add_lora() before fully_shard().");
  if (linear->has_adapter())
    throw Error(formatted("\"{}\" has an adapter already.", name),
                "call add_lora() once per module.");
  chosen.emplace_back(name, linear);
}

// A constructor may call this: the module itself isn't in a shared_ptr then.
Linears linears_to_adapt(torch::nn::Module& module, const LoRAOptions& options) {
  Linears chosen;
  choose(chosen, "", module, options);
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    choose(chosen, item.key(), *item.value(), options);
  return chosen;
}

}  // namespace

double scale_of(const LoRAOptions& options) {
  const auto rank = static_cast<double>(options.rank);
  return options.alpha / (options.rslora ? std::sqrt(rank) : rank);
}

std::function<bool(const std::string& name)> named_linears(const std::vector<std::string>& ends) {
  return [ends](const std::string& name) {
    return std::any_of(ends.begin(), ends.end(), [&](const std::string& end) {
      return name == end || name.ends_with("." + end);
    });
  };
}

std::vector<std::string> add_lora(torch::nn::Module& module, const LoRAOptions& options) {
  check_adapters(options);
  const Linears chosen = linears_to_adapt(module, options);
  if (chosen.empty())
    throw Error("add_lora() found no linear to adapt.",
                "LoRAOptions::where gets names as \"layers.0.self_attn.q_proj\".");
  for (const at::Tensor& parameter : module.parameters()) parameter.requires_grad_(false);
  std::vector<std::string> names;
  for (const auto& [name, linear] : chosen) {
    linear->add_adapter(options.rank, scale_of(options), options.dropout);
    names.push_back(name);
  }
  return names;
}

WithoutAdapters::WithoutAdapters(torch::nn::Module& module) {
  for (const auto& child : module.modules(/*include_self=*/false))
    if (auto linear = std::dynamic_pointer_cast<Adaptable>(child); linear && linear->uses_adapter())
      linears_.push_back(std::move(linear));
  for (const auto& linear : linears_) linear->without_adapter_ = true;
}

WithoutAdapters::~WithoutAdapters() {
  for (const auto& linear : linears_) linear->without_adapter_ = false;
}

bool is_adapter(const std::string& name) {
  return ("." + name).ends_with(".lora_A.weight") || ("." + name).ends_with(".lora_B.weight");
}

// A as the weights of torch's linears: uniform, up to 1 / sqrt(in).
Distribution adapter_start(const std::string& name, at::IntArrayRef sizes) {
  if (name.find(kA) == std::string::npos || sizes.empty() || sizes.back() == 0)
    return Distribution::constant(0);
  const double most = 1 / std::sqrt(static_cast<double>(sizes.back()));
  return Distribution::uniform(-most, most);
}

at::Tensor add_adapters(const at::Tensor& out, const at::Tensor& x,
                        const std::vector<Linear>& linears) {
  std::vector<at::Tensor> parts;
  for (const Linear& linear : linears) {
    if (linear->uses_adapter()) {
      parts.push_back(linear->adapter(x));
      continue;
    }
    std::vector<int64_t> sizes = out.sizes().vec();
    sizes.back() = linear->options.out_features();
    parts.push_back(at::zeros(sizes, out.options()));
  }
  return out + (parts.size() == 1 ? parts[0] : at::cat(parts, -1));
}

}  // namespace fsdp::nn
