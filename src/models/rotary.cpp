// Rotary positions, computed in float32 whatever the model's dtype.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>

#include <numbers>

#include "fsdp/models/llama.h"
#include "fsdp/nn/functional.h"

namespace fsdp::models {
namespace {

at::Tensor scaled(const at::Tensor& frequencies, const RopeScaling& scaling) {
  auto context = static_cast<double>(scaling.original_max_position_embeddings);
  at::Tensor waves = 2 * std::numbers::pi / frequencies;  // in tokens
  at::Tensor kept = (context / waves - scaling.low_freq_factor) /
                    (scaling.high_freq_factor - scaling.low_freq_factor);
  kept = kept.clamp(0, 1);
  return (1 - kept) * frequencies / scaling.factor + kept * frequencies;
}

}  // namespace

RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device,
                           const std::optional<RopeScaling>& scaling) {
  auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  at::Tensor frequencies = 1.0 / at::pow(base, at::arange(0, head_dim, 2, options) / head_dim);
  if (scaling) frequencies = scaled(frequencies, *scaling);
  at::Tensor half = at::outer(at::arange(tokens, options), frequencies);
  at::Tensor angles = at::cat({half, half}, -1);
  return {angles.cos(), angles.sin()};
}

at::Tensor rotate(const at::Tensor& x, const RotaryTables& tables) {
  return nn::rope(x.transpose(1, 2), tables.cos, tables.sin).transpose(1, 2);
}

}  // namespace fsdp::models
