// Counter-based random numbers: the arithmetic behind fill_random_ (ops.h), the same bits in C++
// and CUDA and on every machine.
//
// Number i of a sequence is lane i % 4 of Philox4x32-10 (Salmon et al., 2011) at counter i / 4 with
// the sequence's key, so any part of a sequence can be computed anywhere. Files that include this
// are compiled without fused products and sums. What remains is rounded the same way by every
// compiler: integers, and +, -, *, / and sqrt of float32.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/anywhere.h"

namespace fsdp::kernels::random {

struct Four {
  uint32_t word[4];
};

FSDP_ANYWHERE Four philox(Four counter, uint64_t key) {
  uint32_t low_key = static_cast<uint32_t>(key), high_key = static_cast<uint32_t>(key >> 32);
  auto [a, b, c, d] = counter.word;
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * a, second = uint64_t{0xCD9E8D57} * c;
    a = static_cast<uint32_t>(second >> 32) ^ b ^ low_key;
    b = static_cast<uint32_t>(second);
    c = static_cast<uint32_t>(first >> 32) ^ d ^ high_key;
    d = static_cast<uint32_t>(first);
    low_key += 0x9E3779B9;
    high_key += 0xBB67AE85;
  }
  return {{a, b, c, d}};
}

// Numbers 4 * block to 4 * block + 3 of a sequence.
FSDP_ANYWHERE Four numbers(int64_t block, uint64_t key) {
  const auto counter = static_cast<uint64_t>(block);
  return philox({{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0}},
                key);
}

// In [0, 1), in steps of 2^-24.
FSDP_ANYWHERE float uniform(uint32_t number) {
  return static_cast<float>(static_cast<int32_t>(number >> 8)) * 0x1p-24f;
}

// The natural logarithm of a positive, normal number times 2^-32: within 2e-7 of its value + 1.
FSDP_ANYWHERE float log_of_share(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;  // of a mantissa in [sqrt(1/2), sqrt(2))
  bits -= exponent * (1 << 23);
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  y -= 1.0f;
  // log(1 + y) = y + y² p(y); p interpolates at Chebyshev's points.
  float p = 0.0878726551f * y - 0.141596470f;
  p = p * y + 0.148347868f;
  p = p * y - 0.165884885f;
  p = p * y + 0.199720497f;
  p = p * y - 0.250011477f;
  p = p * y + 0.333336706f;
  p = p * y - 0.499999971f;
  return static_cast<float>(exponent - 32) * 0.693147181f + (y + y * y * p);
}

// Normally distributed with mean 0 and deviation 1, between -6.34 and 6.34: the inverse of the
// distribution function at (number + 1/2) / 2^32, by Wichura's algorithm AS 241 (PPND7, 1988). The
// share beyond the number and its distance from the middle are both computed from integers, so that
// neither the tails nor the middle lose digits. Both branches are always computed, for vectors.
FSDP_ANYWHERE float normal(uint32_t number) {
  const bool negative = number < 0x80000000u;
  const auto beyond = static_cast<int32_t>(negative ? number : ~number);
  const float share = static_cast<float>(beyond) + 0.5f;                             // · 2^-32
  const float middle = (static_cast<float>(0x7fffffff - beyond) + 0.5f) * 0x1p-32f;  // (0, 1/2)

  const float r = 0.180625f - middle * middle;
  const float near_top =
      (((5.9109374720e1f * r + 1.5929113202e2f) * r + 5.0434271938e1f) * r + 3.3871327179f) *
      middle;
  const float near_bottom =
      ((6.7187563600e1f * r + 7.8757757664e1f) * r + 1.7895169469e1f) * r + 1.0f;

  const float t = std::sqrt(-log_of_share(share)) - 1.6f;
  const float far_top =
      ((1.7023821103e-1f * t + 1.3067284816f) * t + 2.7568153900f) * t + 1.4234372777f;
  const float far_bottom = (1.2021132975e-1f * t + 7.3700164250e-1f) * t + 1.0f;

  const bool near = middle <= 0.425f;
  const float value = (near ? near_top : far_top) / (near ? near_bottom : far_bottom);
  return negative ? -value : value;
}

}  // namespace fsdp::kernels::random
