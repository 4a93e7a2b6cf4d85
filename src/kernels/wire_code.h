// The arithmetic behind wire.h, the same bits in C++ and CUDA and on every machine: what a block's
// scale is, and how a scaled number becomes a code and a number again.
//
// Files that include this are compiled without fused products and sums. Magnitudes are compared as
// the integers that a float32's bits are without its sign: NaN and infinity are the largest.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/anywhere.h"

namespace fsdp::kernels::wire {

constexpr int64_t kBlock = 256;  // numbers that share a scale

constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kLeast = (127 - 100) << 23;  // 2^-100: blocks of smaller numbers become zeros

FSDP_ANYWHERE int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

FSDP_ANYWHERE float float_of(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

FSDP_ANYWHERE int32_t magnitude(float x) {
  return bits_of(x) & 0x7fffffff;
}

struct Scale {
  float scale;    // of one code; NaN if the block has a number that isn't finite
  float inverse;  // what numbers are multiplied by; 0: all codes are 0
};

// 8-bit integers from -127 to 127.
struct Int8 {
  FSDP_ANYWHERE static Scale scale_of(int32_t largest) {
    if (largest >= kInfinity) return {float_of(0x7fc00000), 0};
    if (largest < kLeast) return {0, 0};
    return {float_of(largest) / 127.0f, 127.0f / float_of(largest)};
  }
  // Rounded to nearest even, by the addition: the sum has no bits after the point.
  FSDP_ANYWHERE static uint8_t code(float scaled) {
    constexpr float kPush = 12582912.0f;  // 1.5 · 2^23
    return static_cast<uint8_t>(bits_of(scaled + kPush));
  }
  FSDP_ANYWHERE static float value(uint8_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
};

// float8_e4m3fn, whose largest number is 448. Scales are powers of two, so that a product of code
// and scale is exact in bfloat16, too.
struct Fp8 {
  FSDP_ANYWHERE static Scale scale_of(int32_t largest) {
    if (largest >= kInfinity) return {float_of(0x7fc00000), 0};
    if (largest < kLeast) return {0, 0};
    const int32_t over = (largest & 0x7fffff) > 0x600000 ? 1 : 0;  // a mantissa above 1.75
    const int32_t exponent = (largest >> 23) - 8 + over;           // of the scale, plus 127
    return {float_of(exponent << 23), float_of((254 - exponent) << 23)};
  }
  // Rounded to nearest even. Both branches are always computed, for vectors.
  FSDP_ANYWHERE static uint8_t code(float scaled) {
    const int32_t bits = magnitude(scaled);
    constexpr int32_t kSmallest = (127 - 6) << 23;  // 2^-6; below it codes are multiples of 2^-9
    constexpr int32_t kPush = (127 + 14) << 23;     // 2^14, whose last bit is 2^-9
    const int32_t small = bits_of(float_of(bits) + float_of(kPush)) - kPush;
    const int32_t normal = (bits - (120 << 23) + 0x7ffff + (bits >> 20 & 1)) >> 20;
    const int32_t sign = bits_of(scaled) >> 24 & 0x80;
    return static_cast<uint8_t>((bits < kSmallest ? small : normal) | sign);
  }
  FSDP_ANYWHERE static float value(uint8_t code) {
    const int32_t bits = (code & 0x7f) << 20;
    const float normal = float_of(bits + (120 << 23));
    const float small = float_of(bits | (127 - 6) << 23) - 0x1p-6f;
    const int32_t magnitude = bits_of((code & 0x78) == 0 ? small : normal);
    return float_of(magnitude | (code & 0x80) << 24);
  }
};

}  // namespace fsdp::kernels::wire
