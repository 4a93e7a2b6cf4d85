// Lanes: 16 bytes of floats or doubles that are computed together, on any CPU.
//
// GCC's and clang's vector types compile to NEON and SSE2, which every supported machine has. The
// passes that use them are bound by memory, or by divisions that are no faster in wider registers,
// so one build serves all. AdamW, which a step with offload waits for, also has wider versions
// (registers.h).
// over() sends a remainder through the same instructions as everything else: an element's result
// never depends on its position.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/registers.h"

namespace fsdp::kernels::cpu {

template <typename T>
constexpr int64_t kLanes = 16 / sizeof(T);

template <typename T>
using Lanes = Vector<T, 16 / sizeof(T)>;

// The type in which a dtype is computed.
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Operations that vector types have no operator for.
inline Lanes<float> square_root(Lanes<float> x) {
  return Registers<16>::square_root(x);
}
#if defined(__aarch64__)
inline Lanes<double> square_root(Lanes<double> x) {
  return vsqrtq_f64(x);
}
inline Lanes<double> first_two(Lanes<float> x) {
  return vcvt_f64_f32(vget_low_f32(x));
}
inline Lanes<double> last_two(Lanes<float> x) {
  return vcvt_high_f64_f32(x);
}
#else
inline Lanes<double> square_root(Lanes<double> x) {
  return _mm_sqrt_pd(x);
}
inline Lanes<double> first_two(Lanes<float> x) {
  return _mm_cvtps_pd(x);
}
inline Lanes<double> last_two(Lanes<float> x) {
  return _mm_cvtps_pd(_mm_movehl_ps(x, x));
}
#endif

// kLanes<C> elements from memory.
template <typename C, typename T>
Lanes<C> load(const T* from) {
  if constexpr (std::is_same_v<T, c10::BFloat16> && std::is_same_v<C, float>) {
    return load_bfloat16<16>(from);
  } else {
    Lanes<C> x = {};
    if constexpr (std::is_same_v<T, C>)
      std::memcpy(&x, from, sizeof(x));
    else
      for (int i = 0; i < kLanes<C>; ++i) x[i] = static_cast<C>(from[i]);
    return x;
  }
}

// Rounds to nearest even, as LibTorch does.
template <typename C, typename T>
void store(T* to, Lanes<C> x) {
  if constexpr (std::is_same_v<T, C>) {
    std::memcpy(to, &x, sizeof(x));
  } else if constexpr (std::is_same_v<T, c10::BFloat16> && std::is_same_v<C, float>) {
    store_bfloat16<16>(to, x);
  } else {
    for (int i = 0; i < kLanes<C>; ++i) to[i] = static_cast<T>(x[i]);
  }
}

// The last few elements of an array, copied into a full set of lanes.
template <typename T, int64_t lanes>
class Rest {
 public:
  Rest(T* from, int64_t count) : from_(from), bytes_(count * sizeof(T)) {
    std::memcpy(static_cast<void*>(copy_), from_, bytes_);
  }
  ~Rest() {
    if constexpr (!std::is_const_v<T>)
      std::memcpy(static_cast<void*>(from_), static_cast<const void*>(copy_), bytes_);
  }
  Rest(const Rest&) = delete;
  Rest& operator=(const Rest&) = delete;
  operator T*() { return copy_; }

 private:
  T* from_;
  size_t bytes_;
  std::remove_const_t<T> copy_[lanes] = {};
};

// Prefetch distance in elements: a core that works in 16 bytes looks less far ahead by itself than
// one with wide registers (saves a sixth of the time of AdamW on a Xeon).
constexpr int64_t kAhead = 256;

// Calls step(arrays + i…) for every kLanes<C> elements of the arrays. Flattened, because a long
// step would otherwise become a function of its own, called for every few elements.
template <typename C, typename Step, typename... T>
[[gnu::flatten]] void over(int64_t count, const Step& given, T*... arrays) {
  constexpr int64_t lanes = kLanes<C>;
  const Step step = given;  // a local copy, so that its constants stay in registers
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    (__builtin_prefetch(arrays + i + kAhead), ...);
    step((arrays + i)...);
    step((arrays + i + lanes)...);
    step((arrays + i + 2 * lanes)...);
    step((arrays + i + 3 * lanes)...);
  }
  for (; i + lanes <= count; i += lanes) step((arrays + i)...);
  if (i < count) step(static_cast<T*>(Rest<T, lanes>(arrays + i, count - i))...);
}

}  // namespace fsdp::kernels::cpu
