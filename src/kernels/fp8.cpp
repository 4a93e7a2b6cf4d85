// The operators of fp8.h: schemas, the functions that call them, checks, and the meta device.
#include "kernels/fp8.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <sstream>
#include <string>
#include <tuple>

#include "base/format.h"
#include "fsdp/error.h"
#include "kernels/operators.h"
#include "kernels/outputs.h"

namespace fsdp::kernels {
namespace fp8 {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensor if_any(Tensor tensor) {
  return tensor.numel() > 0 ? std::move(tensor) : Tensor();
}

bool is_byte(const Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat8_e4m3fn || tensor.scalar_type() == at::kFloat8_e5m2;
}

std::string described(const Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::ostringstream text;
  text << tensor.sizes() << " " << toString(tensor.scalar_type()) << " on " << tensor.device();
  return text.str();
}

[[noreturn]] void refuse_tensor(const char* name, const Tensor& tensor, const char* expected) {
  throw Error(formatted("fp8: {} is {}, expected {}.", name, described(tensor), expected),
              "see kernels/fp8.h; sizes are multiples of 16.");
}

void check_factors(const char* name, const Tensor& factors, int64_t rows, const Tensor& beside) {
  if (factors.defined() && factors.scalar_type() == at::kFloat && factors.is_contiguous() &&
      factors.device() == beside.device() && (factors.numel() == 1 || factors.numel() == rows))
    return;
  refuse_tensor(name, factors, "one float32, or one per row, on the device of the matrix");
}

// --- the meta device ---

Two amax_meta(const Tensor& x, const Optional& rstd, const Optional& weight, bool swiglu,
              bool rowwise, bool rows, bool columns) {
  const Matrix size = check_source(x, rstd, weight, swiglu);
  const auto options = x.options().dtype(at::kFloat);
  if (!rowwise) return {at::empty({1}, options), at::empty({0}, options)};
  return {at::empty({rows ? size.rows : 0}, options),
          at::empty({columns ? size.columns : 0}, options)};
}

Four cast_meta(const Tensor& x, const Optional& rstd, const Optional& weight, bool swiglu,
               const Optional& row_amax, const Optional& column_amax, bool e5m2) {
  const Matrix size = check_source(x, rstd, weight, swiglu);
  check_magnitudes(size, x, row_amax, column_amax);
  const auto bytes = x.options().dtype(e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn);
  const auto floats = x.options().dtype(at::kFloat);
  const auto data = [&](bool wanted, int64_t rows, int64_t columns) {
    return wanted ? at::empty({rows, columns}, bytes) : at::empty({0}, bytes);
  };
  const auto factors = [&](const Optional& amax) {
    return at::empty({amax ? amax->numel() : 0}, floats);
  };
  return {data(row_amax.has_value(), size.rows, size.columns), factors(row_amax),
          data(column_amax.has_value(), size.columns, size.rows), factors(column_amax)};
}

Four quantise_meta(const Tensor& x, bool rowwise, bool rows, bool columns, bool e5m2) {
  const auto [row_amax, column_amax] = amax_meta(x, {}, {}, false, rowwise, rows, columns);
  const Tensor& other = rowwise ? column_amax : row_amax;
  return cast_meta(x, {}, {}, false, rows ? Optional(row_amax) : std::nullopt,
                   columns ? Optional(other) : std::nullopt, e5m2);
}

Five rms_norm_meta(const Tensor& x, const Optional& residual, const Tensor& weight, double eps,
                   bool rowwise) {
  const RowSizes size = check_rms_norm(x, residual, weight, eps);
  const auto floats = x.options().dtype(at::kFloat);
  const Tensor amax = at::empty({rowwise ? size.rows : 1}, floats);
  return {at::empty({size.rows, size.dim}, x.options().dtype(at::kFloat8_e4m3fn)),
          empty_if(residual && residual->defined(), x), empty_rows(x), at::empty_like(amax), amax};
}

Tensor one_float(const Tensor& like) {
  return at::empty({1}, like.options().dtype(at::kFloat));
}

Three rms_norm_backward_meta(const Tensor& grad, const Optional& grad_sum, const Tensor& x,
                             const Tensor& rstd, const Tensor& weight, const Optional& grad_weight,
                             bool accumulate, bool want_out) {
  check_rms_norm_backward(grad, grad_sum, x, rstd, weight, grad_weight, accumulate, want_out);
  return {empty_contiguous(x), empty_if(want_out, x), one_float(x)};
}

Two swiglu_backward_meta(const Tensor& grad, const Tensor& gate_up) {
  check_swiglu_backward(grad, gate_up, false);
  return {empty_contiguous(gate_up), one_float(grad)};
}

Two rope_pack_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                   const Tensor& sin) {
  return {empty_packed(q, check_rope_pack(q, k, v, cos, sin)), one_float(q)};
}

Tensor product_meta(const Tensor& a, const Tensor& a_factors, const Tensor& b,
                    const Tensor& b_factors, const Optional& bias, at::ScalarType type, bool) {
  Tensor out = at::empty({a.size(0), b.size(0)}, a.options().dtype(type));
  check_product(out, a, a_factors, b, b_factors, bias);
  return out;
}

void product_into_meta(const Tensor& out, const Tensor& a, const Tensor& a_factors, const Tensor& b,
                       const Tensor& b_factors, bool) {
  check_product(out, a, a_factors, b, b_factors, {});
}

}  // namespace

// --- checks ---

Matrix check_source(const Tensor& x, const Optional& rstd, const Optional& weight, bool swiglu) {
  const bool known =
      x.defined() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 ||
                      x.scalar_type() == at::kHalf);
  const int64_t halves = swiglu ? 2 : 1;
  if (!known || x.dim() != 2 || !x.is_contiguous() || x.size(1) % halves != 0 ||
      !fits(x.size(0), x.size(1) / halves))
    refuse_tensor("the matrix", x, "a contiguous matrix of float32, bfloat16 or float16");
  const Matrix size{x.size(0), x.size(1) / halves};
  if (rstd.has_value() != weight.has_value() || (rstd && swiglu))
    throw Error("fp8: a matrix is computed in two ways, or in half of one.", "see Source.");
  if (rstd && (rstd->numel() != size.rows || rstd->scalar_type() != at::kFloat ||
               !rstd->is_contiguous() || rstd->device() != x.device()))
    refuse_tensor("rstd", *rstd, "one float32 per row");
  if (weight && (weight->numel() != size.columns || weight->scalar_type() != x.scalar_type() ||
                 !weight->is_contiguous() || weight->device() != x.device()))
    refuse_tensor("the norm's weight", *weight, "one number per column, in the matrix's dtype");
  return size;
}

void check_magnitudes(const Matrix& size, const Tensor& x, const Optional& row_amax,
                      const Optional& column_amax) {
  if (row_amax) check_factors("the magnitudes of rows", *row_amax, size.rows, x);
  if (column_amax) check_factors("the magnitudes of columns", *column_amax, size.columns, x);
}

Product check_product(const Tensor& out, const Tensor& a, const Tensor& a_factors, const Tensor& b,
                      const Tensor& b_factors, const Optional& bias) {
  for (const auto& [name, tensor] : {std::pair("a", &a), std::pair("b", &b)})
    if (!tensor->defined() || tensor->dim() != 2 || !is_byte(*tensor) || tensor->stride(1) != 1 ||
        tensor->stride(0) % 16 != 0 || tensor->storage_offset() % 16 != 0 ||
        !fits(tensor->size(0), tensor->size(1)))
      refuse_tensor(name, *tensor, "a matrix of float8 with rows in 16 bytes each");
  if (a.scalar_type() == at::kFloat8_e5m2 && b.scalar_type() == at::kFloat8_e5m2)
    throw Error("fp8: both operands are e5m2.", "tensor cores take at most one of them.");
  const Product size{a.size(0), b.size(0), a.size(1)};
  if (b.size(1) != size.k) refuse_tensor("b", b, "as many columns as a");
  check_factors("a's factors", a_factors, size.m, a);
  check_factors("b's factors", b_factors, size.n, b);
  if ((a_factors.numel() == 1) != (b_factors.numel() == 1))
    throw Error("fp8: one operand is scaled tensorwise and the other rowwise.",
                "quantise both in the same way.");
  if (!out.defined() || out.dim() != 2 || out.size(0) != size.m || out.size(1) != size.n ||
      out.stride(1) != 1 || out.device() != a.device())
    refuse_tensor("the result", out, "a matrix of a's rows by b's rows");
  if (bias && bias->defined() &&
      (bias->dim() != 1 || bias->size(0) != size.n || bias->scalar_type() != out.scalar_type()))
    refuse_tensor("the bias", *bias, "one number per column of the result, in its dtype");
  return size;
}

// --- the functions ---

Source Source::normed(Tensor x, Tensor rstd, Tensor weight) {
  Source source(std::move(x));
  source.rstd = std::move(rstd);
  source.weight = std::move(weight);
  return source;
}

Source Source::activated(Tensor gate_up) {
  Source source(std::move(gate_up));
  source.swiglu = true;
  return source;
}

Amax amax_of(const Source& source, Scaling scaling, Wanted wanted) {
  static const auto op =
      find_operator<Two(const Tensor&, const Optional&, const Optional&, bool, bool, bool, bool)>(
          "fsdp::fp8_amax");
  const OperatorCall quiet(source.x);
  const bool rowwise = scaling == Scaling::kRowwise;
  auto [rows, columns] = op.call(source.x, if_defined(source.rstd), if_defined(source.weight),
                                 source.swiglu, rowwise, wanted.rows, wanted.columns);
  if (!rowwise) return {wanted.rows ? rows : Tensor(), wanted.columns ? rows : Tensor()};
  return {if_any(std::move(rows)), if_any(std::move(columns))};
}

namespace {

Quantised copies(Four made) {
  auto& [rows, row_factors, columns, column_factors] = made;
  return {{if_any(std::move(rows)), if_any(std::move(row_factors))},
          {if_any(std::move(columns)), if_any(std::move(column_factors))}};
}

}  // namespace

Quantised cast(const Source& source, const Amax& amax, bool e5m2) {
  static const auto op =
      find_operator<Four(const Tensor&, const Optional&, const Optional&, bool, const Optional&,
                         const Optional&, bool)>("fsdp::fp8_cast");
  const OperatorCall quiet(source.x);
  return copies(op.call(source.x, if_defined(source.rstd), if_defined(source.weight), source.swiglu,
                        if_defined(amax.rows), if_defined(amax.columns), e5m2));
}

Quantised quantise(const Source& source, Scaling scaling, Wanted wanted, bool e5m2) {
  if (source.swiglu || source.rstd.defined())
    return cast(source, amax_of(source, scaling, wanted), e5m2);
  static const auto op =
      find_operator<Four(const Tensor&, bool, bool, bool, bool)>("fsdp::fp8_quantise");
  const OperatorCall quiet(source.x);
  return copies(op.call(source.x, scaling == Scaling::kRowwise, wanted.rows, wanted.columns, e5m2));
}

NormedBytes rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                     Scaling scaling) {
  static const auto op =
      find_operator<Five(const Tensor&, const Optional&, const Tensor&, double, bool)>(
          "fsdp::fp8_rms_norm");
  const OperatorCall quiet(x);
  auto [rows, sum, rstd, factors, amax] =
      op.call(x, if_defined(residual), weight, eps, scaling == Scaling::kRowwise);
  return {{std::move(rows), std::move(factors)}, std::move(sum), std::move(rstd), std::move(amax)};
}

NormGradientsAmax rms_norm_backward(const Tensor& grad, const Tensor& grad_sum, const Tensor& x,
                                    const Tensor& rstd, const Tensor& weight,
                                    const Tensor& grad_weight, bool accumulate, bool want_out) {
  static const auto op =
      find_operator<Three(const Tensor&, const Optional&, const Tensor&, const Tensor&,
                          const Tensor&, const Optional&, bool, bool)>(
          "fsdp::fp8_rms_norm_backward");
  const OperatorCall quiet(x);
  auto [grad_x, out, amax] = op.call(grad, if_defined(grad_sum), x, rstd, weight,
                                     if_defined(grad_weight), accumulate, want_out);
  if (grad_weight.defined()) grad_weight.unsafeGetTensorImpl()->bump_version();
  return {std::move(grad_x), std::move(out), std::move(amax)};
}

WithAmax swiglu_backward(const Tensor& grad, const Tensor& gate_up) {
  static const auto op =
      find_operator<Two(const Tensor&, const Tensor&)>("fsdp::fp8_swiglu_backward");
  const OperatorCall quiet(grad);
  auto [result, amax] = op.call(grad, gate_up);
  return {std::move(result), std::move(amax)};
}

WithAmax rope_pack(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                   const Tensor& sin) {
  static const auto op =
      find_operator<Two(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&)>(
          "fsdp::fp8_rope_pack");
  const OperatorCall quiet(q);
  auto [result, amax] = op.call(q, k, v, cos, sin);
  return {std::move(result), std::move(amax)};
}

Tensor product(const Bytes& a, const Bytes& b, const Tensor& bias, at::ScalarType type, bool fast) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Optional&, at::ScalarType, bool)>("fsdp::fp8_mm");
  const OperatorCall quiet(a.data);
  return op.call(a.data, a.factors, b.data, b.factors, if_defined(bias), type, fast);
}

void product_into(const Tensor& out, const Bytes& a, const Bytes& b, bool accumulate) {
  static const auto op =
      find_operator<void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                         bool)>("fsdp::fp8_mm_into");
  const OperatorCall quiet(a.data);
  op.call(out, a.data, a.factors, b.data, b.factors, accumulate);
  out.unsafeGetTensorImpl()->bump_version();
}

}  // namespace fp8

TORCH_LIBRARY_FRAGMENT(fsdp, m) {
  m.def(
      "fp8_amax(Tensor x, Tensor? rstd, Tensor? weight, bool swiglu, bool rowwise, bool rows,"
      " bool columns) -> (Tensor rows, Tensor columns)");
  m.def(
      "fp8_cast(Tensor x, Tensor? rstd, Tensor? weight, bool swiglu, Tensor? row_amax,"
      " Tensor? column_amax, bool e5m2)"
      " -> (Tensor rows, Tensor row_factors, Tensor columns, Tensor column_factors)");
  m.def(
      "fp8_quantise(Tensor x, bool rowwise, bool rows, bool columns, bool e5m2)"
      " -> (Tensor rows, Tensor row_factors, Tensor columns, Tensor column_factors)");
  m.def(
      "fp8_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, bool rowwise)"
      " -> (Tensor rows, Tensor sum, Tensor rstd, Tensor factors, Tensor amax)");
  m.def(
      "fp8_rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor rstd, Tensor weight,"
      " Tensor(a!)? grad_weight, bool accumulate, bool want_out)"
      " -> (Tensor grad_x, Tensor out, Tensor amax)");
  m.def("fp8_swiglu_backward(Tensor grad, Tensor gate_up) -> (Tensor grad_gate_up, Tensor amax)");
  m.def(
      "fp8_rope_pack(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin)"
      " -> (Tensor out, Tensor amax)");
  m.def(
      "fp8_mm(Tensor a, Tensor a_factors, Tensor b, Tensor b_factors, Tensor? bias,"
      " ScalarType dtype, bool fast) -> Tensor");
  m.def(
      "fp8_mm_into(Tensor(a!) out, Tensor a, Tensor a_factors, Tensor b, Tensor b_factors,"
      " bool accumulate) -> ()");
}

TORCH_LIBRARY_IMPL(fsdp, Autograd, m) {
  for (const char* name :
       {"fp8_amax", "fp8_cast", "fp8_quantise", "fp8_rms_norm", "fp8_rms_norm_backward",
        "fp8_swiglu_backward", "fp8_rope_pack", "fp8_mm", "fp8_mm_into"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

TORCH_LIBRARY_IMPL(fsdp, Meta, m) {
  m.impl("fp8_amax", fp8::amax_meta);
  m.impl("fp8_cast", fp8::cast_meta);
  m.impl("fp8_quantise", fp8::quantise_meta);
  m.impl("fp8_rms_norm", fp8::rms_norm_meta);
  m.impl("fp8_rms_norm_backward", fp8::rms_norm_backward_meta);
  m.impl("fp8_swiglu_backward", fp8::swiglu_backward_meta);
  m.impl("fp8_rope_pack", fp8::rope_pack_meta);
  m.impl("fp8_mm", fp8::product_meta);
  m.impl("fp8_mm_into", fp8::product_into_meta);
}

}  // namespace fsdp::kernels
