#include "nn/products.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include <numeric>

#include "kernels/ops.h"
#include "shard/dry_run.h"

namespace fsdp::nn {
namespace {

at::Tensor in_out(const at::Tensor& weight, WeightLayout layout) {
  shard::ViewsOnly views;
  return layout == WeightLayout::kOutIn ? weight.t() : weight;
}

// Visits the columns of each weight in a tensor of all widths.
template <typename Visit>
void for_each_part(const at::Tensor& all, const std::vector<int64_t>& widths, Visit visit) {
  int64_t at = 0;
  for (size_t i = 0; i < widths.size(); ++i) {
    visit(i, all.narrow(-1, at, widths[i]));
    at += widths[i];
  }
}

// One place for all gradients, if they are adjacent in memory and all accumulate or none does.
shard::GradientPlace joined_place(const std::vector<Opened>& opened) {
  Tensors parts;
  for (const Opened& one : opened) {
    if (one.place.accumulate != opened.front().place.accumulate) return {};
    parts.push_back(one.place.gradient);
  }
  return {joined(parts), opened.front().place.accumulate};
}

bool all_wanted(const std::vector<const Target*>& targets) {
  for (const Target* target : targets)
    if (!target) return false;
  return !targets.empty();
}

// Not is_alias_of, which reads data pointers: a sharded unit has none.
bool in_one_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return in_one_storage(a, b) && a.storage_offset() == b.storage_offset();
}

std::vector<Opened> open_all(const std::vector<const Target*>& targets) {
  std::vector<Opened> opened(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    opened[i] = targets[i]->open();
    shard::GradientPlace& place = opened[i].place;
    for (size_t j = 0; j < i; ++j)  // a weight given twice: the first writes, the second adds
      if (targets[j] && same_place(opened[j].place.gradient, place.gradient))
        place.accumulate = true;
  }
  return opened;
}

Tensors close_all(const std::vector<const Target*>& targets, std::vector<Opened>& opened) {
  Tensors gradients(targets.size());
  for (size_t i = 0; i < targets.size(); ++i)
    if (targets[i]) gradients[i] = opened[i].close();
  return gradients;
}

void sums_into(const shard::GradientPlace& place, const at::Tensor& grad) {
  at::Tensor out = place.gradient;
  if (place.accumulate)
    out.add_(at::sum(grad, {0}, /*keepdim=*/false, out.scalar_type()));
  else
    at::sum_out(out, grad, {0}, /*keepdim=*/false, out.scalar_type());
}

}  // namespace

at::Tensor joined(const Tensors& parts) {
  const at::Tensor& first = parts.front();
  if (parts.size() == 1) return first;
  int64_t rows = 0, end = first.storage_offset();
  for (const at::Tensor& part : parts) {
    bool follows = part.is_contiguous() && part.dim() == first.dim() &&
                   part.sizes().slice(1) == first.sizes().slice(1) &&
                   part.scalar_type() == first.scalar_type() && in_one_storage(part, first) &&
                   part.storage_offset() == end;
    if (!follows) return {};
    rows += part.size(0);
    end += part.numel();
  }
  std::vector<int64_t> sizes = first.sizes().vec();
  sizes[0] = rows;
  shard::ViewsOnly views;
  return first.as_strided(sizes, first.strides(), first.storage_offset());
}

std::vector<int64_t> widths_of(const Tensors& weights, WeightLayout layout) {
  std::vector<int64_t> widths;
  for (const at::Tensor& weight : weights)
    widths.push_back(weight.size(layout == WeightLayout::kOutIn ? 0 : 1));
  return widths;
}

at::Tensor products(const at::Tensor& x, const Tensors& weights, const Tensors& biases,
                    WeightLayout layout) {
  bool rows_join = layout == WeightLayout::kOutIn || weights.size() == 1;
  at::Tensor weight = rows_join ? joined(weights) : at::Tensor();
  at::Tensor bias = biases.empty() ? at::Tensor() : joined(biases);
  if (weight.defined() && biases.empty()) return at::mm(x, in_out(weight, layout));
  if (weight.defined() && bias.defined()) return at::addmm(bias, x, in_out(weight, layout));

  std::vector<int64_t> widths = widths_of(weights, layout);
  int64_t width = std::accumulate(widths.begin(), widths.end(), int64_t{0});
  at::Tensor out = at::empty({x.size(0), width}, x.options());
  for_each_part(out, widths, [&](size_t i, at::Tensor part) {
    if (biases.empty())
      at::mm_out(part, x, in_out(weights[i], layout));
    else
      at::addmm_out(part, biases[i], x, in_out(weights[i], layout));
  });
  return out;
}

at::Tensor products_backward(const at::Tensor& grad, const Tensors& weights, WeightLayout layout) {
  bool rows_join = layout == WeightLayout::kOutIn || weights.size() == 1;
  at::Tensor weight = rows_join ? joined(weights) : at::Tensor();
  if (weight.defined()) return at::mm(grad, in_out(weight, layout).t());
  at::Tensor sum;
  for_each_part(grad, widths_of(weights, layout), [&](size_t i, const at::Tensor& part) {
    at::Tensor transposed = in_out(weights[i], layout).t();
    if (sum.defined())
      sum.addmm_(part, transposed);
    else
      sum = at::mm(part, transposed);
  });
  return sum;
}

Tensors write_weight_gradients(
    const std::vector<const Target*>& targets, const std::vector<int64_t>& widths,
    c10::function_ref<void(const shard::GradientPlace&, int64_t, int64_t)> write) {
  std::vector<Opened> opened = open_all(targets);
  shard::GradientPlace whole;
  if (all_wanted(targets)) whole = joined_place(opened);
  if (whole.gradient.defined()) {
    write(whole, 0, std::accumulate(widths.begin(), widths.end(), int64_t{0}));
  } else {
    int64_t at = 0;
    for (size_t i = 0; i < targets.size(); ++i) {
      if (targets[i]) write(opened[i].place, at, widths[i]);
      at += widths[i];
    }
  }
  return close_all(targets, opened);
}

Tensors weight_gradients(const at::Tensor& grad, const at::Tensor& x,
                         const std::vector<const Target*>& targets,
                         const std::vector<int64_t>& widths, WeightLayout layout) {
  if (layout == WeightLayout::kOutIn)
    return write_weight_gradients(
        targets, widths, [&](const shard::GradientPlace& place, int64_t first, int64_t count) {
          product_into(place, grad.narrow(-1, first, count).t(), x);
        });
  std::vector<Opened> opened = open_all(targets);
  for_each_part(grad, widths, [&](size_t i, const at::Tensor& part) {
    if (targets[i]) product_into(opened[i].place, x.t(), part);
  });
  return close_all(targets, opened);
}

Tensors bias_gradients(const at::Tensor& grad, const std::vector<const Target*>& targets,
                       const std::vector<int64_t>& widths) {
  std::vector<Opened> opened = open_all(targets);
  shard::GradientPlace whole;
  if (all_wanted(targets)) whole = joined_place(opened);
  if (whole.gradient.defined()) {
    sums_into(whole, grad);
  } else {
    for_each_part(grad, widths, [&](size_t i, const at::Tensor& part) {
      if (targets[i]) sums_into(opened[i].place, part);
    });
  }
  return close_all(targets, opened);
}

void product_into(const shard::GradientPlace& place, const at::Tensor& a, const at::Tensor& b) {
  at::Tensor out = place.gradient;
  at::ScalarType type = a.scalar_type();
  bool half = type == at::kBFloat16 || type == at::kHalf;
  if (a.is_meta() && half && out.scalar_type() == at::kFloat && shard::dry_run::as_gpu()) {
    // A GPU writes float32 directly; no operator on the meta device does.
    shard::dry_run::count_product(
        {2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(1)),
         static_cast<double>(a.nbytes() + b.nbytes() + out.nbytes())});
  } else if (out.scalar_type() == type) {
    if (place.accumulate)
      at::addmm_out(out, out, a, b);
    else
      at::mm_out(out, a, b);
  } else if (a.is_cuda() && half && out.scalar_type() == at::kFloat) {
    if (place.accumulate)
      at::addmm_out(out, out, a, b, at::kFloat);
    else
      at::mm_out(out, a, b, at::kFloat);
  } else if (has_kernels(out) && half) {
    kernels::scale_into(out, at::mm(a, b), {}, place.accumulate);
  } else if (place.accumulate) {
    out.add_(at::mm(a, b));
  } else {
    out.copy_(at::mm(a, b));
  }
}

}  // namespace fsdp::nn
