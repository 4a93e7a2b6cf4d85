// Both passes with LibTorch's operators, some millions of elements at a time, because they make
// temporaries in float32.
#include "kernels/matrix_update.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>

#include "kernels/split.h"

namespace fsdp::kernels {
namespace {

using at::ScalarType;

// Calls body(begin, count) for the chunks of n elements.
template <typename Body>
void in_chunks(int64_t n, at::Device device, const Body& body) {
  const int64_t chunk = device.is_cpu() ? int64_t{1} << 18 : int64_t{1} << 24;
  for (int64_t at = 0; at < n; at += chunk) body(at, std::min(chunk, n - at));
}

// In the dtype that is computed in: float32, or float64 for float64.
at::Tensor computable(const at::Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Double ? tensor : tensor.to(ScalarType::Float);
}

// Whether to write. The CPU knows at once; undefined: yes.
struct Go {
  explicit Go(const at::Tensor& factor) {
    if (!factor.defined() || factor.is_meta()) return;
    if (factor.is_cpu())
      never = !std::isfinite(factor.item<float>());
    else
      decided = at::isfinite(factor);
  }
  void write(const at::Tensor& to, const at::Tensor& value) const {
    to.copy_(decided.defined() ? at::where(decided, value.to(to.scalar_type()), to) : value);
  }
  bool never = false;
  at::Tensor decided;
};

void apply_chunk(const AppliedTensors& t, int64_t begin, int64_t count, const Go& go) {
  const auto part = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.narrow(0, begin, count) : tensor;
  };
  at::Tensor low = part(t.low), rest = part(t.rest);
  const at::Tensor before = rest.defined() ? join_float(low, rest) : part(t.master);
  at::Tensor now = computable(before);
  const at::Tensor update = part(t.update).to(now.scalar_type());
  if (t.rates.defined()) {
    const at::Tensor lr = t.rates.select(0, 0), decay = t.rates.select(0, 1);
    now = now * (1 - lr * decay) - update * lr;
  } else {
    now = now * (1 - t.lr * t.weight_decay) - update * t.lr;
  }
  if (rest.defined()) {
    if (go.decided.defined()) now = at::where(go.decided, now, before);
    return split_float(now, low, rest);
  }
  go.write(part(t.master), now);
  if (low.defined()) low.copy_(part(t.master));
}

}  // namespace

void momentum(std::span<const MomentumTensors> tensors, const MomentumStep& step,
              const at::Tensor& factor) {
  const Go go(factor);
  for (const auto& t : tensors) {
    if (go.never) {
      t.direction.zero_();
      continue;
    }
    in_chunks(t.momentum.numel(), t.momentum.device(), [&](int64_t begin, int64_t count) {
      const at::Tensor kept = t.momentum.narrow(0, begin, count);
      const at::Tensor before = computable(kept);
      at::Tensor grad = t.grad.narrow(0, t.grad_begin + begin, count).to(before.scalar_type());
      if (factor.defined()) grad = grad * factor;
      if (step.maximize) grad = -grad;
      const at::Tensor now = at::lerp(before, grad, 1 - step.momentum);
      t.direction.narrow(0, begin, count)
          .copy_(step.nesterov ? at::lerp(grad, now, step.momentum) : now);
      go.write(kept, now);
    });
  }
}

void apply_update(std::span<const AppliedTensors> tensors, const at::Tensor& factor) {
  const Go go(factor);
  if (go.never) return;
  for (const auto& t : tensors)
    in_chunks(t.update.numel(), t.update.device(),
              [&](int64_t begin, int64_t count) { apply_chunk(t, begin, count, go); });
}

}  // namespace fsdp::kernels
