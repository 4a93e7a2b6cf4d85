// The operators of quantised.h: schemas, the functions that call them, checks, and the meta device.
#include "kernels/quantised.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "base/format.h"
#include "fsdp/error.h"
#include "kernels/operators.h"

namespace fsdp::kernels {
namespace {

using nn::Quant;

constexpr const char* kQuantHint = "see kernels/quantised.h.";

Quant checked_quant(int64_t quant) {
  const auto found = static_cast<Quant>(quant);
  if (found != Quant::kNf4 && found != Quant::kNf4Double && found != Quant::kInt8)
    throw Error(formatted("{} isn't a way to quantise.", quant), kQuantHint);
  return found;
}

at::Tensor quantise_meta(const at::Tensor& matrix, int64_t quant) {
  return at::empty({matrix.size(0), quantised_bytes(matrix.size(1), checked_quant(quant))},
                   matrix.options().dtype(at::kByte));
}

at::Tensor dequantise_meta(const at::Tensor& bytes, int64_t quant, at::ScalarType type) {
  const quantised::Row row = check_quantised(bytes, quant, type);
  return at::empty({bytes.size(0), row.blocks * quantised::kBlock}, bytes.options().dtype(type));
}

}  // namespace

quantised::Row quantised_row(int64_t columns, Quant quant) {
  checked_quant(static_cast<int64_t>(quant));
  if (columns < 1 || columns % quantised::kBlock != 0)
    throw Error(formatted("a matrix of {} columns can't be quantised.", columns),
                "the columns must be a multiple of 64.");
  return {.blocks = columns / quantised::kBlock,
          .code_bytes = quant == Quant::kInt8 ? quantised::kBlock : quantised::kBlock / 2,
          .doubled = quant == Quant::kNf4Double};
}

int64_t quantised_bytes(int64_t columns, Quant quant) {
  return quantised_row(columns, quant).bytes();
}

int64_t quantised_columns(int64_t bytes, Quant quant) {
  const int64_t blocks = quant == Quant::kInt8        ? bytes / 68
                         : quant == Quant::kNf4Double ? (bytes - 8) / 33
                                                      : bytes / 36;
  if (blocks < 1 || quantised_bytes(blocks * quantised::kBlock, quant) != bytes)
    throw Error(formatted("a row of {} bytes isn't a row of quantised numbers.", bytes),
                kQuantHint);
  return blocks * quantised::kBlock;
}

quantised::Row check_quantised(const at::Tensor& bytes, int64_t quant, at::ScalarType type) {
  if (bytes.dim() != 2 || bytes.scalar_type() != at::kByte || !bytes.is_contiguous())
    throw Error(formatted("quantised numbers must be a contiguous matrix of bytes, not {} of {} "
                          "dimensions.",
                          toString(bytes.scalar_type()), bytes.dim()),
                "a quantised module can't be cast to another dtype.");
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf && type != at::kDouble)
    throw Error(formatted("quantised numbers can't be computed with in {}.", toString(type)),
                "use float32, bfloat16 or float16.");
  const Quant known = checked_quant(quant);
  return quantised_row(quantised_columns(bytes.size(1), known), known);
}

at::Tensor quantise(const at::Tensor& matrix, Quant quant) {
  static const auto op = find_operator<at::Tensor(const at::Tensor&, int64_t)>("fsdp::quantise");
  const OperatorCall quiet(matrix);
  return op.call(matrix, static_cast<int64_t>(quant));
}

at::Tensor dequantise(const at::Tensor& bytes, Quant quant, at::ScalarType type) {
  static const auto op =
      find_operator<at::Tensor(const at::Tensor&, int64_t, at::ScalarType)>("fsdp::dequantise");
  const OperatorCall quiet(bytes);
  return op.call(bytes, static_cast<int64_t>(quant), type);
}

TORCH_LIBRARY_FRAGMENT(fsdp, m) {
  m.def("quantise(Tensor matrix, int quant) -> Tensor");
  m.def("dequantise(Tensor bytes, int quant, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(fsdp, Autograd, m) {
  for (const char* name : {"quantise", "dequantise"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(fsdp, Meta, m) {
  m.impl("quantise", quantise_meta);
  m.impl("dequantise", dequantise_meta);
}

}  // namespace fsdp::kernels
