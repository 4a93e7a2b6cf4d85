// The arithmetic behind quantised.h, the same bits in C++ and CUDA: NF4's levels, and where the
// parts of a row are.
//
// Files that include this are compiled without fused products and sums.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/anywhere.h"

namespace fsdp::kernels::quantised {

constexpr int64_t kBlock = 64;    // numbers that share a scale
constexpr int kLevels = 16;       // of NF4
constexpr float kSteps = 255.0f;  // of a scale of 8 bits
constexpr float kInt8Top = 127.0f;

// Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero (NF4 of QLoRA).
FSDP_ANYWHERE float level(int code) {
  constexpr float kValues[kLevels] = {
      -1.0f,
      -0.6961928009986877f,
      -0.5250730514526367f,
      -0.39491748809814453f,
      -0.28444138169288635f,
      -0.18477343022823334f,
      -0.09105003625154495f,
      0.0f,
      0.07958029955625534f,
      0.16093020141124725f,
      0.24611230194568634f,
      0.33791524171829224f,
      0.44070982933044434f,
      0.5626170039176941f,
      0.7229568362236023f,
      1.0f,
  };
  return kValues[code];
}

// A row: `blocks` blocks of codes, then their scales.
struct Row {
  int64_t blocks = 0;
  int64_t code_bytes = 0;  // of a block: 32 (NF4) or 64 (int8)
  bool doubled = false;    // the scales are a least one, a step (float32) and a byte each

  FSDP_ANYWHERE int64_t scales_at() const { return blocks * code_bytes; }
  FSDP_ANYWHERE int64_t bytes() const {  // a multiple of 4
    return scales_at() + (doubled ? 8 + (blocks + 3) / 4 * 4 : 4 * blocks);
  }
  FSDP_ANYWHERE float scale(const uint8_t* row, int64_t block) const {
    const uint8_t* scales = row + scales_at();
    float found[2];
    if (!doubled) {
      std::memcpy(found, scales + 4 * block, 4);
      return found[0];
    }
    std::memcpy(found, scales, 8);
    return found[0] + static_cast<float>(scales[8 + block]) * found[1];
  }
};

}  // namespace fsdp::kernels::quantised
