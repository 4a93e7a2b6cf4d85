// SGD on the CPU, and the sums that clipping and loss scaling need: one threaded pass each.
#include "kernels/update.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/masters.h"
#include "kernels/cpu/parallel.h"

namespace fsdp::kernels::cpu {
namespace {

template <typename C>
struct SGDConstants {
  SGDConstants(const SGDStep& step, float factor)
      : scale(static_cast<C>(step.maximize ? -factor : factor)),
        lr(static_cast<C>(step.lr)),
        momentum(static_cast<C>(step.momentum)),
        take(static_cast<C>(1 - step.dampening)),
        decay(static_cast<C>(step.weight_decay)),
        nesterov(step.nesterov),
        first(step.first) {}

  C scale, lr, momentum, take, decay;
  bool nesterov, first;
};

template <typename T, typename G>
void plain_sgd(const SGDTensors& t, const SGDStep& step, float factor) {
  using C = Compute<T>;
  const SGDConstants<C> k(step, factor);
  const G* grad = read<G>(t.grad) + t.grad_begin;
  const auto lanes = [k](T* w_at, const G* g_at) {
    const Lanes<C> w = load<C>(w_at);
    store<C>(w_at, w - k.lr * (load<C>(g_at) * k.scale + w * k.decay));
  };
  update<T>(t, [&](T* master, int64_t begin, int64_t end) {
    over<C>(end - begin, lanes, master, grad + begin);
  });
}

template <typename T, typename G>
void momentum_sgd(const SGDTensors& t, const SGDStep& step, float factor) {
  using C = Compute<T>;
  const SGDConstants<C> k(step, factor);
  T* buffer = write<T>(t.momentum_buffer);
  const G* grad = read<G>(t.grad) + t.grad_begin;
  const auto lanes = [k](T* w_at, const G* g_at, T* m_at) {
    const Lanes<C> w = load<C>(w_at);
    const Lanes<C> g = load<C>(g_at) * k.scale + w * k.decay;
    // The first buffer is the undamped gradient; the memory may hold anything before.
    const Lanes<C> m = k.first ? g : load<C>(m_at) * k.momentum + g * k.take;
    const Lanes<C> next = w - k.lr * (k.nesterov ? g + m * k.momentum : m);
    store<C>(m_at, m);
    store<C>(w_at, next);
  };
  update<T>(t, [&](T* master, int64_t begin, int64_t end) {
    over<C>(end - begin, lanes, master, grad + begin, buffer + begin);
  });
}

// Adds |x|^p (or keeps the largest |x|) in float64, per lane: the chunk fixes the order of
// additions, and a product of two float32 numbers is exact.
struct Squares {
  template <typename V>
  V operator()(V sum, V x) const {
    return sum + x * x;
  }
};

struct Magnitudes {
  template <typename V>
  V operator()(V sum, V x) const {
    return sum + (x < 0 ? -x : x);
  }
};

struct Largest {
  template <typename V>
  V operator()(V most, V x) const {
    const V size = x < 0 ? -x : x;
    return ((size <= most) | (most != most)) ? most : size;  // a NaN is taken, and stays
  }
};

struct Powers {
  double p;
  Lanes<double> operator()(Lanes<double> sum, Lanes<double> x) const {
    for (int i = 0; i < kLanes<double>; ++i) sum[i] += std::pow(std::abs(x[i]), p);
    return sum;
  }
};

template <typename T, typename Add>
void add_four(const T* from, const Add& add, Lanes<double>& a, Lanes<double>& b) {
  if constexpr (std::is_same_v<T, double>) {
    a = add(a, load<double>(from));
    b = add(b, load<double>(from + 2));
  } else {
    const auto x = load<float>(from);
    a = add(a, first_two(x));
    b = add(b, last_two(x));
  }
}

// The value of one chunk: eight running values, combined in a fixed order.
template <typename T, typename Add, typename Combine>
double chunk_value(const T* from, int64_t count, const Add& add, const Combine& combine) {
  Lanes<double> a = {}, b = {}, c = {}, d = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    add_four(from + i, add, a, b);
    add_four(from + i + 4, add, c, d);
  }
  if (i < count) {
    T rest[8] = {};
    std::copy(from + i, from + count, rest);
    add_four(rest, add, a, b);
    add_four(rest + 4, add, c, d);
  }
  double total = 0;
  for (const auto& lanes : {a, b, c, d}) total = combine(combine(total, lanes[0]), lanes[1]);
  return total;
}

template <typename Add, typename Combine>
double reduce(const at::Tensor& tensor, const Add& add, const Combine& combine) {
  std::vector<double> parts(chunks(tensor.numel()));
  with_dtype(tensor.scalar_type(), [&]<typename T>(T) {
    const T* from = read<T>(tensor);
    parallel(tensor.numel(), [&](int64_t chunk, int64_t begin, int64_t end) {
      parts[chunk] = chunk_value(from + begin, end - begin, add, combine);
    });
  });
  double total = 0;
  for (double part : parts) total = combine(total, part);
  return total;
}

// Exponent bits; all are set only in infinities and NaNs.
template <typename T>
struct Exponent;
template <>
struct Exponent<float> {
  using Bits = uint32_t;
  static constexpr Bits kAll = 0x7f800000u;
};
template <>
struct Exponent<double> {
  using Bits = uint64_t;
  static constexpr Bits kAll = 0x7ff0000000000000u;
};
template <>
struct Exponent<c10::BFloat16> {
  using Bits = uint16_t;
  static constexpr Bits kAll = 0x7f80u;
};
template <>
struct Exponent<c10::Half> {
  using Bits = uint16_t;
  static constexpr Bits kAll = 0x7c00u;
};

}  // namespace

void sgd(const SGDTensors& t, const SGDStep& step, float factor) {
  with_dtype(master_type(t), [&]<typename T>(T) {
    with_grad<T>(t.grad, [&]<typename G>(G) {
      if (step.momentum != 0)
        momentum_sgd<T, G>(t, step, factor);
      else
        plain_sgd<T, G>(t, step, factor);
    });
  });
}

double sum_of_powers(const at::Tensor& tensor, double p) {
  const auto plus = [](double a, double b) { return a + b; };
  if (p == 2) return reduce(tensor, Squares{}, plus);
  if (p == 1) return reduce(tensor, Magnitudes{}, plus);
  if (std::isinf(p))
    return reduce(tensor, Largest{}, [](double a, double b) { return b <= a || a != a ? a : b; });
  return reduce(tensor, Powers{p}, plus);
}

int64_t count_not_finite(const at::Tensor& tensor) {
  std::vector<int64_t> parts(chunks(tensor.numel()));
  with_dtype(tensor.scalar_type(), [&]<typename T>(T) {
    using Bits = typename Exponent<T>::Bits;
    const auto* from = static_cast<const Bits*>(tensor.const_data_ptr());
    parallel(tensor.numel(), [&](int64_t chunk, int64_t begin, int64_t end) {
      int32_t count = 0;
      for (int64_t i = begin; i < end; ++i)
        count += (from[i] & Exponent<T>::kAll) == Exponent<T>::kAll;
      parts[chunk] = count;
    });
  });
  int64_t total = 0;
  for (int64_t part : parts) total += part;
  return total;
}

}  // namespace fsdp::kernels::cpu
