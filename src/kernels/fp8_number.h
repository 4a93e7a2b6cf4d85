// Numbers of one byte: e4m3 (4 bits of exponent, 3 of mantissa, largest 448) and e5m2 (largest
// 57344), and the factors that bring a tensor into their range. The same bits in C++ and CUDA.
//
// Factors are powers of two: multiplying by one rounds nothing (but what falls below the least
// float32), and needs no division, which compilers round differently.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/anywhere.h"

namespace fsdp::kernels::fp8 {

FSDP_ANYWHERE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

FSDP_ANYWHERE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

struct Factors {
  float multiply;  // before rounding to a byte
  float restore;   // 1 / multiply
};

// The factors for numbers of which `amax` is the largest magnitude: the largest power of two that
// keeps it in range. NaN for one that isn't finite, so that whatever is computed isn't finite
// either, and the step is skipped.
FSDP_ANYWHERE Factors factors_of(float amax, bool e5m2) {
  const uint32_t bits = bits_of(amax) & 0x7fffffffu;
  if (bits >= 0x7f800000u) return {float_of(0x7fc00000u), float_of(0x7fc00000u)};
  // Both formats end at 1.75 times a power of two.
  const int top = e5m2 ? 15 : 8;
  int exponent = static_cast<int>(bits >> 23) - 127 - top;
  if ((bits & 0x7fffffu) > 0x600000u) ++exponent;
  if (bits == 0) exponent = 0;
  if (exponent < -126) exponent = -126;
  return {float_of(static_cast<uint32_t>(127 - exponent) << 23),
          float_of(static_cast<uint32_t>(127 + exponent) << 23)};
}

// x rounded to the nearest number, ties to even; beyond the largest one, that. NaN becomes 0x7f.
FSDP_ANYWHERE uint8_t encode(float x, bool e5m2) {
  const int dropped = e5m2 ? 21 : 20;        // bits of a float32's mantissa
  const uint32_t bias = e5m2 ? 112u : 120u;  // between the exponents
  const float largest = e5m2 ? 57344.0f : 448.0f;
  const float least_normal = e5m2 ? 0x1p-14f : 0x1p-6f;
  const float rounder = e5m2 ? 0x1p7f : 0x1p14f;  // its last place is the least number
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  const float size = float_of(magnitude);
  uint32_t code;
  if (size >= largest)
    code = e5m2 ? 0x7b : 0x7e;
  else if (size < least_normal)
    code = bits_of(size + rounder) - bits_of(rounder);
  else
    code = ((magnitude + ((1u << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1u)) >> dropped) -
           (bias << (23 - dropped));
  return static_cast<uint8_t>(code | (bits >> 31 << 7));
}

FSDP_ANYWHERE float decode(uint8_t code, bool e5m2) {
  const int kept = e5m2 ? 2 : 3;
  const int bias = e5m2 ? 15 : 7;
  const uint32_t magnitude = code & 0x7fu, exponent = magnitude >> kept;
  const uint32_t mantissa = magnitude & ((1u << kept) - 1);
  float x;
  if (!e5m2 && magnitude == 0x7f) {
    x = float_of(0x7fc00000u);
  } else if (e5m2 && exponent == 31) {
    x = float_of(mantissa == 0 ? 0x7f800000u : 0x7fc00000u);
  } else if (exponent == 0) {
    x = static_cast<float>(mantissa) * (e5m2 ? 0x1p-16f : 0x1p-9f);
  } else {
    x = float_of((static_cast<uint32_t>(static_cast<int>(exponent) - bias + 127) << 23) |
                 (mantissa << (23 - kept)));
  }
  return (code & 0x80u) != 0 ? -x : x;
}

}  // namespace fsdp::kernels::fp8
