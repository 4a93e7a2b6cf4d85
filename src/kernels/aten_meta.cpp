// Meta kernels for the LibTorch operators that have none in its C++ library: they compute sizes,
// not values. A dry run uses them.
//
// Results have the sizes, types and layouts of the CPU's kernels, because plans are compared with
// what a CPU allocates; a GPU differs only slightly.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>
#include <torch/library.h>

#include <array>
#include <tuple>

namespace fsdp::kernels {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Optional = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Mask = std::array<bool, 3>;

Tensor fresh(const Tensor& like, IntArrayRef sizes) {
  return at::empty(sizes, like.options());
}

Tensor fresh_if(bool wanted, const Tensor& like, IntArrayRef sizes) {
  return wanted ? fresh(like, sizes) : Tensor();
}

// Options for a statistic over many numbers.
at::TensorOptions wide(const Tensor& like) {
  return like.options().dtype(like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// --- rows by index ---

Tensor index_select(const Tensor& self, int64_t dim, const Tensor& index) {
  std::vector<int64_t> sizes = self.sizes().vec();
  if (!sizes.empty()) sizes[dim < 0 ? dim + self.dim() : dim] = index.numel();
  return fresh(self, sizes);
}

Tensor embedding_dense_backward(const Tensor& grad, const Tensor&, int64_t rows, int64_t, bool) {
  return fresh(grad, {rows, grad.size(-1)});
}

// --- convolutions ---

int64_t at_or(IntArrayRef values, int64_t i, int64_t otherwise) {
  return values.empty() ? otherwise : values[values.size() == 1 ? 0 : i];
}

Tensor convolution(const Tensor& input, const Tensor& weight, const Optional&, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  int64_t spatial = weight.dim() - 2, lead = input.dim() - spatial - 1;  // 1 with a batch
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes[lead] = transposed ? weight.size(1) * groups : weight.size(0);
  for (int64_t i = 0; i < spatial; ++i) {
    int64_t& size = sizes[lead + 1 + i];
    int64_t reach = at_or(dilation, i, 1) * (weight.size(2 + i) - 1);
    int64_t pad = 2 * at_or(padding, i, 0), step = at_or(stride, i, 1);
    size = transposed ? (size - 1) * step - pad + reach + at_or(output_padding, i, 0) + 1
                      : (size + pad - reach - 1) / step + 1;
  }
  auto format = input.suggest_memory_format();
  if (weight.suggest_memory_format() != at::MemoryFormat::Contiguous)
    format = weight.suggest_memory_format();
  return at::empty(sizes, input.options(), format);
}

Three convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                           at::OptionalIntArrayRef bias, IntArrayRef, IntArrayRef, IntArrayRef,
                           bool, IntArrayRef, int64_t, Mask mask) {
  Tensor to_input = mask[0] ? at::empty_like(input) : Tensor();
  Tensor to_weight = mask[1] ? at::empty_like(weight) : Tensor();
  return {to_input, to_weight, mask[2] && bias ? fresh(grad, *bias) : Tensor()};
}

Tensor adaptive_avg_pool2d(const Tensor& input, IntArrayRef size) {
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes[sizes.size() - 2] = size[0];
  sizes[sizes.size() - 1] = size[1];
  return at::empty(sizes, input.options(), input.suggest_memory_format());
}

Tensor adaptive_avg_pool2d_backward(const Tensor&, const Tensor& input) {
  return at::empty_like(input);
}

// --- norms ---

Three batch_norm(const Tensor& input, const Optional&, const Optional&, const Optional&,
                 const Optional&, bool training, double, double) {
  std::vector<int64_t> channels = {training ? input.size(1) : 0};
  return {at::empty_like(input), at::empty(channels, wide(input)),
          at::empty(channels, wide(input))};
}

Three batch_norm_backward(const Tensor&, const Tensor& input, const Optional& weight,
                          const Optional&, const Optional&, const Optional&, const Optional&, bool,
                          double, Mask mask) {
  const Tensor& like = weight && weight->defined() ? *weight : input;
  std::vector<int64_t> channels = {input.size(1)};
  return {mask[0] ? at::empty_like(input) : Tensor(), fresh_if(mask[1], like, channels),
          fresh_if(mask[2], like, channels)};
}

Three native_layer_norm(const Tensor& input, IntArrayRef shape, const Optional&, const Optional&,
                        double) {
  std::vector<int64_t> rows = input.sizes().vec();
  for (size_t i = rows.size() - shape.size(); i < rows.size(); ++i) rows[i] = 1;
  return {fresh(input, input.sizes()), at::empty(rows, wide(input)), at::empty(rows, wide(input))};
}

Three native_layer_norm_backward(const Tensor&, const Tensor& input, IntArrayRef, const Tensor&,
                                 const Tensor&, const Optional& weight, const Optional& bias,
                                 Mask mask) {
  auto of = [&](bool wanted, const Optional& parameter) {
    return wanted && parameter && parameter->defined() ? at::empty_like(*parameter) : Tensor();
  };
  return {mask[0] ? fresh(input, input.sizes()) : Tensor(), of(mask[1], weight), of(mask[2], bias)};
}

Three group_norm(const Tensor& input, const Optional&, const Optional&, int64_t batch, int64_t,
                 int64_t, int64_t groups, double) {
  return {at::empty_like(input), at::empty({batch, groups}, wide(input)),
          at::empty({batch, groups}, wide(input))};
}

Three group_norm_backward(const Tensor&, const Tensor& input, const Tensor&, const Tensor&,
                          const Optional& weight, int64_t, int64_t channels, int64_t, int64_t,
                          Mask mask) {
  const Tensor& like = weight && weight->defined() ? *weight : input;
  return {mask[0] ? at::empty_like(input) : Tensor(), fresh_if(mask[1], like, {channels}),
          fresh_if(mask[2], like, {channels})};
}

// --- attention ---

std::tuple<Tensor, Tensor> flash_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                           double, bool, const Optional&, std::optional<double>) {
  int64_t batch = q.size(0), heads = q.size(1), tokens = q.size(2);
  Tensor out = fresh(q, {batch, tokens, heads, v.size(3)}).transpose(1, 2);
  return {out, at::empty({batch, tokens, heads}, wide(q)).transpose(1, 2)};
}

Three flash_attention_backward(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor&, const Tensor&, double, bool, const Optional&,
                               std::optional<double>) {
  auto like = [](const Tensor& x) {
    return fresh(x, {x.size(0), x.size(2), x.size(1), x.size(3)}).transpose(1, 2);
  };
  return {like(q), like(k), like(v)};
}

// --- the rest ---

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  std::vector<int64_t> sizes = at::infer_size(condition.sizes(), self.sizes());
  return at::empty(at::infer_size(sizes, other.sizes()),
                   (self.dim() == 0 ? other : self).options().dtype(at::result_type(self, other)));
}

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double, std::optional<bool>) {
  return {at::empty_like(input), at::empty_like(input, input.options().dtype(at::kBool))};
}

Tensor dropout_backward(const Tensor& grad, const Tensor&, double) {
  return at::empty_like(grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("index_select", index_select);
  m.impl("embedding_dense_backward", embedding_dense_backward);
  m.impl("convolution", convolution);
  m.impl("convolution_backward", convolution_backward);
  m.impl("_adaptive_avg_pool2d", adaptive_avg_pool2d);
  m.impl("_adaptive_avg_pool2d_backward", adaptive_avg_pool2d_backward);
  m.impl("native_batch_norm", batch_norm);
  m.impl("native_batch_norm_backward", batch_norm_backward);
  m.impl("native_layer_norm", native_layer_norm);
  m.impl("native_layer_norm_backward", native_layer_norm_backward);
  m.impl("native_group_norm", group_norm);
  m.impl("native_group_norm_backward", group_norm_backward);
  m.impl("_scaled_dot_product_flash_attention_for_cpu", flash_attention);
  m.impl("_scaled_dot_product_flash_attention_for_cpu_backward", flash_attention_backward);
  m.impl("where.self", where);
  m.impl("native_dropout", dropout);
  m.impl("native_dropout_backward", dropout_backward);
}

}  // namespace fsdp::kernels
