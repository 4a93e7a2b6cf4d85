#include "kernels/groups.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "base/format.h"
#include "fsdp/error.h"
#include "kernels/operators.h"

namespace fsdp::kernels {
namespace {

using at::Tensor;

void check_groups(const Tensor& rows, const Tensor& weight, const Tensor& ends, int64_t columns) {
  const bool fits = rows.dim() == 2 && weight.dim() == 3 && rows.size(1) == columns &&
                    ends.dim() == 1 && ends.size(0) == weight.size(0) &&
                    ends.scalar_type() == at::kInt;
  if (!fits)
    throw Error(
        formatted("{} groups of rows with {} columns don't fit {} matrices.", ends.numel(),
                  rows.dim() == 2 ? rows.size(1) : -1, weight.dim() == 3 ? weight.size(0) : -1),
        "see kernels/groups.h.");
}

// Whether LibTorch has one kernel for all groups, which needs rows at multiples of 16 bytes.
bool in_one_kernel(const Tensor& x, int64_t in, int64_t out) {
  return x.is_cuda() && x.scalar_type() == at::kBFloat16 && in % 8 == 0 && out % 8 == 0;
}

// Calls `visit` with each group's number, first row and number of rows.
template <typename Visit>
void for_each_group(const Tensor& ends, Visit visit) {
  const Tensor host = ends.cpu();
  const int32_t* end = host.const_data_ptr<int32_t>();
  for (int64_t group = 0, first = 0; group < host.numel(); first = end[group++])
    visit(group, first, end[group] - first);
}

Tensor grouped_mm_kernel(const Tensor& x, const Tensor& weight, const Tensor& ends, bool backward) {
  check_groups(x, weight, ends, weight.size(backward ? 1 : 2));
  const Tensor matrices = backward ? weight : weight.transpose(1, 2);
  if (in_one_kernel(x, matrices.size(1), matrices.size(2)))
    return at::_grouped_mm(x, matrices, ends);
  Tensor out = at::empty({x.size(0), matrices.size(2)}, x.options());
  for_each_group(ends, [&](int64_t group, int64_t first, int64_t count) {
    if (count == 0) return;
    Tensor part = out.narrow(0, first, count);
    at::mm_out(part, x.narrow(0, first, count), matrices.select(0, group));
  });
  return out;
}

Tensor grouped_mm_meta(const Tensor& x, const Tensor& weight, const Tensor& ends, bool backward) {
  check_groups(x, weight, ends, weight.size(backward ? 1 : 2));
  return at::empty({x.size(0), weight.size(backward ? 2 : 1)}, x.options());
}

void write_product(const Tensor& target, const Tensor& product, bool accumulate) {
  if (accumulate)
    target.add_(product);
  else
    target.copy_(product);
}

void grouped_mm_into_kernel(const Tensor& target, const Tensor& grad, const Tensor& x,
                            const Tensor& ends, bool accumulate) {
  check_groups(grad, target, ends, target.size(1));
  check_groups(x, target, ends, target.size(2));
  if (in_one_kernel(x, x.size(1), grad.size(1)))
    return write_product(target, at::_grouped_mm(grad.t(), x, ends), accumulate);
  const bool direct = target.scalar_type() == x.scalar_type();
  for_each_group(ends, [&](int64_t group, int64_t first, int64_t count) {
    Tensor part = target.select(0, group);
    const Tensor left = grad.narrow(0, first, count).t(), right = x.narrow(0, first, count);
    if (direct && accumulate)
      at::addmm_out(part, part, left, right);
    else if (direct)
      at::mm_out(part, left, right);
    else
      write_product(part, at::mm(left, right), accumulate);
  });
}

void grouped_mm_into_meta(const Tensor& target, const Tensor& grad, const Tensor& x,
                          const Tensor& ends, bool) {
  check_groups(grad, target, ends, target.size(1));
  check_groups(x, target, ends, target.size(2));
  if (x.scalar_type() == at::kBFloat16)  // a GPU's product of all groups, before it is added
    at::empty(target.sizes(), x.options());
}

}  // namespace

Tensor grouped_mm(const Tensor& x, const Tensor& weight, const Tensor& ends, bool backward) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const Tensor&, const Tensor&, bool)>("fsdp::grouped_mm");
  const OperatorCall call(x);
  return op.call(x, weight, ends, backward);
}

void grouped_mm_into(const Tensor& target, const Tensor& grad, const Tensor& x, const Tensor& ends,
                     bool accumulate) {
  static const auto op =
      find_operator<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool)>(
          "fsdp::grouped_mm_into");
  const OperatorCall call(x);
  op.call(target, grad, x, ends, accumulate);
  target.unsafeGetTensorImpl()->bump_version();
}

TORCH_LIBRARY_FRAGMENT(fsdp, m) {
  m.def("grouped_mm(Tensor x, Tensor weight, Tensor ends, bool backward) -> Tensor");
  m.def(
      "grouped_mm_into(Tensor(a!) target, Tensor grad, Tensor x, Tensor ends, bool accumulate)"
      " -> ()");
}

TORCH_LIBRARY_IMPL(fsdp, Autograd, m) {
  for (const char* name : {"grouped_mm", "grouped_mm_into"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(fsdp, CPU, m) {
  m.impl("grouped_mm", grouped_mm_kernel);
  m.impl("grouped_mm_into", grouped_mm_into_kernel);
}

TORCH_LIBRARY_IMPL(fsdp, CUDA, m) {
  m.impl("grouped_mm", grouped_mm_kernel);
  m.impl("grouped_mm_into", grouped_mm_into_kernel);
}

TORCH_LIBRARY_IMPL(fsdp, Meta, m) {
  m.impl("grouped_mm", grouped_mm_meta);
  m.impl("grouped_mm_into", grouped_mm_into_meta);
}

}  // namespace fsdp::kernels
