// Cross-entropy on the CPU: logits are read in their own dtype, and nothing of their size is
// allocated. Also scale_into, which brings gradients that were computed early to the loss's true
// scale.
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/lane_math.h"
#include "kernels/cpu/parallel.h"
#include "kernels/outputs.h"

namespace fsdp::kernels::cpu {
namespace {

using at::Tensor;
using Two = std::tuple<Tensor, Tensor>;

template <typename C, typename T>
C largest(const T* row, int64_t count) {
  Lanes<C> most = all(static_cast<C>(row[0]));
  int64_t i = 0;
  for (; i + kLanes<C> <= count; i += kLanes<C>) {
    const Lanes<C> x = load<C>(row + i);
    most = x > most ? x : most;
  }
  C top = most[0];
  for (int lane = 1; lane < kLanes<C>; ++lane) top = std::max(top, most[lane]);
  for (; i < count; ++i) top = std::max(top, static_cast<C>(row[i]));
  return top;
}

// The log of the sum of a row's exponentials. Blocks of the sum are added in float64, so that a
// large vocabulary doesn't lose precision.
template <typename C, typename T>
C log_sum_of(const T* row, int64_t count) {
  const C top = largest<C>(row, count);
  const auto power = [top](const T* at) { return Sums<C, 1>{{exponential(load<C>(at) - top)}}; };
  double sum = 0;
  for (int64_t i = 0; i < count; i += kChunk)
    sum += sums_over<C, 1>(std::min(kChunk, count - i), power, row + i).total(0);
  return static_cast<C>(top + std::log(sum));
}

// What a row's target means for its loss.
enum class TargetKind { kCounts, kIgnored, kOutside };

TargetKind kind_of(int64_t target, int64_t vocab, int64_t ignore_index) {
  if (target == ignore_index) return TargetKind::kIgnored;
  return target >= 0 && target < vocab ? TargetKind::kCounts : TargetKind::kOutside;
}

template <typename C, typename T>
C loss_of(const T* row, int64_t target, TargetKind kind, C log_sum) {
  if (kind == TargetKind::kIgnored) return 0;
  if (kind == TargetKind::kOutside) return std::numeric_limits<C>::quiet_NaN();
  return log_sum - static_cast<C>(row[target]);
}

// Writes the gradient of a row's logits: `grad` times that of the row's loss. `to` may be `row`.
template <typename C, typename T>
void write_gradient(T* to, const T* row, int64_t vocab, int64_t target, TargetKind kind, C log_sum,
                    C grad) {
  if (kind != TargetKind::kCounts) {
    const C value = kind == TargetKind::kIgnored ? C(0) : std::numeric_limits<C>::quiet_NaN();
    std::fill(to, to + vocab, static_cast<T>(value));
    return;
  }
  const C chosen = exponential(all(static_cast<C>(row[target]) - log_sum))[0];
  const auto step = [log_sum, grad](T* to_at, const T* at) {
    store<C>(to_at, exponential(load<C>(at) - log_sum) * grad);
  };
  over<C>(vocab, step, to, row);
  to[target] = static_cast<T>((chosen - 1) * grad);
}

Two cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index) {
  const LogitSizes size = check_cross_entropy(logits, targets, ignore_index);
  Tensor losses = empty_rows(logits), log_sums = empty_rows(logits);
  with_dtype(logits.scalar_type(), [&]<typename T>(T) {
    using C = Compute<T>;
    C *loss = write<C>(losses), *log_sum = write<C>(log_sums);
    parallel_rows(size.rows, size.vocab, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* row = read<T>(logits) + i * size.row_stride;
        const int64_t target = read<int64_t>(targets)[i];
        log_sum[i] = log_sum_of<C>(row, size.vocab);
        loss[i] = loss_of(row, target, kind_of(target, size.vocab, ignore_index), log_sum[i]);
      }
    });
  });
  return {losses, log_sums};
}

Tensor cross_entropy_(const Tensor& logits, const Tensor& targets, const Tensor& scale,
                      int64_t ignore_index) {
  const LogitSizes size = check_cross_entropy_(logits, targets, scale, ignore_index);
  Tensor losses = empty_rows(logits);
  with_dtype(logits.scalar_type(), [&]<typename T>(T) {
    using C = Compute<T>;
    C* loss = write<C>(losses);
    const C grad = *read<float>(scale);
    parallel_rows(size.rows, size.vocab, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T* row = write<T>(logits) + i * size.row_stride;
        const int64_t target = read<int64_t>(targets)[i];
        const TargetKind kind = kind_of(target, size.vocab, ignore_index);
        const C log_sum = kind == TargetKind::kCounts ? log_sum_of<C>(row, size.vocab) : C(0);
        loss[i] = loss_of(row, target, kind, log_sum);
        write_gradient(row, row, size.vocab, target, kind, log_sum, grad);
      }
    });
  });
  return losses;
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& logits, const Tensor& targets,
                              const Tensor& log_sum, int64_t ignore_index) {
  const LogitSizes size =
      check_cross_entropy_backward(grad, logits, targets, log_sum, ignore_index);
  Tensor grad_logits = empty_contiguous(logits);
  with_dtype(logits.scalar_type(), [&]<typename T>(T) {
    using C = Compute<T>;
    parallel_rows(size.rows, size.vocab, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t target = read<int64_t>(targets)[i];
        write_gradient(write<T>(grad_logits) + i * size.vocab,
                       read<T>(logits) + i * size.row_stride, size.vocab, target,
                       kind_of(target, size.vocab, ignore_index), read<C>(log_sum)[i],
                       read<C>(grad)[i]);
      }
    });
  });
  return grad_logits;
}

template <typename T, typename S>
void scale_chunk(T* target, const S* source, int64_t count, float scale, bool accumulate) {
  using C =
      std::conditional_t<std::is_same_v<T, double> || std::is_same_v<S, double>, double, float>;
  const C factor = scale;
  const auto put = [factor](T* to, const S* from) { store<C>(to, load<C>(from) * factor); };
  const auto add = [factor](T* to, const S* from) {
    store<C>(to, load<C>(to) + load<C>(from) * factor);
  };
  if (accumulate)
    over<C>(count, add, target, source);
  else
    over<C>(count, put, target, source);
}

void scale_into(const Tensor& target, const Tensor& source, const std::optional<Tensor>& scale,
                bool accumulate) {
  const int64_t count = check_scale_into(target, source, scale, accumulate);
  const Tensor given = or_undefined(scale);
  const float factor = given.defined() ? *read<float>(given) : 1.0f;
  with_dtype(target.scalar_type(), [&]<typename T>(T) {
    with_dtype(source.scalar_type(), [&]<typename S>(S) {
      parallel(count, [&](int64_t, int64_t begin, int64_t end) {
        scale_chunk(write<T>(target) + begin, read<S>(source) + begin, end - begin, factor,
                    accumulate);
      });
    });
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, CPU, m) {
  m.impl("cross_entropy", cross_entropy);
  m.impl("cross_entropy_", cross_entropy_);
  m.impl("cross_entropy_backward", cross_entropy_backward);
  m.impl("scale_into", scale_into);
}

}  // namespace fsdp::kernels::cpu
