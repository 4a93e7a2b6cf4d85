// Frozen matrices in few bits: NF4 or int8 in blocks of 64 numbers along a row, each with a scale,
// the block's largest magnitude m.
//
// A matrix [rows, columns] is bytes [rows, quantised_bytes(columns)], so that a part of its rows is
// quantised alone and a cut between rows cuts nothing else. columns is a multiple of 64. A row is
// the codes of its blocks, then their scales:
//
//   kNf4        two codes per byte, the first in the upper half; number = level[code] · m. The
//   level
//               nearest to number / m, of two the lower one. Codes and scales are bitsandbytes'.
//   kNf4Double  the same with scales of 8 bits: the row's least, a step, and 255 of them at most
//   kInt8       number = code · (m / 127), rounded to nearest even
//
// Scales are float32. A block with a number that isn't finite becomes NaNs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "fsdp/nn/functional.h"
#include "kernels/quantised_code.h"

namespace fsdp::kernels {

// Of one row. `quant` isn't kNone.
quantised::Row quantised_row(int64_t columns, nn::Quant quant);
int64_t quantised_bytes(int64_t columns, nn::Quant quant);
// The other way round: the columns of a row of so many bytes.
int64_t quantised_columns(int64_t bytes, nn::Quant quant);

// matrix [rows, columns] float32, bfloat16 or float16, on the CPU → uint8.
at::Tensor quantise(const at::Tensor& matrix, nn::Quant quant);
// The numbers, in float32, rounded to `type`: [rows, columns]. `bytes` may be a sharded parameter.
at::Tensor dequantise(const at::Tensor& bytes, nn::Quant quant, at::ScalarType type);

// For the kernels: checks bytes and returns the layout of its rows.
quantised::Row check_quantised(const at::Tensor& bytes, int64_t quant, at::ScalarType type);

}  // namespace fsdp::kernels
