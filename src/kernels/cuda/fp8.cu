// Passes that make one-byte matrices (kernels/fp8.h): largest magnitudes, and casts that write a
// matrix's rows and columns from one read.
//
// A block takes a tile of 128 x 128, a thread 8 rows of 8 columns of it: 16 threads read 256 bytes
// of a row of 16-bit numbers, and 16 threads write 128 bytes of a row of either copy. The columns
// go through shared memory; a thread turns its 8 x 8 bytes around in registers first.
#include <cuda_fp8.h>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/fp8.h"
#include "kernels/fp8_number.h"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kTile = 128;
constexpr int kEach = 8;                // rows and columns of a thread
constexpr int kAcross = kTile / kEach;  // threads along a row, and along a column
constexpr int kThreads = kAcross * kAcross;

template <class T>
struct Plain {
  const T* x;
  int64_t width;

  __device__ __forceinline__ void load(int64_t row, int64_t column, float (&to)[kEach]) const {
    load_floats<T, kEach>(x + row * width + column, to);
  }
};

// Rounded as the operator that would have written them.
template <class T>
__device__ __forceinline__ void round_to(float (&x)[kEach]) {
  if constexpr (!std::is_same_v<T, float>) to_floats(from_floats<T, kEach>(x), x);
}

// The output of rms_norm, in the order of norm.cu.
template <class T>
struct Normed {
  const T* x;
  const float* rstd;
  const T* weight;
  int64_t width;

  __device__ __forceinline__ void load(int64_t row, int64_t column, float (&to)[kEach]) const {
    float by[kEach];
    load_floats<T, kEach>(x + row * width + column, to);
    load_floats<T, kEach>(weight + column, by);
    const float scale = rstd[row];
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[i] = to[i] * scale * by[i];
    round_to<T>(to);
  }
};

// The output of swiglu.
template <class T>
struct Activated {
  const T* gate_up;
  int64_t width;

  __device__ __forceinline__ void load(int64_t row, int64_t column, float (&to)[kEach]) const {
    float up[kEach];
    load_floats<T, kEach>(gate_up + row * 2 * width + column, to);
    load_floats<T, kEach>(gate_up + row * 2 * width + width + column, up);
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[i] = to[i] * sigmoid(to[i]) * up[i];
    round_to<T>(to);
  }
};

// Calls f with the source that a matrix describes.
template <class F>
void with_source(const Fp8Matrix& x, F f) {
  with_type(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* data = static_cast<const T*>(x.data);
    if (x.swiglu)
      f(Activated<T>{data, x.columns});
    else if (x.rstd)
      f(Normed<T>{data, x.rstd, static_cast<const T*>(x.weight), x.columns});
    else
      f(Plain<T>{data, x.columns});
  });
}

// Where a thread's numbers are.
struct Place {
  int64_t row, column;
  bool inside;

  __device__ Place(int64_t rows, int64_t columns) {
    const int64_t across = (columns + kTile - 1) / kTile;
    const int64_t tile_row = blockIdx.x / across, tile_column = blockIdx.x % across;
    row = tile_row * kTile + threadIdx.y * kEach;
    column = tile_column * kTile + threadIdx.x * kEach;
    inside = row < rows && column < columns;
  }
};

// --- magnitudes ---

template <class Source>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(Source source, int64_t rows, int64_t columns, float* amax) {
  __shared__ unsigned shared[kThreads / kWarp];
  const Place place(rows, columns);
  unsigned most = 0;
  if (place.inside) {
    float x[kEach][kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) source.load(place.row + i, place.column, x[i]);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) most = larger(most, magnitude(x[i][j]));
  }
  most = largest_of<kWarp>(most);
  const int thread = threadIdx.y * kAcross + threadIdx.x;
  if (thread % kWarp == 0) shared[thread / kWarp] = most;
  __syncthreads();
  if (thread != 0) return;
#pragma unroll
  for (int i = 0; i < kThreads / kWarp; ++i) most = larger(most, shared[i]);
  raise(amax, most);
}

template <class Source>
__global__ void __launch_bounds__(kThreads)
    rowwise_amax_kernel(Source source, int64_t rows, int64_t columns, Fp8Amax amax) {
  __shared__ unsigned of_columns[kAcross][kTile], of_rows[kTile];
  const Place place(rows, columns);
  const int x = threadIdx.x, y = threadIdx.y;
  float values[kEach][kEach] = {};
  if (place.inside)
#pragma unroll
    for (int i = 0; i < kEach; ++i) source.load(place.row + i, place.column, values[i]);
  unsigned of_column[kEach] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    unsigned of_row = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const unsigned bits = magnitude(values[i][j]);
      of_row = larger(of_row, bits);
      of_column[j] = larger(of_column[j], bits);
    }
    of_row = largest_of<kAcross>(of_row);
    if (x == i) of_rows[y * kEach + i] = of_row;
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) of_columns[y][x * kEach + j] = of_column[j];
  __syncthreads();
  // Half of the threads take a column of the tile each, the others a row.
  const int own = (y * kAcross + x) % kTile;
  const int64_t row = place.row - y * kEach + own, column = place.column - x * kEach + own;
  if (y * kAcross + x < kTile) {
    if (!amax.columns || column >= columns) return;
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < kAcross; ++i) most = larger(most, of_columns[i][own]);
    raise(amax.columns + column, most);
  } else if (amax.rows && row < rows) {
    raise(amax.rows + row, of_rows[own]);
  }
}

// --- casts ---

__device__ __forceinline__ unsigned two_bytes(float first, float second, bool e5m2) {
  const float2 pair = make_float2(first, second);
  return e5m2 ? __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E5M2)
              : __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint2 eight_bytes(const float (&x)[kEach], bool e5m2) {
  return make_uint2(two_bytes(x[0], x[1], e5m2) | two_bytes(x[2], x[3], e5m2) << 16,
                    two_bytes(x[4], x[5], e5m2) | two_bytes(x[6], x[7], e5m2) << 16);
}

// Turns 4 x 4 bytes around.
__device__ __forceinline__ void turn(unsigned a, unsigned b, unsigned c, unsigned d,
                                     unsigned (&to)[4]) {
  const unsigned low = __byte_perm(a, b, 0x5140), low_next = __byte_perm(c, d, 0x5140);
  const unsigned high = __byte_perm(a, b, 0x7362), high_next = __byte_perm(c, d, 0x7362);
  to[0] = __byte_perm(low, low_next, 0x5410);
  to[1] = __byte_perm(low, low_next, 0x7632);
  to[2] = __byte_perm(high, high_next, 0x5410);
  to[3] = __byte_perm(high, high_next, 0x7632);
}

// bytes[i]: 8 columns of row i. Writes the tile's columns: a column's 8 rows are one 8-byte unit,
// at a place in shared memory that keeps 16 threads in different banks.
__device__ __forceinline__ void put_columns(const uint2 (&bytes)[kEach], const Place& place,
                                            int64_t rows, int64_t columns, uint8_t* to,
                                            uint2 (&shared)[kTile][kAcross]) {
  unsigned upper[4], lower[4];
  const int x = threadIdx.x, y = threadIdx.y;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto word = [&](int i) { return half == 0 ? bytes[i].x : bytes[i].y; };
    turn(word(0), word(1), word(2), word(3), upper);
    turn(word(4), word(5), word(6), word(7), lower);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      shared[x * kEach + half * 4 + j][y ^ x] = make_uint2(upper[j], lower[j]);
  }
  __syncthreads();
  const int64_t first_row = place.row - y * kEach, first_column = place.column - x * kEach;
  const int64_t row = first_row + x * kEach;
  if (row >= rows) return;
#pragma unroll
  for (int turn = 0; turn < kTile / kAcross; ++turn) {
    const int own = turn * kAcross + y;
    const int64_t column = first_column + own;
    if (column < columns)
      *reinterpret_cast<uint2*>(to + column * rows + row) = shared[own][x ^ (own / kEach)];
  }
}

__device__ __forceinline__ float multiplier(const float* amax, bool e5m2) {
  return fp8::factors_of(*amax, e5m2).multiply;
}

// The first tile of each row and of each column writes the factors that restore them.
template <bool ROWWISE>
__device__ __forceinline__ void put_factors(const Fp8Copy& rows, const Fp8Copy& columns,
                                            const Place& place, int64_t row_count,
                                            int64_t column_count, bool e5m2) {
  const int own = threadIdx.y * kAcross + threadIdx.x;
  const int64_t row = place.row - threadIdx.y * kEach + own;
  const int64_t column = place.column - threadIdx.x * kEach + own;
  const bool first_column = place.column < kTile, first_row = place.row < kTile;
  if (ROWWISE ? own >= kTile : blockIdx.x != 0 || own != 0) return;
  if (rows.amax && first_column && (!ROWWISE || row < row_count))
    rows.factors[ROWWISE ? row : 0] = fp8::factors_of(rows.amax[ROWWISE ? row : 0], e5m2).restore;
  if (columns.amax && first_row && (!ROWWISE || column < column_count))
    columns.factors[ROWWISE ? column : 0] =
        fp8::factors_of(columns.amax[ROWWISE ? column : 0], e5m2).restore;
}

// Three blocks per multiprocessor where registers allow it: a block waits for memory twice.
template <class Source, bool ROWWISE>
__global__ void __launch_bounds__(kThreads, ROWWISE ? 2 : 3)
    cast_kernel(Source source, int64_t row_count, int64_t column_count, Fp8Copy rows,
                Fp8Copy columns, bool e5m2) {
  __shared__ uint2 shared[kTile][kAcross];
  const Place place(row_count, column_count);
  put_factors<ROWWISE>(rows, columns, place, row_count, column_count, e5m2);
  float x[kEach][kEach] = {};
  if (place.inside)
#pragma unroll
    for (int i = 0; i < kEach; ++i) source.load(place.row + i, place.column, x[i]);
  uint2 bytes[kEach] = {};
  if (place.inside && (rows.amax || !ROWWISE)) {
    const float same = ROWWISE ? 0.0f : multiplier(rows.amax ? rows.amax : columns.amax, e5m2);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float by = ROWWISE ? multiplier(rows.amax + place.row + i, e5m2) : same;
      float scaled[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) scaled[j] = x[i][j] * by;
      bytes[i] = eight_bytes(scaled, e5m2);
      if (rows.amax)
        *reinterpret_cast<uint2*>(rows.data + (place.row + i) * column_count + place.column) =
            bytes[i];
    }
  }
  if (!columns.amax) return;
  if (ROWWISE && place.inside) {
    float by[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) by[j] = multiplier(columns.amax + place.column + j, e5m2);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) x[i][j] *= by[j];
      bytes[i] = eight_bytes(x[i], e5m2);
    }
  }
  put_columns(bytes, place, row_count, column_count, columns.data, shared);
}

unsigned tiles_of(int64_t rows, int64_t columns) {
  return static_cast<unsigned>(divide_up(rows, kTile) * divide_up(columns, kTile));
}

template <class Source>
void amax_from(const Source& source, int64_t rows, int64_t columns, const Fp8Amax& amax,
               cudaStream_t stream) {
  const unsigned tiles = tiles_of(rows, columns);
  const dim3 block(kAcross, kAcross);
  if (amax.rows) cudaMemsetAsync(amax.rows, 0, (amax.rowwise ? rows : 1) * sizeof(float), stream);
  if (amax.columns) cudaMemsetAsync(amax.columns, 0, columns * sizeof(float), stream);
  if (amax.rowwise)
    rowwise_amax_kernel<Source><<<tiles, block, 0, stream>>>(source, rows, columns, amax);
  else
    amax_kernel<Source><<<tiles, block, 0, stream>>>(source, rows, columns, amax.rows);
}

template <class Source>
void cast_from(const Source& source, int64_t rows, int64_t columns, const Fp8Copy& to_rows,
               const Fp8Copy& to_columns, bool rowwise, bool e5m2, cudaStream_t stream) {
  const unsigned tiles = tiles_of(rows, columns);
  const dim3 block(kAcross, kAcross);
  if (rowwise)
    cast_kernel<Source, true>
        <<<tiles, block, 0, stream>>>(source, rows, columns, to_rows, to_columns, e5m2);
  else
    cast_kernel<Source, false>
        <<<tiles, block, 0, stream>>>(source, rows, columns, to_rows, to_columns, e5m2);
}

}  // namespace

void fp8_amax(const Fp8Matrix& x, const Fp8Amax& amax, cudaStream_t stream) {
  with_source(x, [&](const auto& source) { amax_from(source, x.rows, x.columns, amax, stream); });
}

void fp8_cast(const Fp8Matrix& x, const Fp8Copy& rows, const Fp8Copy& columns, bool rowwise,
              bool e5m2, cudaStream_t stream) {
  with_source(x, [&](const auto& source) {
    cast_from(source, x.rows, x.columns, rows, columns, rowwise, e5m2, stream);
  });
}

}  // namespace fsdp::kernels::cuda
