#include "kernels/split.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>

#include <string>

#include "base/format.h"
#include "fsdp/error.h"
#include "kernels/cuda_updates.h"

namespace fsdp::kernels {
namespace {

using at::ScalarType;

void check_plane(const char* what, const at::Tensor& tensor, ScalarType type,
                 const at::Tensor& like) {
  if (tensor.defined() && tensor.scalar_type() == type && tensor.dim() == 1 &&
      tensor.is_contiguous() && tensor.numel() == like.numel() && tensor.device() == like.device())
    return;
  throw Error(formatted("a split number's {} must be a flat, contiguous tensor of {}, as long as "
                        "its halves and on their device.",
                        what, toString(type)),
              "see kernels/split.h.");
}

}  // namespace

void split_float(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest) {
  check_plane("whole", whole, ScalarType::Float, whole);
  check_plane("high half", high, ScalarType::BFloat16, whole);
  check_plane("rest", rest, ScalarType::Short, whole);
  if (whole.device().is_cpu()) return cpu::split_float(whole, high, rest);
  if (whole.is_meta()) return;
  if (const CudaUpdates* table = cuda_updates(whole.device()))
    return table->split_float(whole, high, rest);
  aten::split_float(whole, high, rest);
}

at::Tensor join_float(const at::Tensor& high, const at::Tensor& rest) {
  check_plane("high half", high, ScalarType::BFloat16, high);
  check_plane("rest", rest, ScalarType::Short, high);
  if (const CudaUpdates* table = cuda_updates(high.device())) return table->join_float(high, rest);
  if (!high.device().is_cpu() && !high.is_meta()) return aten::join_float(high, rest);
  auto whole = at::empty({high.numel()}, high.options().dtype(ScalarType::Float));
  if (!whole.is_meta()) cpu::join_float(high, rest, whole);
  return whole;
}

namespace aten {

// In signed 32-bit integers: shifts keep the sign, and no sum overflows.
void split_float(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest) {
  auto bits = at::where(at::isnan(whole), 0x7fc00000, whole.view(ScalarType::Int));
  auto upper = bits.add(0x8000).__rshift__(16);
  rest.copy_(bits - upper.__lshift__(16));
  high.view(ScalarType::Short).copy_(upper);
}

at::Tensor join_float(const at::Tensor& high, const at::Tensor& rest) {
  auto upper = high.view(ScalarType::Short).to(ScalarType::Int).__lshift__(16);
  return upper.add_(rest).view(ScalarType::Float);
}

}  // namespace aten
}  // namespace fsdp::kernels
