// Linears: alone, and after an activation whose result is recomputed in backward.
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/functional.h"
#include "kernels/ops.h"
#include "nn/fp8_products.h"
#include "nn/known_amax.h"

namespace fsdp::nn {
namespace {

using kernels::fp8::Source;

enum class Activation { kNone, kSwiglu, kGeglu, kGelu, kGeluTanh };

Activation gelu_of(const std::string& approximate) {
  if (approximate == "none") return Activation::kGelu;
  if (approximate == "tanh") return Activation::kGeluTanh;
  throw Error(formatted("gelu has no approximation \"{}\".", approximate),
              "pass \"none\" or \"tanh\".");
}

struct GateUp {
  at::Tensor gate, up;  // halves of the columns; the gate contiguous
};

GateUp halves_of(const at::Tensor& x) {
  const int64_t width = x.size(-1) / 2;
  return {x.narrow(-1, 0, width).contiguous(), x.narrow(-1, width, width)};
}

at::Tensor activated(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::kGeglu: {
      GateUp halves = halves_of(x);
      return kernels::gelu(halves.gate, /*tanh=*/true).mul_(halves.up);
    }
    case Activation::kSwiglu:
      return kernels::swiglu(x);
    case Activation::kGelu:
    case Activation::kGeluTanh:
      return kernels::gelu(x, activation == Activation::kGeluTanh);
    default:
      return x;
  }
}

struct ActivationBackward {
  at::Tensor x;     // the gradient of x
  at::Tensor out;   // forward's result, if requested
  at::Tensor amax;  // of the gradient of x, if requested and known
};

ActivationBackward activation_backward(const at::Tensor& grad, const at::Tensor& x,
                                       Activation activation, bool want_out,
                                       bool want_amax = false) {
  if (activation == Activation::kSwiglu && want_amax && !want_out) {
    auto made = kernels::fp8::swiglu_backward(grad, x);
    return {made.result, {}, made.amax};
  }
  if (activation == Activation::kGeglu) {
    GateUp halves = halves_of(x);
    auto [to_gate, gelu] = kernels::gelu_backward(grad * halves.up, halves.gate, /*tanh=*/true,
                                                  /*want_out=*/true);
    return {at::cat({to_gate, grad * gelu}, -1), want_out ? gelu * halves.up : at::Tensor(), {}};
  }
  auto [gradient, out] =
      activation == Activation::kSwiglu
          ? kernels::swiglu_backward(grad, x, want_out)
          : kernels::gelu_backward(grad, x, activation == Activation::kGeluTanh, want_out);
  return {gradient, out, {}};
}

// The same with torch's operators, recorded by autograd.
at::Tensor plain_activation(const at::Tensor& x, Activation activation) {
  if (activation == Activation::kNone) return x;
  if (activation == Activation::kGelu || activation == Activation::kGeluTanh)
    return at::gelu(x, activation == Activation::kGelu ? "none" : "tanh");
  std::vector<at::Tensor> halves = x.chunk(2, -1);
  if (activation == Activation::kGeglu) return at::gelu(halves[0], "tanh") * halves[1];
  return at::silu(halves[0]) * halves[1];
}

// --- an activation alone ---

// Input and saved: x.
struct ActivationNode : Node {
  Activation activation = Activation::kNone;

  std::string name() const override {
    return activation == Activation::kSwiglu ? "fsdp::swiglu" : "fsdp::gelu";
  }

  Tensors backward(const Tensors& gradients) override {
    at::Tensor x = saved()[0];
    return {activation_backward(gradients[0].contiguous(), x, activation, false).x};
  }
};

at::Tensor activate(const at::Tensor& given, Activation activation) {
  if (!has_kernels(given)) return plain_activation(given, activation);
  at::Tensor x = given.contiguous(), out;
  {
    Unrecorded unrecorded;
    out = activated(x, activation);
  }
  if (auto node = record<ActivationNode>({x})) {
    node->activation = activation;
    node->save({x});
    node->returns(out);
  }
  return out;
}

// --- a linear, with or without an activation before it ---

// Inputs: x, weight, bias. Saved: x if the gradient of the weight or of the activation is needed,
// the weight if the gradient of x is. In fp8: without an activation the columns of x and their
// factors instead of x, with swiglu the largest magnitudes of its columns; and the weight's
// factors.
struct LinearNode : Node {
  Activation activation = Activation::kNone;
  WeightLayout layout = WeightLayout::kOutIn;
  Fp8 fp8 = Fp8::kNone;
  Target weight, bias;
  std::vector<int64_t> sizes, widths;  // of x; of the weight

  std::string name() const override {
    return activation == Activation::kNone     ? "fsdp::linear"
           : activation == Activation::kSwiglu ? "fsdp::swiglu_linear"
           : activation == Activation::kGeglu  ? "fsdp::geglu_linear"
                                               : "fsdp::gelu_linear";
  }

  Tensors backward(const Tensors& gradients) override {
    at::Tensor grad = as_rows(gradients[0]);
    Tensors result(3);
    if (wants(2)) result[2] = bias_gradients(grad, {&bias}, widths)[0];
    if (!wants(0) && !wants(1)) return result;
    Tensors kept = saved();
    at::Tensor rows = kept[0].defined() ? as_rows(kept[0]) : at::Tensor();
    const ProductsBackward back_of(fp8, gradients[0], wants(0), wants(1));
    kernels::fp8::Bytes columns{kept[2], kept[3]};
    if (kept[4].defined() && wants(1))
      columns = kernels::fp8::cast(Source::activated(rows), {.columns = kept[4]}).columns;
    if (wants(0)) {
      at::Tensor amax;  // of the gradient of x
      at::Tensor grad_rows = back_of.to_x({kept[1]}, layout, kept[5]);
      if (activation != Activation::kNone) {
        const bool want_out = wants(1) && !columns.data.defined();
        ActivationBackward back =
            activation_backward(grad_rows, rows, activation, want_out, fp8 == Fp8::kTensorwise);
        grad_rows = back.x;
        rows = back.out;
        amax = back.amax;
      }
      result[0] = grad_rows.view(sizes);
      if (amax.defined()) KnownAmax::of_thread().remember(result[0], amax);
    } else if (activation != Activation::kNone && !columns.data.defined()) {
      rows = activated(rows, activation);
    }
    if (wants(1)) result[1] = back_of.to_weights(rows, columns, {&weight}, widths, layout)[0];
    return result;
  }
};

// Whether LinearNode computes it; else it is torch's, which supports more, or throws.
bool is_ours(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const at::ScalarType type = weight.scalar_type();
  return (has_kernels(weight) || type == at::kDouble) && weight.dim() == 2 &&
         x.scalar_type() == type && (!bias.defined() || bias.scalar_type() == type);
}

at::Tensor activated_linear(const at::Tensor& given, const at::Tensor& weight,
                            const at::Tensor& bias, Activation activation, WeightLayout layout,
                            Fp8 wished) {
  at::Tensor x = like_weight(given, weight);
  if (activation != Activation::kNone && !has_kernels(x))
    return activated_linear(plain_activation(x, activation), weight, bias, Activation::kNone,
                            layout, wished);
  if (!is_ours(x, weight, bias))
    return at::linear(x, layout == WeightLayout::kOutIn ? weight : weight.t(),
                      bias.defined() ? std::optional(bias) : std::nullopt);
  x = x.contiguous();
  std::vector<int64_t> sizes = x.sizes().vec();
  at::Tensor out;
  const Fp8 fp8 = usable(wished, x, {weight}, layout);
  Fp8Kept kept;
  kernels::fp8::Amax amax;
  const bool to_weight =
      quantises_gradients(fp8) && at::GradMode::is_enabled() && weight.requires_grad();
  kept.wants_columns = to_weight && activation == Activation::kNone;
  {
    Unrecorded unrecorded;
    Tensors biases;
    if (bias.defined()) biases.push_back(bias);
    if (fp8 != Fp8::kNone && activation == Activation::kSwiglu) {
      const Source source = Source::activated(as_rows(x));
      amax = kernels::fp8::amax_of(source, scaling_of(fp8), {.rows = true, .columns = to_weight});
      out = fp8_products(fp8, kernels::fp8::cast(source, {.rows = amax.rows}).rows, {weight},
                         biases, x.scalar_type(), kept);
    } else {
      out = products_as(fp8, as_rows(activated(x, activation)), {weight}, biases, layout, kept);
    }
    sizes.back() = out.size(-1);
    shard::ViewsOnly views;
    out = out.view(sizes);
  }
  if (auto node = record<LinearNode>({x, weight, bias})) {
    node->activation = activation;
    node->layout = layout;
    node->fp8 = fp8;
    node->weight = Target(weight);
    node->bias = Target(bias);
    node->sizes = x.sizes().vec();
    node->widths = widths_of({weight}, layout);
    bool need_x = node->will_want(1) || (node->will_want(0) && activation != Activation::kNone);
    node->save({need_x && !kept.wants_columns ? x : at::Tensor(),
                node->will_want(0) ? weight : at::Tensor(), kept.columns.data, kept.columns.factors,
                amax.columns, kept.weight_factors});
    node->returns(out);
  }
  return out;
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  WeightLayout layout, Fp8 fp8) {
  return activated_linear(x, weight, bias, Activation::kNone, layout, fp8);
}

std::optional<at::Tensor> linear_in_fp8(const at::Tensor& x, const at::Tensor& weight,
                                        const at::Tensor& bias, Fp8 fp8) {
  const at::Tensor same = like_weight(x, weight);
  if (!is_ours(same, weight, bias) ||
      usable(fp8, same, {weight}, WeightLayout::kOutIn) == Fp8::kNone)
    return std::nullopt;
  return linear(same, weight, bias, WeightLayout::kOutIn, fp8);
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  return activate(gate_up, Activation::kSwiglu);
}

at::Tensor gelu(const at::Tensor& x, const std::string& approximate) {
  return activate(x, gelu_of(approximate));
}

at::Tensor swiglu_linear(const at::Tensor& gate_up, const at::Tensor& weight,
                         const at::Tensor& bias, WeightLayout layout, Fp8 fp8) {
  return activated_linear(gate_up, weight, bias, Activation::kSwiglu, layout, fp8);
}

at::Tensor geglu_linear(const at::Tensor& gate_up, const at::Tensor& weight, const at::Tensor& bias,
                        WeightLayout layout, Fp8 fp8) {
  return activated_linear(gate_up, weight, bias, Activation::kGeglu, layout, fp8);
}

at::Tensor gelu_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                       const std::string& approximate, WeightLayout layout, Fp8 fp8) {
  return activated_linear(x, weight, bias, gelu_of(approximate), layout, fp8);
}

}  // namespace fsdp::nn
