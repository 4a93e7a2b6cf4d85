// The loop behind adamw_16, adamw_32 and adamw_64: written once, compiled for each width.
//
// On all cores it is bound by memory, so each array is read once and written once, including the
// halves of a split master or the copy of a whole one, and prefetched a few lines ahead. On one
// core it is bound by its divisions and square roots, which wide registers don't speed up.
#pragma once

#include "kernels/cpu/adamw_next.h"
#include "kernels/cpu/adamw_pass.h"
#include "kernels/cpu/registers.h"

namespace fsdp::kernels::cpu {
namespace {  // so that files don't share instantiations

enum class Master { kWhole, kWithCopy, kSplit };

// Prefetch distance and step, in elements. A step is a cache line of shorts.
constexpr int64_t kAhead = 256;
constexpr int64_t kLine = 32;

template <int bytes, Master kind, bool short_grad>
struct AdamWLoop {
  static constexpr int64_t kLanes = bytes / 4;

  // Updates elements [i, i + kLanes) of the states and writes the new master to `w_at`.
  FSDP_INLINE static void compute(const AdamWArrays& a, const AdamWNumbers<float>& k, int64_t i,
                                  float* w_at) {
    Floats<bytes> g, w;
    if constexpr (short_grad)
      g = load_bfloat16<bytes>(static_cast<const uint16_t*>(a.grad) + i);
    else
      g = load_floats<bytes>(static_cast<const float*>(a.grad) + i);
    if constexpr (kind == Master::kSplit)
      w = load_halves<bytes>(a.low + i, a.rest + i);
    else
      w = load_floats<bytes>(a.master + i);
    Floats<bytes> m = load_floats<bytes>(a.exp_avg + i);
    Floats<bytes> v = load_floats<bytes>(a.exp_avg_sq + i);
    const auto root = [](Floats<bytes> x) { return Registers<bytes>::square_root(x); };
    w = adamw_next(w, g * k.scale, m, v, k, root);
    store_floats<bytes>(a.exp_avg + i, m);
    store_floats<bytes>(a.exp_avg_sq + i, v);
    store_floats<bytes>(w_at, w);
  }

  // Writes what is derived from the master: its halves, or its copy.
  FSDP_INLINE static void finish(const AdamWArrays& a, int64_t i, const float* w_at) {
    if constexpr (kind == Master::kSplit)
      store_halves<bytes>(a.low + i, a.rest + i, load_floats<bytes>(w_at));
    if constexpr (kind == Master::kWithCopy)
      store_bfloat16<bytes>(a.low + i, load_floats<bytes>(w_at));
  }

  template <typename T>
  FSDP_INLINE static void ask(const T* from) {
    __builtin_prefetch(from + kAhead);
    if constexpr (sizeof(T) == 4) __builtin_prefetch(from + kAhead + kLine / 2);
  }

  FSDP_INLINE static void ask(const AdamWArrays& a, int64_t i) {
    if constexpr (short_grad)
      ask(static_cast<const uint16_t*>(a.grad) + i);
    else
      ask(static_cast<const float*>(a.grad) + i);
    if constexpr (kind != Master::kSplit) ask(a.master + i);
    if constexpr (kind != Master::kWhole) ask(a.low + i);
    if constexpr (kind == Master::kSplit) ask(a.rest + i);
    ask(a.exp_avg + i);
    ask(a.exp_avg_sq + i);
  }

  // The last few elements, in temporary arrays that are long enough for a full step.
  [[gnu::noinline]] static void rest(const AdamWArrays& a, const AdamWNumbers<float>& k, int64_t i,
                                     int64_t count) {
    float master[kLanes] = {}, grad[kLanes] = {}, exp_avg[kLanes] = {}, exp_avg_sq[kLanes] = {};
    uint16_t low[kLanes] = {};
    int16_t rest[kLanes] = {};
    const auto copy = [&](auto* to, const auto* from) {
      __builtin_memcpy(to, from, count * sizeof(*from));
    };
    if constexpr (short_grad)
      copy(grad, static_cast<const uint16_t*>(a.grad) + i);
    else
      copy(grad, static_cast<const float*>(a.grad) + i);
    if constexpr (kind != Master::kSplit) copy(master, a.master + i);
    if constexpr (kind == Master::kSplit) copy(low, a.low + i), copy(rest, a.rest + i);
    copy(exp_avg, a.exp_avg + i), copy(exp_avg_sq, a.exp_avg_sq + i);
    const AdamWArrays copies{master, low, rest, grad, short_grad, exp_avg, exp_avg_sq};
    compute(copies, k, 0, master);
    finish(copies, 0, master);
    if constexpr (kind != Master::kSplit) copy(a.master + i, master);
    if constexpr (kind != Master::kWhole) copy(a.low + i, low);
    if constexpr (kind == Master::kSplit) copy(a.rest + i, rest);
    copy(a.exp_avg + i, exp_avg), copy(a.exp_avg_sq + i, exp_avg_sq);
  }

  // A line is finished while the next is computed: work that waits for no division fills the time
  // of work that does (saves a seventh of the time of a split master on a Neoverse N1).
  static void run(const AdamWArrays& given, const AdamWNumbers<float>& numbers, int64_t begin,
                  int64_t end) {
    const AdamWArrays a = given;  // local copies, so that they stay in registers
    const AdamWNumbers<float> k = numbers;
    alignas(64) float held[2 * kLine];  // the last two lines of a split master
    const auto place = [&](int64_t i) {
      return kind == Master::kSplit ? held + (i - begin) % (2 * kLine) : a.master + i;
    };
    int64_t i = begin;
    if (i + kLine <= end) {
      ask(a, i);
      for (int64_t at = 0; at < kLine; at += kLanes) compute(a, k, i + at, place(i + at));
      for (i += kLine; i + kLine <= end; i += kLine) {
        ask(a, i);
        float* const now = place(i);
        const float* const before = place(i - kLine);
#pragma GCC unroll 8
        for (int64_t at = 0; at < kLine; at += kLanes) {
          compute(a, k, i + at, now + at);
          finish(a, i - kLine + at, before + at);
        }
      }
      for (int64_t at = -kLine; at < 0; at += kLanes) finish(a, i + at, place(i + at));
    }
    while (i < end) {
      const int64_t count = end - i < kLanes ? end - i : kLanes;
      rest(a, k, i, count);
      i += count;
    }
  }
};

template <int bytes, Master kind>
void adamw_of(const AdamWArrays& a, const AdamWNumbers<float>& k, int64_t begin, int64_t end) {
  if (a.short_grad)
    AdamWLoop<bytes, kind, true>::run(a, k, begin, end);
  else
    AdamWLoop<bytes, kind, false>::run(a, k, begin, end);
}

template <int bytes>
void adamw_loop(const AdamWArrays& a, const AdamWNumbers<float>& k, int64_t begin, int64_t end) {
  if (!a.master)
    adamw_of<bytes, Master::kSplit>(a, k, begin, end);
  else if (a.low)
    adamw_of<bytes, Master::kWithCopy>(a, k, begin, end);
  else
    adamw_of<bytes, Master::kWhole>(a, k, begin, end);
}

}  // namespace
}  // namespace fsdp::kernels::cpu
