// Functions of lanes that have no instruction: exponentials and functions built on them, and sums
// over arrays.
//
// In float32 they are polynomials that minimise the largest relative error; results are within two
// units in the last place. In float64, which only references use, they call the C library.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/cpu/lanes.h"

namespace fsdp::kernels::cpu {

template <typename C>
inline Lanes<C> all(C x) {
  return Lanes<C>{} + x;
}

// e^x for x up to 89; 0 below -87.7, infinity above 88.3.
inline Lanes<float> exponential(Lanes<float> x) {
  const Lanes<float> kLowest = all(-88.0f);
  x = x < kLowest ? kLowest : x;
  // x = n ln 2 + r: adding 1.5 * 2^23 rounds to an integer and leaves n in the lowest bits.
  const Lanes<float> shifted = x * 1.44269504f + 12582912.0f;
  const Lanes<float> n = shifted - 12582912.0f;
  const Lanes<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  const Lanes<float> r2 = r * r;
  const Lanes<float> high = r2 * 1.38435947539e-3f + (r * 8.37419550953e-3f + 4.16680049444e-2f);
  const Lanes<float> middle = high * r2 + (r * 0.166664308033f + 0.499999941908f);
  const Lanes<float> p = middle * r2 + (r + 1.0f);
  // 2^n from its exponent bits, which are those of 0 for n = -127 and of infinity for n = 128.
  const auto power = (std::bit_cast<Lanes<int32_t>>(shifted) << 23) + 0x3f800000;
  return p * std::bit_cast<Lanes<float>>(power);
}

inline Lanes<double> exponential(Lanes<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

template <typename V>
inline V sigmoid(V x) {
  const V least = V{} - (sizeof(x[0]) == sizeof(float) ? 89 : 709);
  return 1 / (1 + exponential(x < least ? -least : -x));
}

// The normal distribution at x.
template <typename C>
struct Normal {
  Lanes<C> cdf;      // probability below x
  Lanes<C> density;  // its derivative
};

inline Normal<float> normal(Lanes<float> x) {
  const Lanes<float> z = x < 0 ? -x : x;
  const Lanes<float> e = exponential(z * z * -0.5f);
  // Probability beyond z: e times a function that falls like 1 / z, so a polynomial in t.
  const Lanes<float> t = 1.0f / (z * 0.3f + 1.0f);
  const Lanes<float> t2 = t * t;
  const Lanes<float> high =
      (t * 0.0356747875378f - 0.157203088244f) * t2 + (t * 0.206353430199f - 0.0536834985919f);
  const Lanes<float> low =
      (t * 0.128561512672f + 0.0999135365869f) * t2 + (t * 0.120753947513f + 0.119629299459f);
  const Lanes<float> p = high * (t2 * t2) + low;
  const Lanes<float> beyond = p * t * e;
  return {x < 0 ? beyond : 1.0f - beyond, e * 0.398942280f};
}

inline Normal<double> normal(Lanes<double> x) {
  Normal<double> result = {};
  for (int i = 0; i < kLanes<double>; ++i) {
    result.cdf[i] = std::erfc(-x[i] * M_SQRT1_2) / 2;
    result.density[i] = std::exp(-x[i] * x[i] / 2) * 0.5 * M_SQRT1_2 * M_2_SQRTPI;
  }
  return result;
}

// Several sums computed in one pass.
template <typename C, int n>
struct Sums {
  Lanes<C> of[n] = {};

  void add(const Sums& other) {
    for (int i = 0; i < n; ++i) of[i] += other.of[i];
  }
  C total(int i) const {
    C sum = of[i][0];
    for (int lane = 1; lane < kLanes<C>; ++lane) sum += of[i][lane];
    return sum;
  }
};

// Adds up the Sums<C, n> that step(arrays + i…) returns for every kLanes<C> elements of the arrays,
// in an order that depends only on `count`.
template <typename C, int n, typename Step, typename... T>
[[gnu::flatten]] Sums<C, n> sums_over(int64_t count, const Step& given, T*... arrays) {
  constexpr int64_t lanes = kLanes<C>;
  const Step step = given;
  Sums<C, n> a, b, c, d;
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    a.add(step((arrays + i)...));
    b.add(step((arrays + i + lanes)...));
    c.add(step((arrays + i + 2 * lanes)...));
    d.add(step((arrays + i + 3 * lanes)...));
  }
  for (; i + lanes <= count; i += lanes) a.add(step((arrays + i)...));
  if (i < count) {
    Sums<C, n> rest = step(static_cast<T*>(Rest<T, lanes>(arrays + i, count - i))...);
    for (auto& sum : rest.of)
      for (int64_t lane = count - i; lane < lanes; ++lane) sum[lane] = 0;
    b.add(rest);
  }
  a.add(b);
  c.add(d);
  a.add(c);
  return a;
}

}  // namespace fsdp::kernels::cpu
