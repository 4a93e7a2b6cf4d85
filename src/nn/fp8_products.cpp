#include "nn/fp8_products.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/mul.h>

#include <algorithm>

#include "nn/known_amax.h"

namespace fsdp::nn {
namespace {

using kernels::fp8::Bytes;
using kernels::fp8::quantise;
using kernels::fp8::Scaling;

// One matrix, so that its factors don't depend on whether weights are adjacent.
at::Tensor as_one(const Tensors& parts) {
  at::Tensor whole = joined(parts);
  return whole.defined() ? whole : at::cat(parts, 0);
}

Bytes rows_of(const Bytes& all, int64_t first, int64_t count) {
  const bool one = all.factors.numel() == 1;
  return {all.data.narrow(0, first, count),
          one ? all.factors : all.factors.narrow(0, first, count)};
}

}  // namespace

Scaling scaling_of(Fp8 fp8) {
  return fp8 == Fp8::kTensorwise ? Scaling::kTensorwise : Scaling::kRowwise;
}

Fp8 usable(Fp8 fp8, const at::Tensor& x, const Tensors& weights, WeightLayout layout) {
  if (fp8 == Fp8::kNone || layout != WeightLayout::kOutIn) return Fp8::kNone;
  const at::ScalarType type = x.scalar_type();
  const bool known = type == at::kBFloat16 || type == at::kHalf || type == at::kFloat;
  const int64_t width = x.size(-1);
  const bool fits = known && width > 0 && kernels::fp8::fits(x.numel() / width, width) &&
                    std::all_of(weights.begin(), weights.end(), [](const at::Tensor& weight) {
                      return kernels::fp8::fits(weight.size(0), weight.size(1));
                    });
  return fits ? fp8 : Fp8::kNone;
}

at::Tensor products_as(Fp8 fp8, const at::Tensor& x, const Tensors& weights, const Tensors& biases,
                       WeightLayout layout, Fp8Kept& kept) {
  if (fp8 == Fp8::kNone) return products(x, weights, biases, layout);
  const auto of_x = quantise(x, scaling_of(fp8), {.rows = true, .columns = kept.wants_columns});
  kept.columns = of_x.columns;
  return fp8_products(fp8, of_x.rows, weights, biases, x.scalar_type(), kept);
}

at::Tensor fp8_products(Fp8 fp8, const Bytes& x, const Tensors& weights, const Tensors& biases,
                        at::ScalarType type, Fp8Kept& kept) {
  const Bytes weight = quantise(as_one(weights), scaling_of(fp8), {.rows = true}).rows;
  kept.weight_factors = weight.factors;
  // A copy: beside a sharded parameter, bytes would be cast to its dtype.
  return kernels::fp8::product(x, weight, biases.empty() ? at::Tensor() : at::cat(biases, 0), type,
                               /*fast=*/true);
}

ProductsBackward::ProductsBackward(Fp8 fp8, const at::Tensor& gradient, bool to_x, bool to_weights)
    : fp8_(fp8), grad_(as_rows(gradient)) {
  const at::Tensor amax = KnownAmax::of_thread().find(gradient, fp8 == Fp8::kTensorwise);
  to_weights = to_weights && quantises_gradients(fp8);
  if (fp8 == Fp8::kNone || (!to_x && !to_weights)) return;
  const auto none = at::Tensor();
  bytes_ = amax.defined()
               ? kernels::fp8::cast(grad_, {to_x ? amax : none, to_weights ? amax : none})
               : quantise(grad_, scaling_of(fp8), {.rows = to_x, .columns = to_weights});
}

at::Tensor ProductsBackward::to_x(const Tensors& weights, WeightLayout layout,
                                  const at::Tensor& weight_factors) const {
  if (fp8_ == Fp8::kNone) return products_backward(grad_, weights, layout);
  // Tensorwise the columns have the factor of the rows. It is that of a largest magnitude of 448,
  // the range's end, times itself.
  const at::Tensor all = as_one(weights);
  const Bytes weight =
      fp8_ == Fp8::kTensorwise
          ? kernels::fp8::cast(all, {.columns = at::mul(weight_factors, 448)}).columns
          : quantise(all, scaling_of(fp8_), {.columns = true}).columns;
  return kernels::fp8::product(bytes_.rows, weight, {}, grad_.scalar_type(), /*fast=*/false);
}

Tensors ProductsBackward::to_weights(const at::Tensor& x, const Bytes& columns,
                                     const std::vector<const Target*>& targets,
                                     const std::vector<int64_t>& widths,
                                     WeightLayout layout) const {
  if (!quantises_gradients(fp8_)) return weight_gradients(grad_, x, targets, widths, layout);
  const Bytes of_x =
      columns.data.defined() ? columns : quantise(x, scaling_of(fp8_), {.columns = true}).columns;
  return write_weight_gradients(
      targets, widths, [&](const shard::GradientPlace& place, int64_t first, int64_t count) {
        kernels::fp8::product_into(place.gradient, rows_of(bytes_.columns, first, count), of_x,
                                   place.accumulate);
      });
}

}  // namespace fsdp::nn
