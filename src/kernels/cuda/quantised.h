// The CUDA kernel behind kernels/quantised.h, as a plain function of pointers and sizes.
//
// As in launch.h, it only launches, on `stream`, and may be captured into a graph. `numbers` is
// aligned to 16 bytes, `bytes` to 4.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/launch.h"
#include "kernels/quantised_code.h"

namespace fsdp::kernels::cuda {

// bytes [rows, row.bytes()] → numbers [rows, 64 * row.blocks].
void dequantise(const uint8_t* bytes, void* numbers, Dtype dtype, int64_t rows,
                const quantised::Row& row, cudaStream_t stream);

}  // namespace fsdp::kernels::cuda
