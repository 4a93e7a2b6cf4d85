// The operators' schemas, and the functions of ops.h, which call them through the dispatcher.
//
// Kernels are registered elsewhere: cpu/*.cpp, meta.cpp and the CUDA module. An operator may not
// return one of its arguments, so an output that isn't wanted is an empty tensor.
#include "kernels/ops.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <optional>

#include "kernels/operators.h"

namespace fsdp::kernels {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Tells autograd that a saved tensor may have changed.
void written(const Tensor& tensor) {
  if (tensor.defined()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

TORCH_LIBRARY(fsdp, m) {
  m.def(
      "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps)"
      " -> (Tensor out, Tensor sum, Tensor rstd)");
  m.def(
      "layer_norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps)"
      " -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor rstd, Tensor weight,"
      " Tensor(a!)? grad_weight, bool accumulate, bool want_out)"
      " -> (Tensor grad_x, Tensor out)");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor mean, Tensor rstd,"
      " Tensor weight, Tensor? bias, Tensor(a!)? grad_weight, Tensor(b!)? grad_bias,"
      " bool accumulate, bool want_out) -> (Tensor grad_x, Tensor out)");
  m.def("rope_(Tensor(a!) x, Tensor cos, Tensor sin, int heads, bool inverse) -> ()");
  m.def("rope_pack(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin) -> Tensor");
  m.def("swiglu(Tensor gate_up) -> Tensor");
  m.def(
      "swiglu_backward(Tensor grad, Tensor gate_up, bool want_out)"
      " -> (Tensor grad_gate_up, Tensor out)");
  m.def("gelu(Tensor x, bool tanh) -> Tensor");
  m.def(
      "gelu_backward(Tensor grad, Tensor x, bool tanh, bool want_out)"
      " -> (Tensor grad_x, Tensor out)");
  m.def(
      "cross_entropy(Tensor logits, Tensor targets, int ignore_index)"
      " -> (Tensor losses, Tensor log_sum)");
  m.def(
      "cross_entropy_(Tensor(a!) logits, Tensor targets, Tensor scale, int ignore_index)"
      " -> Tensor");
  m.def(
      "cross_entropy_backward(Tensor grad, Tensor logits, Tensor targets, Tensor log_sum,"
      " int ignore_index) -> Tensor");
  m.def(
      "embedding_backward(Tensor grad, Tensor ids, Tensor(a!) grad_weight, int padding_idx,"
      " bool accumulate) -> ()");
  m.def("fill_random_(Tensor(a!) out, bool normal, float a, float b, int key, int first) -> ()");
  m.def("scale_into(Tensor(a!) target, Tensor source, Tensor? scale, bool accumulate) -> ()");
}

TORCH_LIBRARY_IMPL(fsdp, Autograd, m) {
  for (const char* name :
       {"rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward", "rope_", "rope_pack",
        "swiglu", "swiglu_backward", "gelu", "gelu_backward", "cross_entropy", "cross_entropy_",
        "cross_entropy_backward", "embedding_backward", "fill_random_", "scale_into"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

Normed rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  static const auto op =
      find_operator<Three(const Tensor&, const Optional&, const Tensor&, double)>("fsdp::rms_norm");
  const OperatorCall call(x);
  auto [out, sum, rstd] = op.call(x, if_defined(residual), weight, eps);
  return {std::move(out), std::move(sum), {}, std::move(rstd)};
}

Normed layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                  double eps) {
  static const auto op =
      find_operator<Four(const Tensor&, const Optional&, const Tensor&, const Optional&, double)>(
          "fsdp::layer_norm");
  const OperatorCall call(x);
  auto [out, sum, mean, rstd] = op.call(x, if_defined(residual), weight, if_defined(bias), eps);
  return {std::move(out), std::move(sum), std::move(mean), std::move(rstd)};
}

NormGradients rms_norm_backward(const Tensor& grad, const Tensor& grad_sum, const Tensor& x,
                                const Tensor& rstd, const Tensor& weight, const Tensor& grad_weight,
                                bool accumulate, bool want_out) {
  static const auto op =
      find_operator<Two(const Tensor&, const Optional&, const Tensor&, const Tensor&, const Tensor&,
                        const Optional&, bool, bool)>("fsdp::rms_norm_backward");
  const OperatorCall call(x);
  auto [grad_x, out] = op.call(grad, if_defined(grad_sum), x, rstd, weight, if_defined(grad_weight),
                               accumulate, want_out);
  written(grad_weight);
  return {std::move(grad_x), std::move(out)};
}

NormGradients layer_norm_backward(const Tensor& grad, const Tensor& grad_sum, const Tensor& x,
                                  const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                                  const Tensor& bias, const Tensor& grad_weight,
                                  const Tensor& grad_bias, bool accumulate, bool want_out) {
  static const auto op = find_operator<Two(
      const Tensor&, const Optional&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      const Optional&, const Optional&, const Optional&, bool, bool)>("fsdp::layer_norm_backward");
  const OperatorCall call(x);
  auto [grad_x, out] =
      op.call(grad, if_defined(grad_sum), x, mean, rstd, weight, if_defined(bias),
              if_defined(grad_weight), if_defined(grad_bias), accumulate, want_out);
  written(grad_weight);
  written(grad_bias);
  return {std::move(grad_x), std::move(out)};
}

void rope_(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t heads, bool inverse) {
  static const auto op =
      find_operator<void(const Tensor&, const Tensor&, const Tensor&, int64_t, bool)>(
          "fsdp::rope_");
  const OperatorCall call(x);
  op.call(x, cos, sin, heads, inverse);
  written(x);
}

Tensor rope_pack(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                 const Tensor& sin) {
  static const auto op = find_operator<Tensor(const Tensor&, const Tensor&, const Tensor&,
                                              const Tensor&, const Tensor&)>("fsdp::rope_pack");
  const OperatorCall call(q);
  return op.call(q, k, v, cos, sin);
}

Tensor swiglu(const Tensor& gate_up) {
  static const auto op = find_operator<Tensor(const Tensor&)>("fsdp::swiglu");
  const OperatorCall call(gate_up);
  return op.call(gate_up);
}

Two swiglu_backward(const Tensor& grad, const Tensor& gate_up, bool want_out) {
  static const auto op =
      find_operator<Two(const Tensor&, const Tensor&, bool)>("fsdp::swiglu_backward");
  const OperatorCall call(gate_up);
  return op.call(grad, gate_up, want_out);
}

Tensor gelu(const Tensor& x, bool tanh) {
  static const auto op = find_operator<Tensor(const Tensor&, bool)>("fsdp::gelu");
  const OperatorCall call(x);
  return op.call(x, tanh);
}

Two gelu_backward(const Tensor& grad, const Tensor& x, bool tanh, bool want_out) {
  static const auto op =
      find_operator<Two(const Tensor&, const Tensor&, bool, bool)>("fsdp::gelu_backward");
  const OperatorCall call(x);
  return op.call(grad, x, tanh, want_out);
}

Two cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index) {
  static const auto op =
      find_operator<Two(const Tensor&, const Tensor&, int64_t)>("fsdp::cross_entropy");
  const OperatorCall call(logits);
  return op.call(logits, targets, ignore_index);
}

Tensor cross_entropy_(const Tensor& logits, const Tensor& targets, const Tensor& scale,
                      int64_t ignore_index) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t)>(
          "fsdp::cross_entropy_");
  const OperatorCall call(logits);
  Tensor losses = op.call(logits, targets, scale, ignore_index);
  written(logits);
  return losses;
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& logits, const Tensor& targets,
                              const Tensor& log_sum, int64_t ignore_index) {
  static const auto op =
      find_operator<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t)>(
          "fsdp::cross_entropy_backward");
  const OperatorCall call(logits);
  return op.call(grad, logits, targets, log_sum, ignore_index);
}

void embedding_backward(const Tensor& grad, const Tensor& ids, const Tensor& grad_weight,
                        int64_t padding_idx, bool accumulate) {
  static const auto op =
      find_operator<void(const Tensor&, const Tensor&, const Tensor&, int64_t, bool)>(
          "fsdp::embedding_backward");
  const OperatorCall call(grad);
  op.call(grad, ids, grad_weight, padding_idx, accumulate);
  written(grad_weight);
}

void fill_random_(const Tensor& out, const Distribution& distribution, uint64_t key,
                  int64_t first) {
  static const auto op = find_operator<void(const Tensor&, bool, double, double, int64_t, int64_t)>(
      "fsdp::fill_random_");
  const OperatorCall call(out);
  if (distribution.kind == Distribution::Kind::kConstant)
    out.fill_(distribution.a);
  else
    op.call(out, distribution.kind == Distribution::Kind::kNormal, distribution.a, distribution.b,
            static_cast<int64_t>(key), first);
  written(out);
}

void scale_into(const Tensor& target, const Tensor& source, const Tensor& scale, bool accumulate) {
  static const auto op =
      find_operator<void(const Tensor&, const Tensor&, const Optional&, bool)>("fsdp::scale_into");
  const OperatorCall call(source);
  op.call(target, source, if_defined(scale), accumulate);
  written(target);
}

}  // namespace fsdp::kernels
