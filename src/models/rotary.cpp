// Rotary positions, computed in float32 whatever the model's dtype.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <numbers>

#include "fsdp/models/decoder.h"
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

at::Tensor frequencies_of(int64_t head_dim, double base, at::Device device) {
  auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  return 1.0 / at::pow(base, at::arange(0, head_dim, 2, options) / head_dim);
}

RotaryTables tables_of(int64_t tokens, const at::Tensor& frequencies) {
  at::Tensor half = at::outer(at::arange(tokens, frequencies.options()), frequencies);
  at::Tensor angles = at::cat({half, half}, -1);
  return {angles.cos(), angles.sin()};
}

}  // namespace

RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device,
                           const std::optional<RopeScaling>& scaling) {
  at::Tensor frequencies = frequencies_of(head_dim, base, device);
  if (scaling) frequencies = scaled(frequencies, *scaling);
  return tables_of(tokens, frequencies);
}

RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device,
                           const LongRope& scaling, bool longer) {
  const std::vector<double>& factors = longer ? scaling.long_factors : scaling.short_factors;
  at::Tensor slower = at::tensor(factors, at::kFloat).to(device);
  RotaryTables tables = tables_of(tokens, frequencies_of(head_dim, base, device) / slower);
  const auto context = static_cast<double>(scaling.original_max_position_embeddings);
  const double ratio = static_cast<double>(scaling.max_position_embeddings) / context;
  const double height = ratio > 1 ? std::sqrt(1 + std::log(ratio) / std::log(context)) : 1;
  return {tables.cos * height, tables.sin * height};
}

RotaryTables unrotated_tables(int64_t tokens, int64_t head_dim, at::Device device) {
  auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  return {at::ones({tokens, head_dim}, options), at::zeros({tokens, head_dim}, options)};
}

at::Tensor rotate(const at::Tensor& x, const RotaryTables& tables) {
  return nn::rope(x.transpose(1, 2), tables.cos, tables.sin).transpose(1, 2);
}

}  // namespace fsdp::models
