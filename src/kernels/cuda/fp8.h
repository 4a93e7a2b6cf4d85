// The CUDA passes behind kernels/fp8.h, as plain functions of pointers and sizes, with the rules of
// launch.h. Matrices are contiguous, start at a multiple of 16 bytes, and their sizes are multiples
// of 16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/launch.h"

namespace fsdp::kernels::cuda {

struct Fp8Matrix {
  const void* data = nullptr;    // [rows, columns]
  const float* rstd = nullptr;   // not null: the matrix is data * rstd [rows] * weight [columns]
  const void* weight = nullptr;  // of data's dtype
  bool swiglu = false;           // the matrix is swiglu(data), data [rows, 2 * columns]
  int64_t rows = 0;
  int64_t columns = 0;
  Dtype dtype = Dtype::kFloat32;
};

struct Fp8Amax {
  float* rows = nullptr;     // [rows], or [1] tensorwise; or null: not wanted
  float* columns = nullptr;  // [columns]; null tensorwise
  bool rowwise = false;
};
void fp8_amax(const Fp8Matrix& x, const Fp8Amax& amax, cudaStream_t stream);

struct Fp8Copy {
  const float* amax = nullptr;  // one per row of the copy, or one; null: the copy isn't wanted
  uint8_t* data = nullptr;
  float* factors = nullptr;  // as many as magnitudes
};
void fp8_cast(const Fp8Matrix& x, const Fp8Copy& rows, const Fp8Copy& columns, bool rowwise,
              bool e5m2, cudaStream_t stream);

}  // namespace fsdp::kernels::cuda
