// Registers: the vector operations that passes over float32 arrays need, in registers of 16, 32 and
// 64 bytes.
//
// GCC's and clang's vector types provide the arithmetic. Below is what they have no operator for,
// for each width that the file being compiled may use: 16 bytes is NEON or SSE2, which every
// supported machine has; 32 is AVX2 and 64 is AVX-512, in files compiled for them. SVE isn't used:
// it is 16 bytes wide on most machines that have it, and no faster than NEON for code that waits
// for memory.
//
// A file compiled for a wider CPU must not emit functions that other files could be linked to. So
// this header includes nothing with code of its own, and everything in it is always inlined.
#pragma once

#include <cstdint>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <immintrin.h>
#else
#error "fsdp: LibTorch is built for x86_64 and aarch64 only"
#endif

#define FSDP_INLINE [[gnu::always_inline]] inline

namespace fsdp::kernels::cpu {

template <typename T, int count>
using Vector __attribute__((vector_size(count * sizeof(T)))) = T;

template <int bytes>
using Floats = Vector<float, bytes / 4>;
template <int bytes>
using Words = Vector<uint32_t, bytes / 4>;
template <int bytes>
using Integers = Vector<int32_t, bytes / 4>;

// Shorts in memory are bfloat16 numbers or rests (kernels/split.h), one per float of a register.
//   high:                  loads shorts into the upper halves of words; the lower halves are 0
//   add:                   adds signed shorts from memory to words
//   store_high, store_low: store the upper or the lower halves of words
template <int bytes>
struct Registers;

#if defined(__aarch64__)
template <>
struct Registers<16> {
  FSDP_INLINE static Floats<16> square_root(Floats<16> x) { return vsqrtq_f32(x); }
  FSDP_INLINE static Words<16> high(const void* from) {
    uint16x4_t four;
    __builtin_memcpy(&four, from, sizeof(four));
    return vshll_n_u16(four, 16);
  }
  FSDP_INLINE static Words<16> add(Words<16> x, const void* from) {
    int16x4_t four;
    __builtin_memcpy(&four, from, sizeof(four));
    return reinterpret_cast<Words<16>>(vaddw_s16(reinterpret_cast<int32x4_t>(x), four));
  }
  FSDP_INLINE static void store_high(void* to, Words<16> x) {
    const auto four = vshrn_n_u32(x, 16);
    __builtin_memcpy(to, &four, sizeof(four));
  }
  FSDP_INLINE static void store_low(void* to, Words<16> x) {
    const auto four = vmovn_u32(x);
    __builtin_memcpy(to, &four, sizeof(four));
  }
};
#else
template <>
struct Registers<16> {
  FSDP_INLINE static Floats<16> square_root(Floats<16> x) { return _mm_sqrt_ps(x); }
  FSDP_INLINE static Words<16> high(const void* from) {
    const auto four = _mm_loadl_epi64(static_cast<const __m128i*>(from));
    return reinterpret_cast<Words<16>>(_mm_unpacklo_epi16(_mm_setzero_si128(), four));
  }
  FSDP_INLINE static Words<16> add(Words<16> x, const void* from) {
    const auto four = _mm_loadl_epi64(static_cast<const __m128i*>(from));
    return x + reinterpret_cast<Words<16>>(_mm_srai_epi32(_mm_unpacklo_epi16(four, four), 16));
  }
  FSDP_INLINE static void store_high(void* to, Words<16> x) {
    const auto number = reinterpret_cast<__m128i>(reinterpret_cast<Integers<16>>(x) >> 16);
    // Packing saturates signed numbers; these all fit.
    _mm_storel_epi64(static_cast<__m128i*>(to), _mm_packs_epi32(number, number));
  }
  FSDP_INLINE static void store_low(void* to, Words<16> x) { store_high(to, x << 16); }
};
#endif

#if defined(__AVX2__)
template <>
struct Registers<32> {
  FSDP_INLINE static Floats<32> square_root(Floats<32> x) { return _mm256_sqrt_ps(x); }
  FSDP_INLINE static Words<32> high(const void* from) {
    return reinterpret_cast<Words<32>>(_mm256_cvtepu16_epi32(eight(from))) << 16;
  }
  FSDP_INLINE static Words<32> add(Words<32> x, const void* from) {
    return x + reinterpret_cast<Words<32>>(_mm256_cvtepi16_epi32(eight(from)));
  }
  FSDP_INLINE static void store_high(void* to, Words<32> x) {
    const auto number = reinterpret_cast<__m256i>(reinterpret_cast<Integers<32>>(x) >> 16);
    // Each half of the register packs its own four, which end up in the register's first and third
    // quarters.
    const auto packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(number, number), 0b1000);
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }
  FSDP_INLINE static void store_low(void* to, Words<32> x) { store_high(to, x << 16); }
  FSDP_INLINE static __m128i eight(const void* from) {
    return _mm_loadu_si128(static_cast<const __m128i*>(from));
  }
};
#endif

#if defined(__AVX512F__)
template <>
struct Registers<64> {
  // Every lane. Without a mask g++ 12 warns about its own headers (GCC bug 105593).
  static constexpr __mmask16 kAll = 0xffff;
  FSDP_INLINE static Floats<64> square_root(Floats<64> x) { return _mm512_maskz_sqrt_ps(kAll, x); }
  FSDP_INLINE static Words<64> high(const void* from) {
    return reinterpret_cast<Words<64>>(_mm512_maskz_cvtepu16_epi32(kAll, sixteen(from))) << 16;
  }
  FSDP_INLINE static Words<64> add(Words<64> x, const void* from) {
    return x + reinterpret_cast<Words<64>>(_mm512_maskz_cvtepi16_epi32(kAll, sixteen(from)));
  }
  FSDP_INLINE static void store_high(void* to, Words<64> x) { store_low(to, x >> 16); }
  FSDP_INLINE static void store_low(void* to, Words<64> x) {
    const auto packed = _mm512_maskz_cvtepi32_epi16(kAll, reinterpret_cast<__m512i>(x));
    _mm256_storeu_si256(static_cast<__m256i*>(to), packed);
  }
  FSDP_INLINE static __m256i sixteen(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
};
#endif

// --- on top of these, for any width ---

template <int bytes>
FSDP_INLINE Floats<bytes> load_floats(const float* from) {
  Floats<bytes> x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}

template <int bytes>
FSDP_INLINE void store_floats(float* to, Floats<bytes> x) {
  __builtin_memcpy(to, &x, sizeof(x));
}

template <int bytes>
FSDP_INLINE Floats<bytes> load_bfloat16(const void* from) {
  return reinterpret_cast<Floats<bytes>>(Registers<bytes>::high(from));
}

// Rounds to nearest even, as LibTorch does.
template <int bytes>
FSDP_INLINE void store_bfloat16(void* to, Floats<bytes> x) {
  const auto bits = reinterpret_cast<Words<bytes>>(x);
  const Words<bytes> rounded = bits + (0x7fffu + ((bits >> 16) & 1u));
  const Words<bytes> nan = rounded * 0 + 0x7fc00000u;  // rounding could turn it into infinity
  Registers<bytes>::store_high(to, x == x ? rounded : nan);
}

// Numbers stored in two halves; see kernels/split.h. The rest is the lower half read as a signed
// number; adding 0x8000 carries the difference into the upper half.
template <int bytes>
FSDP_INLINE Floats<bytes> load_halves(const void* high, const void* rest) {
  using R = Registers<bytes>;
  return reinterpret_cast<Floats<bytes>>(R::add(R::high(high), rest));
}

template <int bytes>
FSDP_INLINE void store_halves(void* high, void* rest, Floats<bytes> x) {
  const auto given = reinterpret_cast<Words<bytes>>(x);
  const Words<bytes> nan = given * 0 + 0x7fc00000u;
  const Words<bytes> bits = x == x ? given : nan;
  Registers<bytes>::store_high(high, bits + 0x8000u);
  Registers<bytes>::store_low(rest, bits);
}

}  // namespace fsdp::kernels::cpu
