// Lanes of float32 numbers that are held in two halves; see kernels/split.h.
#pragma once

#include "kernels/cpu/lanes.h"

namespace fsdp::kernels::cpu {

#if defined(__aarch64__)
inline Lanes<int32_t> load_short(const int16_t* from) {
  int16x4_t four;
  std::memcpy(&four, from, sizeof(four));
  return vmovl_s16(four);
}
inline void store_short(int16_t* to, Lanes<int32_t> x) {
  const auto four = vmovn_s32(x);
  std::memcpy(to, &four, sizeof(four));
}
#else
inline Lanes<int32_t> load_short(const int16_t* from) {
  const auto four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return std::bit_cast<Lanes<int32_t>>(_mm_srai_epi32(_mm_unpacklo_epi16(four, four), 16));
}
inline void store_short(int16_t* to, Lanes<int32_t> x) {  // of numbers that fit
  const auto wide = std::bit_cast<__m128i>(x);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(wide, wide));
}
#endif

inline Lanes<float> load_split(const c10::BFloat16* high, const int16_t* rest) {
  const auto upper = std::bit_cast<Lanes<uint32_t>>(load_float(high));
  return std::bit_cast<Lanes<float>>(upper + std::bit_cast<Lanes<uint32_t>>(load_short(rest)));
}

inline void store_split(c10::BFloat16* high, int16_t* rest, Lanes<float> x) {
  const auto given = std::bit_cast<Lanes<uint32_t>>(x);
  const Lanes<uint32_t> nan = given * 0 + 0x7fc00000u;
  const Lanes<uint32_t> bits = x == x ? given : nan;
  const Lanes<uint32_t> rounded = bits + 0x8000u;
  store_high_halves(high, rounded);
  store_short(rest, std::bit_cast<Lanes<int32_t>>(bits - (rounded & 0xffff0000u)));
}

}  // namespace fsdp::kernels::cpu
