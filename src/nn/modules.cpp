// The modules: torch::nn modules whose forward calls the fused layers.
#include "fsdp/nn/modules.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include "fsdp/error.h"
#include "fsdp/init_parameters.h"
#include "fsdp/nn/functional.h"
#include "fsdp/nn/lora.h"
#include "kernels/quantised.h"
#include "shard/deferred.h"
#include "shard/tensor_access.h"

namespace fsdp::nn {
namespace {

// torch's clone() creates torch's own type; its members are moved into one of ours.
template <typename Theirs, typename Ours>
std::shared_ptr<torch::nn::Module> cloned(const Ours& module,
                                          const std::optional<at::Device>& device) {
  auto theirs = std::dynamic_pointer_cast<Theirs>(module.Theirs::clone(device));
  auto ours = std::make_shared<Ours>(module.options);
  static_cast<Theirs&>(*ours) = *theirs;
  return ours;
}

}  // namespace

AdapterMatrixImpl::AdapterMatrixImpl(const at::Tensor& given) {
  weight = register_parameter("weight", given);
}

// A starts as torch starts a linear's weight.
void Adaptable::add_adapter(int64_t rank, double scale, double dropout) {
  scale_ = scale;
  dropout_ = dropout;
  const Product of = product();
  const bool bytes = !at::isFloatingType(of.weight.scalar_type());
  const at::TensorOptions type =
      bytes ? of.weight.options().dtype(at::kFloat) : of.weight.options();
  const auto matrix = [&](const char* name, int64_t rows, int64_t columns) {
    at::Tensor values = at::empty({rows, columns}, type);
    init_tensor_(values, adapter_start(name, values.sizes()));
    return of.module.register_module(name, std::make_shared<AdapterMatrixImpl>(values));
  };
  lora_A = matrix("lora_A", rank, of.in);
  lora_B = matrix("lora_B", of.out, rank);
}

at::Tensor Adaptable::adapter(const at::Tensor& x) const {
  const bool drops = dropout_ > 0 && lora_A->is_training();
  const at::Tensor input = drops ? at::dropout(x, dropout_, /*train=*/true) : x;
  return nn::linear(nn::linear(input, lora_A->weight) * scale_, lora_B->weight);
}

void Adaptable::add_adapter_to(Adaptable& copy) const {
  if (has_adapter()) copy.add_adapter(lora_A->weight.size(0), scale_, dropout_);
}

Adaptable::Product LinearImpl::product() {
  return {*this, weight, options.in_features(), options.out_features()};
}

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  at::Tensor out;
  if (quant_ == Quant::kNone)
    out = linear(x, weight, bias, WeightLayout::kOutIn, fp8);
  else
    out = quantised_linears(x, {weight},
                            bias.defined() ? std::vector{bias} : std::vector<at::Tensor>(), quant_);
  return uses_adapter() ? out + adapter(x) : out;
}

void LinearImpl::quantise(Quant quant) {
  if (quant_ != Quant::kNone)
    throw Error("a linear that is quantised already can't be quantised.",
                "call quantise() once, on the numbers.");
  if (shard::tag_of(weight) && !shard::deferred::is_deferred(weight))
    throw Error("a sharded linear can't be quantised.", "call quantise() before fully_shard().");
  torch::NoGradGuard no_grad;
  const at::Tensor numbers = weight.is_cuda() ? weight.cpu() : weight.detach();
  weight = parameters_["weight"] = kernels::quantise(numbers, quant).to(weight.device());
  quant_ = quant;
}

std::shared_ptr<torch::nn::Module> LinearImpl::clone(
    const std::optional<at::Device>& device) const {
  if (!has_adapter() && quant_ == Quant::kNone) {
    auto copy = cloned<torch::nn::LinearImpl>(*this, device);
    copy->as<LinearImpl>()->fp8 = fp8;
    return copy;
  }
  torch::NoGradGuard no_grad;
  auto copy = std::make_shared<LinearImpl>(options);
  copy->fp8 = fp8;
  add_adapter_to(*copy);
  copy->quant_ = quant_;
  const auto from = named_parameters();
  for (const auto& item : copy->named_parameters()) {
    const at::Tensor& own = from[item.key()];
    item.value().requires_grad_(own.requires_grad());  // first: bytes can't require it
    item.value().set_data(own.to(device.value_or(own.device()), own.scalar_type(),
                                 /*non_blocking=*/false, /*copy=*/true));
  }
  copy->train(is_training());
  return copy;
}

at::Tensor LayerNormImpl::forward(const at::Tensor& x) {
  bool ours = weight.defined() && options.normalized_shape().size() == 1;
  if (!ours) return torch::nn::LayerNormImpl::forward(x);
  return layer_norm(x, weight, bias, options.eps());
}

std::shared_ptr<torch::nn::Module> LayerNormImpl::clone(
    const std::optional<at::Device>& device) const {
  return cloned<torch::nn::LayerNormImpl>(*this, device);
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& ids) {
  bool ours = !options.max_norm() && !options.scale_grad_by_freq() && !options.sparse();
  if (!ours) return torch::nn::EmbeddingImpl::forward(ids);
  return embedding(ids, weight, options.padding_idx());
}

std::shared_ptr<torch::nn::Module> EmbeddingImpl::clone(
    const std::optional<at::Device>& device) const {
  return cloned<torch::nn::EmbeddingImpl>(*this, device);
}

RMSNormImpl::RMSNormImpl(int64_t dim, double eps) : dim_(dim), eps_(eps) {
  RMSNormImpl::reset();
}

void RMSNormImpl::reset() {
  weight = register_parameter("weight", at::empty({dim_}));
  reset_parameters();
}

void RMSNormImpl::reset_parameters() {
  torch::nn::init::ones_(weight);
}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  return rms_norm(x, weight, eps_);
}

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << "fsdp::nn::RMSNorm(dim=" << dim_ << ", eps=" << eps_ << ")";
}

}  // namespace fsdp::nn
