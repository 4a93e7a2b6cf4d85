// AdamW over arrays in memory, once for each width of registers; adamw.cpp hands it tensors.
//
// Every width gives the same bits: an element is never added to another, and on x86_64 no file of
// these fuses a product with a sum, which only CPUs with wide registers could.
#pragma once

#include <cstdint>

namespace fsdp::kernels::cpu {

// The constants of a step, rounded once from float64.
template <typename C>
struct AdamWNumbers {
  C scale, beta1, rest1, beta2, rest2, eps, keep, size, correction;
};

// All of one length. A bfloat16 is its bits.
struct AdamWArrays {
  float* master = nullptr;  // null where it is split into `low` and `rest` (kernels/split.h)
  uint16_t* low = nullptr;  // or null; beside a whole master its copy in bfloat16
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
