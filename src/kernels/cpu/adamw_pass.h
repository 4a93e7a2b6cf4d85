// AdamW over arrays in memory, one function per register width; adamw.cpp calls them with tensors.
//
// Every width gives the same bits: elements are never added to each other, and on x86_64 none of
// these files is compiled with fused multiply-add, which only CPUs with wide registers have.
#pragma once

#include <cstdint>

namespace fsdp::kernels::cpu {

// The constants of a step, rounded once from float64.
template <typename C>
struct AdamWNumbers {
  C scale, beta1, rest1, beta2, rest2, eps, keep, size, correction;
};

// All arrays have the same length. bfloat16 numbers are given as their bits.
struct AdamWArrays {
  float* master = nullptr;  // null if it is split into `low` and `rest` (kernels/split.h)
  uint16_t* low = nullptr;  // half of a split master, or the bfloat16 copy of a whole one, or null
  int16_t* rest = nullptr;  // of a split master
  const void* grad = nullptr;
  bool short_grad = false;  // bfloat16, else float32
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
};

// Updates [begin, end).
using AdamWPass = void (*)(const AdamWArrays& arrays, const AdamWNumbers<float>& numbers,
                           int64_t begin, int64_t end);

void adamw_16(const AdamWArrays&, const AdamWNumbers<float>&, int64_t begin, int64_t end);
#if defined(__x86_64__)
void adamw_32(const AdamWArrays&, const AdamWNumbers<float>&, int64_t begin, int64_t end);  // AVX2
void adamw_64(const AdamWArrays&, const AdamWNumbers<float>&, int64_t begin,
              int64_t end);  // AVX-512
#endif

}  // namespace fsdp::kernels::cpu
