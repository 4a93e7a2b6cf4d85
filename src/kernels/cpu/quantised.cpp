// Matrices in few bits, a block of 64 numbers at a time. Compiled without fused products and sums,
// for the bits of the GPU (kernels/quantised_code.h).
#include "kernels/quantised.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/parallel.h"

namespace fsdp::kernels::cpu {
namespace {

using quantised::Row;

constexpr int64_t kCount = quantised::kBlock;

// NaN if one of them is.
float largest_of(const float* x) {
  float largest = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const float magnitude = std::fabs(x[i]);
    largest = magnitude > largest || std::isnan(magnitude) ? magnitude : largest;
    if (std::isnan(largest)) break;
  }
  return std::isinf(largest) ? std::numeric_limits<float>::quiet_NaN() : largest;
}

// How many of the bounds between levels, which are their middles, it is above.
struct Nf4Bounds {
  Nf4Bounds() {
    for (int i = 0; i + 1 < quantised::kLevels; ++i)
      bound[i] = (quantised::level(i) + quantised::level(i + 1)) / 2;
  }
  int code(float x) const {
    int above = 0;
    for (float one : bound) above += x > one ? 1 : 0;
    return above;
  }
  float bound[quantised::kLevels - 1];
};

void encode_nf4(const float* x, float largest, uint8_t* codes) {
  static const Nf4Bounds bounds;
  const float inverse = largest > 0 ? 1.0f / largest : 0.0f;
  for (int64_t i = 0; i < kCount; i += 2)
    codes[i / 2] =
        static_cast<uint8_t>(bounds.code(x[i] * inverse) << 4 | bounds.code(x[i + 1] * inverse));
}

void encode_int8(const float* x, float largest, uint8_t* codes) {
  const float inverse = largest > 0 ? quantised::kInt8Top / largest : 0.0f;
  for (int64_t i = 0; i < kCount; ++i) {
    const float scaled = std::nearbyint(x[i] * inverse);
    codes[i] = static_cast<uint8_t>(static_cast<int8_t>(std::isnan(scaled) ? 0.0f : scaled));
  }
}

// The scales of a row, float32 or in 8 bits each.
void write_scales(const std::vector<float>& scales, bool doubled, uint8_t* to) {
  if (!doubled) {
    std::memcpy(to, scales.data(), scales.size() * sizeof(float));
    return;
  }
  float least = scales[0], most = scales[0];
  bool finite = true;
  for (const float scale : scales) {
    least = std::min(least, scale);
    most = std::max(most, scale);
    finite = finite && !std::isnan(scale);
  }
  const float step =
      finite ? (most - least) / quantised::kSteps : std::numeric_limits<float>::quiet_NaN();
  std::memcpy(to, &least, sizeof(float));
  std::memcpy(to + 4, &step, sizeof(float));
  for (size_t i = 0; i < scales.size(); ++i)
    to[8 + i] = step > 0 ? static_cast<uint8_t>(std::nearbyint((scales[i] - least) / step)) : 0;
  for (size_t i = scales.size(); i % 4 != 0; ++i) to[8 + i] = 0;
}

template <typename T>
void encode_row(const T* from, const Row& row, bool int8, std::vector<float>& scales, uint8_t* to) {
  for (int64_t block = 0; block < row.blocks; ++block) {
    float x[kCount];
    for (int64_t i = 0; i < kCount; ++i) x[i] = static_cast<float>(from[block * kCount + i]);
    const float largest = largest_of(x);
    if (int8)
      encode_int8(x, largest, to + block * row.code_bytes);
    else
      encode_nf4(x, largest, to + block * row.code_bytes);
    scales[block] = int8 ? largest / quantised::kInt8Top : largest;
  }
  write_scales(scales, row.doubled, to + row.scales_at());
}

template <typename T>
void decode_row(const uint8_t* from, const Row& row, bool int8, T* to) {
  for (int64_t block = 0; block < row.blocks; ++block, to += kCount) {
    const uint8_t* codes = from + block * row.code_bytes;
    const float scale = row.scale(from, block);
    if (int8) {
      for (int64_t i = 0; i < kCount; ++i)
        to[i] = static_cast<T>(static_cast<float>(static_cast<int8_t>(codes[i])) * scale);
      continue;
    }
    T levels[quantised::kLevels];  // of this block
    for (int i = 0; i < quantised::kLevels; ++i)
      levels[i] = static_cast<T>(quantised::level(i) * scale);
    for (int64_t i = 0; i < kCount; i += 2) {
      to[i] = levels[codes[i / 2] >> 4];
      to[i + 1] = levels[codes[i / 2] & 15];
    }
  }
}

at::Tensor quantise(const at::Tensor& given, int64_t kind) {
  const auto quant = static_cast<nn::Quant>(kind);
  if (given.dim() != 2 || !at::isFloatingType(given.scalar_type()))
    throw Error(formatted("{} of {} dimensions can't be quantised.", toString(given.scalar_type()),
                          given.dim()),
                "pass a matrix of floating-point numbers.");
  const at::Tensor matrix = given.contiguous();
  const Row row = quantised_row(matrix.size(1), quant);
  const at::Tensor bytes =
      at::empty({matrix.size(0), row.bytes()}, at::TensorOptions().dtype(at::kByte));
  with_dtype(matrix.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const T* from = read<T>(matrix);
    auto* to = write<uint8_t>(bytes);
    parallel_rows(matrix.size(0), matrix.size(1), [&](int64_t begin, int64_t end) {
      std::vector<float> scales(static_cast<size_t>(row.blocks));
      for (int64_t i = begin; i < end; ++i)
        encode_row(from + i * matrix.size(1), row, quant == nn::Quant::kInt8, scales,
                   to + i * row.bytes());
    });
  });
  return bytes;
}

at::Tensor dequantise(const at::Tensor& bytes, int64_t quant, at::ScalarType type) {
  const Row row = check_quantised(bytes, quant, type);
  const int64_t columns = row.blocks * kCount;
  const bool int8 = static_cast<nn::Quant>(quant) == nn::Quant::kInt8;
  at::Tensor matrix = at::empty({bytes.size(0), columns}, bytes.options().dtype(type));
  with_dtype(type, [&](auto number) {
    using T = decltype(number);
    const auto* from = read<uint8_t>(bytes);
    T* to = write<T>(matrix);
    parallel_rows(bytes.size(0), columns, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        decode_row(from + i * row.bytes(), row, int8, to + i * columns);
    });
  });
  return matrix;
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, CPU, m) {
  m.impl("quantise", quantise);
  m.impl("dequantise", dequantise);
}

}  // namespace fsdp::kernels::cpu
