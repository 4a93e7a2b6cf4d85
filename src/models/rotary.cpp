// Rotary positions, computed in float32 whatever the model's dtype.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
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
                           const std::optional<RopeScaling>& scaling, double linear) {
  at::Tensor frequencies = frequencies_of(head_dim, base, device);
  if (scaling) frequencies = scaled(frequencies, *scaling);
  return tables_of(tokens, linear == 1 ? frequencies : frequencies / linear);
}

RotaryTables rotary_tables(int64_t tokens, int64_t head_dim, double base, at::Device device,
                           const Yarn& scaling) {
  const auto width = static_cast<double>(head_dim);
  // The index of the frequency that turns so often in the original context.
  const auto index = [&](double turns) {
    const auto context = static_cast<double>(scaling.original_max_position_embeddings);
    return width * std::log(context / (turns * 2 * std::numbers::pi)) / (2 * std::log(base));
  };
  double first = index(scaling.beta_fast), last = index(scaling.beta_slow);
  if (scaling.truncate) first = std::floor(first), last = std::ceil(last);
  first = std::max(first, 0.0);
  last = std::min(last, width - 1);
  if (first == last) last += 0.001;
  const at::Tensor kept = frequencies_of(head_dim, base, device);
  const at::Tensor slow =
      ((at::arange(head_dim / 2, kept.options()) - first) / (last - first)).clamp(0, 1);
  RotaryTables tables = tables_of(tokens, kept / scaling.factor * slow + kept * (1 - slow));
  const double height =
      scaling.attention_factor > 0 ? scaling.attention_factor : 0.1 * std::log(scaling.factor) + 1;
  return {tables.cos * height, tables.sin * height};
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
