// Matrices in few bits to numbers: each thread makes eight of them. Memory moved: the bytes once,
// and the numbers once.
//
// Compiled without fused products and sums, for the bits of the CPU (kernels/quantised_code.h).
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/quantised.h"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kDecodeThreads = 256;
constexpr int kEight = 8;  // numbers of a thread

template <bool kInt8Codes, class T>
__global__ void __launch_bounds__(kDecodeThreads)
    dequantise_kernel(const uint8_t* bytes, T* numbers, int64_t rows, quantised::Row row) {
  __shared__ float levels[quantised::kLevels];
  if (threadIdx.x < quantised::kLevels) levels[threadIdx.x] = quantised::level(int(threadIdx.x));
  __syncthreads();
  const int64_t columns = row.blocks * quantised::kBlock;
  const int64_t at = (int64_t(blockIdx.x) * kDecodeThreads + threadIdx.x) * kEight;
  if (at >= rows * columns) return;
  const int64_t column = at % columns;
  const uint8_t* from = bytes + at / columns * row.bytes();  // at a multiple of 4 bytes
  const float scale = row.scale(from, column / quantised::kBlock);
  const auto* words = reinterpret_cast<const uint32_t*>(from + (kInt8Codes ? column : column / 2));
  float x[kEight];
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if constexpr (kInt8Codes)
      x[i] = float(int8_t(words[i / 4] >> (8 * (i % 4)))) * scale;
    else  // the first number of a byte is in its upper half
      x[i] = levels[words[0] >> (8 * (i / 2) + (i % 2 == 0 ? 4 : 0)) & 15] * scale;
  }
  store_floats<T, kEight>(numbers + at, x);
}

}  // namespace

void dequantise(const uint8_t* bytes, void* numbers, Dtype dtype, int64_t rows,
                const quantised::Row& row, cudaStream_t stream) {
  const int64_t eights = rows * row.blocks * (quantised::kBlock / kEight);
  const auto grid = static_cast<unsigned>(divide_up(eights, kDecodeThreads));
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* to = static_cast<T*>(numbers);
    if (row.code_bytes == quantised::kBlock)
      dequantise_kernel<true, T><<<grid, kDecodeThreads, 0, stream>>>(bytes, to, rows, row);
    else
      dequantise_kernel<false, T><<<grid, kDecodeThreads, 0, stream>>>(bytes, to, rows, row);
  });
}

}  // namespace fsdp::kernels::cuda
