// The choice by device, its checks, and the implementation for devices that have no kernel of ours:
// LibTorch's fused operators, in stream order.
#include "kernels/update.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <string>
#include <vector>

#include "fsdp/error.h"

namespace fsdp::kernels {
namespace {

void check(const char* who, const char* what, const at::Tensor& tensor, const at::Tensor& master,
           bool same_dtype = true) {
  if (tensor.defined() && tensor.dim() == 1 && tensor.is_contiguous() &&
      tensor.numel() == master.numel() && tensor.device() == master.device() &&
      (!same_dtype || tensor.scalar_type() == master.scalar_type()))
    return;
  throw Error(std::string(who) + ": " + what + " does not match the master (" +
                  std::to_string(master.numel()) + " elements of " +
                  toString(master.scalar_type()) + " on " + master.device().str() + ").",
              "all tensors of an update are flat, contiguous, on one device and of one length; the "
              "gradient and the states have the master's dtype.");
}

void check(const AdamWTensors& t) {
  check("adamw", "the gradient", t.grad, t.master);
  check("adamw", "exp_avg", t.exp_avg, t.master);
  check("adamw", "exp_avg_sq", t.exp_avg_sq, t.master);
  if (t.low.defined()) check("adamw", "the copy in another dtype", t.low, t.master, false);
}

void check(const SGDTensors& t, const SGDStep& step) {
  check("sgd", "the gradient", t.grad, t.master);
  if (step.momentum != 0) check("sgd", "the momentum buffer", t.momentum_buffer, t.master);
  if (t.low.defined()) check("sgd", "the copy in another dtype", t.low, t.master, false);
}

void check(const char* who, const at::Tensor& tensor) {
  if (at::isFloatingType(tensor.scalar_type()) && tensor.dim() == 1 && tensor.is_contiguous())
    return;
  throw Error(std::string(who) + ": a flat, contiguous, floating-point tensor is needed, not " +
                  toString(tensor.scalar_type()) + " with " + std::to_string(tensor.dim()) +
                  " dimensions.",
              "pass tensor.flatten().");
}

bool on_cpu(const at::Tensor& tensor) {
  return tensor.device().is_cpu();
}

float host_value(const at::Tensor& factor) {
  return factor.defined() ? factor.item<float>() : 1.0f;
}

// One column of a list of tensors, without the undefined ones.
template <typename Tensors>
std::vector<at::Tensor> column(std::span<const Tensors> tensors, at::Tensor Tensors::*which) {
  std::vector<at::Tensor> list;
  list.reserve(tensors.size());
  for (const auto& t : tensors)
    if ((t.*which).defined()) list.push_back(t.*which);
  return list;
}

template <typename Tensors>
void write_low(std::span<const Tensors> tensors) {
  std::vector<at::Tensor> low, master;
  for (const auto& t : tensors) {
    if (!t.low.defined()) continue;
    low.push_back(t.low);
    master.push_back(t.master);
  }
  if (!low.empty()) at::_foreach_copy_(low, master);
}

// The fused operators divide by their scale.
std::optional<at::Tensor> scale_from(const at::Tensor& factor) {
  return factor.defined() ? std::optional(factor.reciprocal()) : std::nullopt;
}

// Norms of rows: short enough that float32 sums keep their digits, long enough that what is left to
// add in float64 is next to nothing.
constexpr int64_t kRow = 8192;

at::Tensor row_norms(const at::Tensor& tensor, double p) {  // [rows + 1] float64
  const int64_t rows = tensor.numel() / kRow, whole = rows * kRow;
  const auto type = tensor.scalar_type() == at::ScalarType::Double ? at::ScalarType::Double
                                                                   : at::ScalarType::Float;
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
  return norms.to(at::ScalarType::Double);
}

}  // namespace

void adamw(std::span<const AdamWTensors> tensors, const AdamWStep& step, const at::Tensor& factor) {
  for (const auto& t : tensors) check(t);
  if (tensors.empty()) return;
  if (!on_cpu(tensors.front().master)) return aten::adamw(tensors, step, factor);
  const float scale = host_value(factor);
  for (const auto& t : tensors) cpu::adamw(t, step, scale);
}

void sgd(std::span<const SGDTensors> tensors, const SGDStep& step, const at::Tensor& factor) {
  for (const auto& t : tensors) check(t, step);
  if (tensors.empty()) return;
  if (!on_cpu(tensors.front().master)) return aten::sgd(tensors, step, factor);
  const float scale = host_value(factor);
  for (const auto& t : tensors) cpu::sgd(t, step, scale);
}

at::Tensor sum_of_powers(const at::Tensor& tensor, double p) {
  check("sum_of_powers", tensor);
  if (!(p > 0))
    throw Error("sum_of_powers: p = " + std::to_string(p) + " is not above 0.",
                "norms are taken with p = 2, 1, infinity, or any other positive number.");
  if (!on_cpu(tensor)) return aten::sum_of_powers(tensor, p);
  return at::scalar_tensor(cpu::sum_of_powers(tensor, p), at::ScalarType::Double);
}

at::Tensor count_not_finite(const at::Tensor& tensor) {
  check("count_not_finite", tensor);
  if (!on_cpu(tensor)) return aten::count_not_finite(tensor);
  return at::scalar_tensor(static_cast<double>(cpu::count_not_finite(tensor)),
                           at::ScalarType::Double);
}

namespace aten {

void adamw(std::span<const AdamWTensors> tensors, const AdamWStep& step, const at::Tensor& factor) {
  auto master = column(tensors, &AdamWTensors::master);
  // Filled on the device: a copy from the host would have to wait for it.
  const auto steps = at::full({}, static_cast<double>(step.step),
                              master.front().options().dtype(at::ScalarType::Float));
  at::_fused_adamw_(
      master, column(tensors, &AdamWTensors::grad), column(tensors, &AdamWTensors::exp_avg),
      column(tensors, &AdamWTensors::exp_avg_sq), {}, std::vector<at::Tensor>(master.size(), steps),
      step.lr, step.beta1, step.beta2, step.weight_decay, step.eps, /*amsgrad=*/false,
      step.maximize, scale_from(factor));
  write_low(tensors);
}

void sgd(std::span<const SGDTensors> tensors, const SGDStep& step, const at::Tensor& factor) {
  std::vector<at::Tensor> buffers;
  if (step.momentum != 0) buffers = column(tensors, &SGDTensors::momentum_buffer);
  at::_fused_sgd_(column(tensors, &SGDTensors::master), column(tensors, &SGDTensors::grad), buffers,
                  step.weight_decay, step.momentum, step.lr, step.dampening, step.nesterov,
                  step.maximize, step.first, scale_from(factor));
  write_low(tensors);
}

at::Tensor sum_of_powers(const at::Tensor& tensor, double p) {
  auto norms = row_norms(tensor, p);
  return std::isinf(p) ? norms.max() : norms.pow(p).sum();
}

at::Tensor count_not_finite(const at::Tensor& tensor) {
  // The largest magnitude of a row is finite if and only if the row is; this reads the tensor once
  // and writes next to nothing, where isfinite() would write several temporaries of its size.
  auto norms = row_norms(tensor, std::numeric_limits<double>::infinity());
  return at::isfinite(norms).logical_not_().sum(at::ScalarType::Double);
}

}  // namespace aten
}  // namespace fsdp::kernels
