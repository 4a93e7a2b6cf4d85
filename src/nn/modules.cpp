// The modules: torch::nn modules whose forward calls the fused layers.
#include "fsdp/nn/modules.h"

#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include "fsdp/nn/functional.h"

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

at::Tensor LinearImpl::forward(const at::Tensor& x) {
  return linear(x, weight, bias);
}

std::shared_ptr<torch::nn::Module> LinearImpl::clone(
    const std::optional<at::Device>& device) const {
  return cloned<torch::nn::LinearImpl>(*this, device);
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
