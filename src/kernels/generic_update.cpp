// Updates and sums with LibTorch's operators, in stream order, for devices without our kernels and
// for what our CUDA kernels don't cover.
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "kernels/split.h"
#include "kernels/update.h"

namespace fsdp::kernels::aten {
namespace {

using at::ScalarType;

// --- tensors in the form that LibTorch's operators take ---

// Joins split masters and converts gradients to the master's dtype; write_back() splits the masters
// again.
template <typename Tensors>
std::vector<Tensors> plain(std::span<const Tensors> tensors) {
  std::vector<Tensors> list(tensors.begin(), tensors.end());
  for (auto& t : list) {
    if (t.rest.defined()) t.master = join_float(t.low, t.rest);
    t.grad = t.grad.narrow(0, t.grad_begin, t.master.numel()).to(t.master.scalar_type());
    t.grad_begin = 0;
  }
  return list;
}

template <typename Tensors>
void write_back(const std::vector<Tensors>& list) {
  std::vector<at::Tensor> low, master;
  for (const auto& t : list) {
    if (t.rest.defined()) {
      split_float(t.master, t.low, t.rest);
    } else if (t.low.defined()) {
      low.push_back(t.low);
      master.push_back(t.master);
    }
  }
  if (!low.empty()) at::_foreach_copy_(low, master);
}

// One column of a list of tensors.
template <typename Tensors>
std::vector<at::Tensor> column(const std::vector<Tensors>& tensors, at::Tensor Tensors::*which) {
  std::vector<at::Tensor> list;
  list.reserve(tensors.size());
  for (const auto& t : tensors) list.push_back(t.*which);
  return list;
}

bool alike(const AdamWStep& a, const AdamWStep& b) {
  return a.lr == b.lr && a.weight_decay == b.weight_decay && a.step == b.step &&
         a.beta1 == b.beta1 && a.beta2 == b.beta2 && a.eps == b.eps && a.maximize == b.maximize;
}

bool alike(const SGDStep& a, const SGDStep& b) {
  return a.lr == b.lr && a.weight_decay == b.weight_decay && a.first == b.first &&
         a.momentum == b.momentum && a.dampening == b.dampening && a.nesterov == b.nesterov &&
         a.maximize == b.maximize;
}

// Calls body(tensors, step) for tensors with one step and one dtype: one launch on a GPU.
template <typename Tensors, typename Step, typename Body>
void batches(const std::vector<Tensors>& list, std::span<const Step> steps, const Body& body) {
  std::vector<bool> done(list.size());
  for (size_t i = 0; i < list.size(); ++i) done[i] = list[i].master.numel() == 0;
  const auto step_of = [&](size_t i) -> const Step& { return steps[steps.size() > 1 ? i : 0]; };
  for (size_t i = 0; i < list.size(); ++i) {
    if (done[i]) continue;
    std::vector<Tensors> batch;
    for (size_t j = i; j < list.size(); ++j) {
      if (done[j] || list[j].master.scalar_type() != list[i].master.scalar_type() ||
          !alike(step_of(i), step_of(j)))
        continue;
      batch.push_back(list[j]);
      done[j] = true;
    }
    body(batch, step_of(i));
  }
}

// The fused operators divide by their scale, and do nothing if `found_inf` is 1.
struct Scale {
  explicit Scale(const at::Tensor& factor) {
    if (!factor.defined()) return;
    grad_scale = factor.reciprocal();
    found_inf = at::isfinite(factor).logical_not_().to(ScalarType::Float);
  }
  std::optional<at::Tensor> grad_scale, found_inf;
};

// --- numbers on the device: plain operators, since fused ones take weight decay by value ---

struct Numbers {
  at::Tensor lr, weight_decay, count;  // one float64 each
};

// Adds 1 to the counts of the tensors, unless the update is skipped.
template <typename Tensors>
void advance(std::span<const Tensors> tensors, const at::Tensor& counts, const at::Tensor& go) {
  std::set<int64_t> which;
  for (const auto& t : tensors) which.insert(t.count);
  for (const int64_t i : which) counts.select(0, i).add_(go.to(ScalarType::Double));
}

template <typename Tensors>
Numbers numbers_of(const Tensors& t, const DeviceNumbers& numbers) {
  const auto rates = numbers.rates.select(0, t.group);
  return {rates.select(0, 0), rates.select(0, 1), numbers.counts.select(0, t.count)};
}

at::Tensor whether_finite(const at::Tensor& factor, const at::Tensor& like) {
  return factor.defined() ? at::isfinite(factor)
                          : at::ones({}, like.options().dtype(ScalarType::Bool));
}

// In the dtype that is computed in: float32, or float64 for float64.
at::Tensor widened(const at::Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Double ? tensor : tensor.to(ScalarType::Float);
}

at::Tensor scaled(const at::Tensor& grad, const at::Tensor& factor, bool maximize) {
  const auto g = factor.defined() ? widened(grad) * factor : widened(grad);
  return maximize ? -g : g;
}

void write(const at::Tensor& tensor, const at::Tensor& value, const at::Tensor& go) {
  tensor.copy_(at::where(go, value.to(tensor.scalar_type()), tensor));
}

// --- norms of rows ---

// Short enough for float32 sums to keep their precision, long enough that little is left to add in
// float64.
constexpr int64_t kRow = 8192;

at::Tensor row_norms(const at::Tensor& tensor, double p) {  // [rows + 1] float64
  const int64_t rows = tensor.numel() / kRow, whole = rows * kRow;
  const auto type =
      tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  auto norms = at::zeros({rows + 1}, tensor.options().dtype(type));
  if (rows > 0) {
    auto out = norms.narrow(0, 0, rows);
    at::linalg_vector_norm_out(out, tensor.narrow(0, 0, whole).view({rows, kRow}), p, {1}, false,
                               type);
  }
  if (whole < tensor.numel()) {
    auto out = norms.select(0, rows);
    at::linalg_vector_norm_out(out, tensor.narrow(0, whole, tensor.numel() - whole), p, {0}, false,
                               type);
  }
  return norms.to(ScalarType::Double);
}

}  // namespace

void adamw(std::span<const AdamWTensors> tensors, std::span<const AdamWStep> steps,
           const at::Tensor& factor) {
  const auto list = plain(tensors);
  const Scale scale(factor);
  batches(list, steps, [&](const std::vector<AdamWTensors>& batch, const AdamWStep& step) {
    auto master = column(batch, &AdamWTensors::master);
    // Filled on the device: a copy from the host would wait for it.
    const auto count = at::full({}, static_cast<double>(step.step),
                                master.front().options().dtype(ScalarType::Float));
    at::_fused_adamw_(
        master, column(batch, &AdamWTensors::grad), column(batch, &AdamWTensors::exp_avg),
        column(batch, &AdamWTensors::exp_avg_sq), {}, std::vector<at::Tensor>(batch.size(), count),
        step.lr, step.beta1, step.beta2, step.weight_decay, step.eps, /*amsgrad=*/false,
        step.maximize, scale.grad_scale, scale.found_inf);
  });
  write_back(list);
}

void sgd(std::span<const SGDTensors> tensors, std::span<const SGDStep> steps,
         const at::Tensor& factor) {
  const auto list = plain(tensors);
  const Scale scale(factor);
  batches(list, steps, [&](const std::vector<SGDTensors>& batch, const SGDStep& step) {
    std::vector<at::Tensor> buffers;
    if (step.momentum != 0) buffers = column(batch, &SGDTensors::momentum_buffer);
    at::_fused_sgd_(column(batch, &SGDTensors::master), column(batch, &SGDTensors::grad), buffers,
                    step.weight_decay, step.momentum, step.lr, step.dampening, step.nesterov,
                    step.maximize, step.first, scale.grad_scale, scale.found_inf);
  });
  write_back(list);
}

void adamw(std::span<const AdamWTensors> tensors, const AdamWStep& step,
           const DeviceNumbers& numbers, const at::Tensor& factor) {
  const auto list = plain(tensors);
  const auto go = whether_finite(factor, numbers.counts);
  advance(tensors, numbers.counts, go);
  for (const auto& t : list) {
    const auto [lr, weight_decay, count] = numbers_of(t, numbers);
    const auto g = scaled(t.grad, factor, step.maximize);
    const auto m = widened(t.exp_avg) * step.beta1 + g * (1 - step.beta1);
    const auto v = widened(t.exp_avg_sq) * step.beta2 + g * g * (1 - step.beta2);
    const auto size = lr / (1 - at::pow(step.beta1, count));
    const auto correction = (1 - at::pow(step.beta2, count)).rsqrt();
    const auto w =
        widened(t.master) * (1 - lr * weight_decay) - m * size / (v.sqrt() * correction + step.eps);
    write(t.exp_avg, m, go);
    write(t.exp_avg_sq, v, go);
    write(t.master, w, go);
  }
  write_back(list);
}

void sgd(std::span<const SGDTensors> tensors, const SGDStep& step, const DeviceNumbers& numbers,
         const at::Tensor& factor) {
  const auto list = plain(tensors);
  const auto go = whether_finite(factor, numbers.counts);
  advance(tensors, numbers.counts, go);
  for (const auto& t : list) {
    const auto [lr, weight_decay, count] = numbers_of(t, numbers);
    const auto w = widened(t.master);
    auto g = scaled(t.grad, factor, step.maximize) + w * weight_decay;
    if (step.momentum != 0) {
      const auto later = widened(t.momentum_buffer) * step.momentum + g * (1 - step.dampening);
      const auto m = at::where(count == 1, g, later);
      write(t.momentum_buffer, m, go);
      g = step.nesterov ? g + m * step.momentum : m;
    }
    write(t.master, w - g * lr, go);
  }
  write_back(list);
}

at::Tensor sum_of_powers(const at::Tensor& tensor, double p) {
  auto norms = row_norms(tensor, p);
  return std::isinf(p) ? norms.max() : norms.pow(p).sum();
}

Clipping clip_factor(const at::Tensor& total, double max_norm) {
  auto norm = total.sqrt().to(ScalarType::Float);
  auto factor = at::full({}, max_norm, norm.options()) / (norm + 1e-6);
  // The difference is 0, or NaN if the norm isn't finite.
  return {norm, factor.clamp_max(1.0) + (norm - norm)};
}

at::Tensor count_not_finite(const at::Tensor& tensor) {
  // A row's largest magnitude is finite exactly if the row is. This reads the tensor once and
  // writes almost nothing; isfinite() would write several temporaries of its size.
  auto norms = row_norms(tensor, std::numeric_limits<double>::infinity());
  return at::isfinite(norms).logical_not_().sum(ScalarType::Double);
}

}  // namespace fsdp::kernels::aten
