// AdamW on the CPU. It reads and writes every array once: 28 bytes per element in float32, 26 with
// a split master and a bfloat16 gradient.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/adamw_next.h"
#include "kernels/cpu/adamw_pass.h"
#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/masters.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/widths.h"
#include "kernels/update.h"

namespace fsdp::kernels::cpu {
namespace {

template <typename C>
AdamWNumbers<C> numbers(const AdamWStep& step, float factor) {
  return {.scale = static_cast<C>(step.maximize ? -factor : factor),
          .beta1 = static_cast<C>(step.beta1),
          .rest1 = static_cast<C>(1 - step.beta1),
          .beta2 = static_cast<C>(step.beta2),
          .rest2 = static_cast<C>(1 - step.beta2),
          .eps = static_cast<C>(step.eps),
          .keep = static_cast<C>(1 - step.lr * step.weight_decay),
          .size = static_cast<C>(step.lr / (1 - std::pow(step.beta1, step.step))),
          .correction = static_cast<C>(1 / std::sqrt(1 - std::pow(step.beta2, step.step)))};
}

// Float32 masters, whole or split.
void adamw_float(const AdamWTensors& t, const AdamWStep& step, float factor, AdamWPass pass) {
  const bool bf16_low = t.low.defined() && t.low.scalar_type() == at::ScalarType::BFloat16;
  const bool other_low = t.low.defined() && !bf16_low;  // written after each block
  AdamWArrays arrays{.master = write<float>(t.master),
                     .low = bf16_low ? write<uint16_t>(t.low) : nullptr,
                     .rest = write<int16_t>(t.rest),
                     .short_grad = t.grad.scalar_type() == at::ScalarType::BFloat16,
                     .exp_avg = write<float>(t.exp_avg),
                     .exp_avg_sq = write<float>(t.exp_avg_sq)};
  arrays.grad = static_cast<const char*>(t.grad.const_data_ptr()) +
                t.grad_begin * static_cast<int64_t>(t.grad.element_size());
  const auto k = numbers<float>(step, factor);
  parallel(t.exp_avg.numel(), [&](int64_t, int64_t begin, int64_t end) {
    if (!other_low) return pass(arrays, k, begin, end);
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t stop = std::min(end, at + kBlock);
      pass(arrays, k, at, stop);
      write_low(t.low, arrays.master + at, at, stop - at);
    }
  });
}

// Other masters, in lanes of 16 bytes: float64, and 16-bit ones computed in float32.
template <typename T>
void adamw_other(const AdamWTensors& t, const AdamWStep& step, float factor) {
  using C = Compute<T>;
  T* exp_avg = write<T>(t.exp_avg);
  T* exp_avg_sq = write<T>(t.exp_avg_sq);
  const T* grad = read<T>(t.grad) + t.grad_begin;
  const auto lanes = [k = numbers<C>(step, factor)](T* w_at, const T* g_at, T* m_at, T* v_at) {
    Lanes<C> m = load<C>(m_at), v = load<C>(v_at);
    const auto root = [](Lanes<C> x) { return square_root(x); };
    const Lanes<C> w = adamw_next(load<C>(w_at), load<C>(g_at) * k.scale, m, v, k, root);
    store<C>(m_at, m);
    store<C>(v_at, v);
    store<C>(w_at, w);
  };
  update<T>(t, [&](T* master, int64_t begin, int64_t end) {
    over<C>(end - begin, lanes, master, grad + begin, exp_avg + begin, exp_avg_sq + begin);
  });
}

}  // namespace

void adamw(const AdamWTensors& t, const AdamWStep& step, float factor, int wide) {
  with_dtype(master_type(t), [&]<typename T>(T) {
    if constexpr (std::is_same_v<T, float>)
      adamw_float(t, step, factor, adamw_pass(wide ? wide : width()));
    else
      adamw_other<T>(t, step, factor);
  });
}

}  // namespace fsdp::kernels::cpu
