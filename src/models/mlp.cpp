// The MLP of bench/peers/peer_fsdp2.py. It computes as little per parameter as a model can, so that
// the cost of sharding shows.
#include "fsdp/models/mlp.h"

#include <ATen/ops/mse_loss.h>
#include <torch/nn/modules/activation.h>

#include <cmath>

#include "fsdp/error.h"
#include "fsdp/nn/modules.h"

namespace fsdp::models {

MLPConfig checked(MLPConfig config) {
  if (config.width < 1 || config.layers < 1)
    throw Error("an MLP's width and layers must be positive.", "set each to 1 or more.");
  return config;
}

int64_t parameter_count(const MLPConfig& config) {
  return config.layers * (config.width + 1) * config.width;
}

MLPImpl::MLPImpl(const MLPConfig& config) : config_(checked(config)) {
  for (int64_t i = 0; i < config_.layers; ++i) {
    if (i > 0) layers->push_back(torch::nn::ReLU());
    layers->push_back(nn::Linear(config_.width, config_.width));
  }
  register_module("layers", layers);
}

at::Tensor MLPImpl::forward(const at::Tensor& x, const at::Tensor& targets) {
  return at::mse_loss(predict(x).to(at::kFloat), targets.to(at::kFloat));
}

at::Tensor MLPImpl::predict(const at::Tensor& x) {
  return layers->forward(x);
}

double MLPImpl::flops_per_row() const {
  auto width = static_cast<double>(config_.width);
  return 6 * static_cast<double>(config_.layers) * width * width;
}

// torch::nn::Linear's own, which the constructor leaves as they are.
Distribution MLPImpl::initial(const std::string&, at::IntArrayRef) const {
  const double bound = 1 / std::sqrt(static_cast<double>(config_.width));
  return Distribution::uniform(-bound, bound);
}

}  // namespace fsdp::models
