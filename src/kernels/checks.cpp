#include "kernels/checks.h"

#include <sstream>
#include <string>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::kernels {
namespace {

using Optional = std::optional<at::Tensor>;

bool given(const Optional& tensor) {
  return tensor && tensor->defined();
}

std::string sizes(at::IntArrayRef list) {
  std::ostringstream text;
  text << list;
  return text.str();
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::string text = formatted("{} {} on {}", sizes(tensor.sizes()), toString(tensor.scalar_type()),
                               tensor.device().str());
  if (!tensor.is_contiguous()) text += formatted(" with strides {}", sizes(tensor.strides()));
  return text;
}

const char* const kOneDtype =
    "the tensors of one call must be on one device and, unless ops.h says otherwise, contiguous "
    "and of one dtype: float32, bfloat16 or float16 (float64 only on the CPU).";

[[noreturn]] void refuse(const char* op, const char* name, const at::Tensor& tensor,
                         const std::string& expected, const char* hint = kOneDtype) {
  throw Error(formatted("{}: {} is {}, expected {}.", op, name, describe(tensor), expected), hint);
}

bool is_float(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::ScalarType::Float:
    case at::ScalarType::BFloat16:
    case at::ScalarType::Half:
      return true;
    case at::ScalarType::Double:
      return tensor.is_cpu() || tensor.is_meta();
    default:
      return false;
  }
}

// A floating-point tensor with at least one dimension and non-empty rows.
void check_rows(const char* op, const char* name, const at::Tensor& tensor, bool contiguous) {
  if (!tensor.defined() || !is_float(tensor) || tensor.dim() < 1 || tensor.size(-1) < 1)
    refuse(op, name, tensor, "a floating-point tensor with rows of at least one element");
  if (contiguous && !tensor.is_contiguous())
    refuse(op, name, tensor, "contiguous memory", "pass tensor.contiguous().");
}

RowSizes row_sizes(const at::Tensor& tensor) {
  return {tensor.numel() / tensor.size(-1), tensor.size(-1)};
}

// `tensor` has the sizes, dtype and device of `other`.
void check_like(const char* op, const char* name, const at::Tensor& tensor, const char* other_name,
                const at::Tensor& other) {
  if (tensor.defined() && tensor.sizes() == other.sizes() && tensor.is_contiguous() &&
      tensor.scalar_type() == other.scalar_type() && tensor.device() == other.device())
    return;
  refuse(op, name, tensor, formatted("the same as {}, {}", other_name, describe(other)));
}

// `tensor` has `count` elements of `type`, in any shape.
void check_count(const char* op, const char* name, const at::Tensor& tensor, int64_t count,
                 at::ScalarType type, const at::Tensor& beside) {
  if (tensor.defined() && tensor.numel() == count && tensor.is_contiguous() &&
      tensor.scalar_type() == type && tensor.device() == beside.device())
    return;
  refuse(op, name, tensor,
         formatted("{} elements of {} on {}", count, toString(type), beside.device().str()));
}

// A parameter of a norm: [dim], of x's dtype.
void check_parameter(const char* op, const char* name, const at::Tensor& tensor,
                     const at::Tensor& x) {
  if (tensor.defined() && tensor.dim() == 1) {
    check_count(op, name, tensor, x.size(-1), x.scalar_type(), x);
    return;
  }
  refuse(op, name, tensor, formatted("[{}] of the dtype of x", x.size(-1)));
}

// A gradient to write to: any floating-point dtype.
void check_target(const char* op, const char* name, const at::Tensor& tensor,
                  const at::Tensor& beside) {
  if (is_float(tensor) && tensor.device() == beside.device() && tensor.is_contiguous()) return;
  refuse(op, name, tensor,
         formatted("contiguous, floating-point memory on {}", beside.device().str()));
}

void check_parameter_gradient(const char* op, const char* name, const Optional& tensor,
                              const at::Tensor& x) {
  if (!given(tensor)) return;
  check_target(op, name, *tensor, x);
  if (tensor->dim() != 1 || tensor->size(0) != x.size(-1))
    refuse(op, name, *tensor, formatted("the parameter's sizes, [{}]", x.size(-1)));
}

void check_eps(const char* op, double eps) {
  if (eps >= 0) return;
  throw Error(formatted("{}: eps is {}, expected 0 or more.", op, eps),
              "1e-5 and 1e-6 are common.");
}

RowSizes check_norm(const char* op, const at::Tensor& x, const Optional& residual,
                    const at::Tensor& weight, double eps) {
  check_rows(op, "x", x, true);
  if (given(residual)) check_like(op, "residual", *residual, "x", x);
  check_parameter(op, "weight", weight, x);
  check_eps(op, eps);
  return row_sizes(x);
}

RowSizes check_norm_backward(const char* op, const at::Tensor& grad, const Optional& grad_sum,
                             const at::Tensor& x, const at::Tensor& rstd, const at::Tensor& weight,
                             const Optional& grad_weight) {
  check_rows(op, "x", x, true);
  check_like(op, "grad", grad, "x", x);
  if (given(grad_sum)) check_like(op, "grad_sum", *grad_sum, "x", x);
  const RowSizes size = row_sizes(x);
  check_count(op, "rstd", rstd, size.rows, row_type(x.scalar_type()), x);
  check_parameter(op, "weight", weight, x);
  check_parameter_gradient(op, "grad_weight", grad_weight, x);
  return size;
}

// cos and sin for `batch` sequences of `tokens` tokens; returns RopeSizes::cos_batch.
int64_t check_angles(const char* op, const at::Tensor& cos, const at::Tensor& sin,
                     const at::Tensor& x, int64_t batch, int64_t tokens) {
  const char* hint =
      "cos and sin are contiguous [tokens, head_dim] or [batch, tokens, head_dim], of x's dtype or "
      "float32, with an even head_dim.";
  const bool shared = cos.defined() && cos.dim() == 2;
  const bool fits =
      cos.defined() && (shared || (cos.dim() == 3 && cos.size(0) == batch)) &&
      cos.size(-2) == tokens && cos.size(-1) >= 2 && cos.size(-1) % 2 == 0 && cos.is_contiguous() &&
      (cos.scalar_type() == x.scalar_type() || cos.scalar_type() == at::ScalarType::Float) &&
      cos.device() == x.device();
  if (!fits)
    refuse(op, "cos", cos,
           formatted("[{}, head_dim] or [{}, {}, head_dim] for {}", tokens, batch, tokens,
                     describe(x)),
           hint);
  if (!sin.defined() || sin.sizes() != cos.sizes() || sin.scalar_type() != cos.scalar_type() ||
      sin.device() != cos.device() || !sin.is_contiguous())
    refuse(op, "sin", sin, "the same as cos, " + describe(cos), hint);
  return shared ? 0 : tokens * cos.size(-1);
}

// [batch, heads, tokens, head_dim] with a contiguous last dimension.
void check_heads(const char* op, const char* name, const at::Tensor& tensor) {
  if (tensor.defined() && tensor.dim() == 4 && is_float(tensor) &&
      (tensor.stride(3) == 1 || tensor.size(3) == 1))
    return;
  refuse(op, name, tensor,
         "a floating-point [batch, heads, tokens, head_dim] that is contiguous in its last "
         "dimension");
}

LogitSizes check_logits(const char* op, const at::Tensor& logits, const at::Tensor& targets) {
  check_rows(op, "logits", logits, false);
  const RowSizes size = row_sizes(logits);
  const bool slice = logits.dim() == 2 && (logits.stride(1) == 1 || size.dim == 1) &&
                     (logits.stride(0) >= size.dim || size.rows <= 1);
  if (!logits.is_contiguous() && !slice)
    refuse(op, "logits", logits, "contiguous rows, or a slice [rows, vocab] of contiguous rows",
           "pass logits.contiguous().");
  if (!targets.defined() || targets.numel() != size.rows || !targets.is_contiguous() ||
      targets.scalar_type() != at::ScalarType::Long || targets.device() != logits.device())
    refuse(op, "targets", targets,
           formatted("{} contiguous int64 on {}, one per row of logits {}", size.rows,
                     logits.device().str(), sizes(logits.sizes())),
           "pass targets.to(logits.device(), at::kLong).contiguous().");
  return {size.rows, size.dim, slice && size.rows > 1 ? logits.stride(0) : size.dim};
}

}  // namespace

RowSizes check_rms_norm(const at::Tensor& x, const Optional& residual, const at::Tensor& weight,
                        double eps) {
  return check_norm("rms_norm", x, residual, weight, eps);
}

RowSizes check_layer_norm(const at::Tensor& x, const Optional& residual, const at::Tensor& weight,
                          const Optional& bias, double eps) {
  const RowSizes size = check_norm("layer_norm", x, residual, weight, eps);
  if (given(bias)) check_parameter("layer_norm", "bias", *bias, x);
  return size;
}

RowSizes check_rms_norm_backward(const at::Tensor& grad, const Optional& grad_sum,
                                 const at::Tensor& x, const at::Tensor& rstd,
                                 const at::Tensor& weight, const Optional& grad_weight, bool,
                                 bool) {
  return check_norm_backward("rms_norm_backward", grad, grad_sum, x, rstd, weight, grad_weight);
}

RowSizes check_layer_norm_backward(const at::Tensor& grad, const Optional& grad_sum,
                                   const at::Tensor& x, const at::Tensor& mean,
                                   const at::Tensor& rstd, const at::Tensor& weight,
                                   const Optional& bias, const Optional& grad_weight,
                                   const Optional& grad_bias, bool, bool) {
  const char* op = "layer_norm_backward";
  const RowSizes size = check_norm_backward(op, grad, grad_sum, x, rstd, weight, grad_weight);
  check_count(op, "mean", mean, size.rows, row_type(x.scalar_type()), x);
  if (given(bias)) check_parameter(op, "bias", *bias, x);
  check_parameter_gradient(op, "grad_bias", grad_bias, x);
  return size;
}

RopeSizes check_rope_(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin,
                      int64_t heads, bool) {
  if (!x.defined() || x.dim() != 3 || !is_float(x) || (x.stride(2) != 1 && x.size(2) > 1) ||
      (x.stride(1) == 0 && x.size(1) > 1) || (x.stride(0) == 0 && x.size(0) > 1))
    refuse("rope_", "x", x,
           "a floating-point [batch, tokens, width] with contiguous rows that don't overlap");
  const int64_t batch = x.size(0), tokens = x.size(1);
  const int64_t cos_batch = check_angles("rope_", cos, sin, x, batch, tokens);
  const int64_t head_dim = cos.size(-1);
  if (heads < 0 || heads * head_dim > x.size(2))
    throw Error(formatted("rope_: {} heads of {} don't fit into the rows of x, {}.", heads,
                          head_dim, describe(x)),
                "heads * head_dim may be at most the width of x; head_dim comes from cos.");
  return {batch, tokens, heads, 0, head_dim, cos_batch};
}

RopeSizes check_rope_pack(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& cos, const at::Tensor& sin) {
  const char* op = "rope_pack";
  check_heads(op, "q", q);
  check_heads(op, "k", k);
  check_heads(op, "v", v);
  if (k.size(0) != q.size(0) || k.size(2) != q.size(2) || k.size(3) != q.size(3) ||
      k.scalar_type() != q.scalar_type() || k.device() != q.device())
    refuse(op, "k", k, "q's batch, tokens, head_dim, dtype and device; q is " + describe(q));
  if (v.sizes() != k.sizes() || v.scalar_type() != k.scalar_type() || v.device() != k.device())
    refuse(op, "v", v, "the sizes, dtype and device of k, " + describe(k));
  const int64_t cos_batch = check_angles(op, cos, sin, q, q.size(0), q.size(2));
  if (cos.size(-1) != q.size(3))
    refuse(op, "cos", cos, formatted("a head_dim of {}, as q has", q.size(3)));
  return {q.size(0), q.size(2), q.size(1), k.size(1), q.size(3), cos_batch};
}

RowSizes check_swiglu(const at::Tensor& gate_up) {
  check_rows("swiglu", "gate_up", gate_up, true);
  const RowSizes size = row_sizes(gate_up);
  if (size.dim % 2 != 0)
    refuse("swiglu", "gate_up", gate_up, "an even last dimension: the gate, then up");
  return {size.rows, size.dim / 2};
}

RowSizes check_swiglu_backward(const at::Tensor& grad, const at::Tensor& gate_up, bool) {
  const RowSizes size = check_swiglu(gate_up);
  check_rows("swiglu_backward", "grad", grad, true);
  if (grad.dim() != gate_up.dim() || grad.size(-1) != size.dim ||
      grad.sizes().slice(0, grad.dim() - 1) != gate_up.sizes().slice(0, grad.dim() - 1) ||
      grad.scalar_type() != gate_up.scalar_type() || grad.device() != gate_up.device())
    refuse("swiglu_backward", "grad", grad,
           formatted("the rows and dtype of gate_up with {} columns; gate_up is {}", size.dim,
                     describe(gate_up)));
  return size;
}

int64_t check_gelu(const at::Tensor& x, bool) {
  if (!x.defined() || !is_float(x) || !x.is_contiguous())
    refuse("gelu", "x", x, "a contiguous floating-point tensor");
  return x.numel();
}

int64_t check_gelu_backward(const at::Tensor& grad, const at::Tensor& x, bool tanh, bool) {
  check_gelu(x, tanh);
  check_like("gelu_backward", "grad", grad, "x", x);
  return x.numel();
}

LogitSizes check_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t) {
  return check_logits("cross_entropy", logits, targets);
}

LogitSizes check_cross_entropy_(const at::Tensor& logits, const at::Tensor& targets,
                                const at::Tensor& scale, int64_t) {
  const LogitSizes size = check_logits("cross_entropy_", logits, targets);
  check_count("cross_entropy_", "scale", scale, 1, at::ScalarType::Float, logits);
  return size;
}

LogitSizes check_cross_entropy_backward(const at::Tensor& grad, const at::Tensor& logits,
                                        const at::Tensor& targets, const at::Tensor& log_sum,
                                        int64_t) {
  const char* op = "cross_entropy_backward";
  const LogitSizes size = check_logits(op, logits, targets);
  const at::ScalarType type = row_type(logits.scalar_type());
  check_count(op, "grad", grad, size.rows, type, logits);
  check_count(op, "log_sum", log_sum, size.rows, type, logits);
  return size;
}

RowSizes check_embedding_backward(const at::Tensor& grad, const at::Tensor& ids,
                                  const at::Tensor& grad_weight, int64_t, bool) {
  const char* op = "embedding_backward";
  check_rows(op, "grad", grad, true);
  const RowSizes size = row_sizes(grad);
  check_count(op, "ids", ids, size.rows, at::ScalarType::Long, grad);
  if (!grad_weight.defined() || grad_weight.dim() != 2 || grad_weight.size(1) != size.dim)
    refuse(op, "grad_weight", grad_weight, formatted("[vocab, {}], as wide as grad", size.dim));
  check_target(op, "grad_weight", grad_weight, grad);
  return size;
}

int64_t check_fill_random_(const at::Tensor& out, bool, double, double, int64_t, int64_t first) {
  const char* op = "fill_random_";
  const bool known = out.defined() && (is_float(out) || out.scalar_type() == at::kDouble);
  if (!known || !out.is_contiguous()) refuse(op, "out", out, "a contiguous floating-point tensor");
  if (first < 0)
    throw Error(formatted("fill_random_ begins at number {} of its sequence.", first),
                "pass the index of out's first element, 0 or more.");
  return out.numel();
}

int64_t check_scale_into(const at::Tensor& target, const at::Tensor& source, const Optional& scale,
                         bool) {
  const char* op = "scale_into";
  if (!source.defined() || !is_float(source) || !source.is_contiguous())
    refuse(op, "source", source, "a contiguous floating-point tensor");
  if (!target.defined() || target.sizes() != source.sizes())
    refuse(op, "target", target, "the sizes of source, " + describe(source));
  check_target(op, "target", target, source);
  if (given(scale)) check_count(op, "scale", *scale, 1, at::ScalarType::Float, source);
  return source.numel();
}

}  // namespace fsdp::kernels
