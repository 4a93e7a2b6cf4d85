// The global norm of a list of tensors, and clipping's factor. Every element is read once, and the
// result has the same bits every time.
//
// Each block sums one chunk of one tensor to one number; chunk boundaries depend only on the sizes.
// A single block then adds these in a fixed order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/halves.cuh"
#include "kernels/cuda/update.h"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr size_t kMostParameterBytes = 32764;

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

constexpr int kSumPieces = 512;         // per launch
constexpr int64_t kSmallChunk = 16384;  // elements per block, at least
constexpr int64_t kMostPartials = 32768;

struct SumPlace {
  const void* data;
  int64_t numel;
  int32_t end;
  Dtype dtype;
};
struct SumList {
  int64_t chunk;  // elements per block: a multiple of 16 bytes in every dtype
  double* partials;
  int32_t count;
  SumPlace places[kSumPieces];
};
static_assert(sizeof(SumList) <= kMostParameterBytes);

// The block's sum, in thread 0.
template <int kBlock>
__device__ inline double block_total(double x) {
  __shared__ double sums[kBlock / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(0xffffffffu, x, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0)
    for (int i = 0; i < kBlock / 32; ++i) total += sums[i];
  return total;
}

__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float as_float(__half x) { return __half2float(x); }

template <typename T>
struct alignas(16) Sixteen {
  T x[16 / sizeof(T)];
};

// One thread's share of the squares of chunk number `chunk`.
template <typename T>
__device__ inline double squares(const void* from, int64_t numel, int64_t chunk, int64_t size) {
  constexpr int kEach = 16 / sizeof(T);
  const T* data = static_cast<const T*>(from);
  const auto over = reinterpret_cast<uintptr_t>(data) % 16;
  const int64_t head = min(numel, static_cast<int64_t>((16 - over) % 16 / sizeof(T)));
  const int64_t vectors = (numel - head) / kEach;
  const auto* wide = reinterpret_cast<const Sixteen<T>*>(data + head);
  const int64_t end = min(vectors, (chunk + 1) * (size / kEach));
  double sum = 0;
#pragma unroll 4
  for (int64_t i = chunk * (size / kEach) + threadIdx.x; i < end; i += kThreads) {
    const Sixteen<T> v = wide[i];
    float part = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float x = as_float(v.x[k]);
      part = __fmaf_rn(x, x, part);
    }
    sum += static_cast<double>(part);
  }
  if (chunk == 0) {
    const int64_t tail = head + vectors * kEach;
    const int64_t i = threadIdx.x;
    float x = 0;
    if (i < head)
      x = as_float(data[i]);
    else if (i - head < numel - tail)
      x = as_float(data[tail + i - head]);
    sum += static_cast<double>(__fmul_rn(x, x));
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) sum_chunks(const __grid_constant__ SumList list) {
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  int low = 0, high = list.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list.places[middle].end > block)
      high = middle;
    else
      low = middle + 1;
  }
  const SumPlace& p = list.places[low];
  const int64_t chunk = block - (low > 0 ? list.places[low - 1].end : 0);
  double sum = 0;
  if (p.dtype == Dtype::kFloat32)
    sum = squares<float>(p.data, p.numel, chunk, list.chunk);
  else if (p.dtype == Dtype::kBFloat16)
    sum = squares<__nv_bfloat16>(p.data, p.numel, chunk, list.chunk);
  else
    sum = squares<__half>(p.data, p.numel, chunk, list.chunk);
  sum = block_total<kThreads>(sum);
  if (threadIdx.x == 0) list.partials[block] = sum;
}

constexpr int kFinish = 1024;

__global__ void __launch_bounds__(kFinish)
    finish(const double* partials, int64_t count, NormResult result) {
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kFinish) sum += partials[i];
  sum = block_total<kFinish>(sum);
  if (threadIdx.x != 0) return;
  if (result.total) *result.total = sum;
  const float norm = static_cast<float>(sqrt(sum));
  if (result.norm) *result.norm = norm;
  if (!result.factor) return;
  const float factor = __fdiv_rn(result.max_norm, norm + 1e-6f);
  // A norm that isn't finite gives a factor that skips the update.
  *result.factor = finite(norm) ? (factor < 1.0f ? factor : 1.0f) : __uint_as_float(0x7fc00000u);
}

int64_t sum_chunk(const SumPiece* pieces, int64_t count) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += std::max<int64_t>(pieces[i].numel, 0);
  int64_t chunk = kSmallChunk;
  while (total / chunk > kMostPartials) chunk *= 2;
  return chunk;
}

}  // namespace

int64_t sum_partials(const SumPiece* pieces, int64_t count) {
  const int64_t chunk = sum_chunk(pieces, count);
  int64_t partials = 0;
  for (int64_t i = 0; i < count; ++i)
    if (pieces[i].numel > 0) partials += divide_up(pieces[i].numel, chunk);
  return std::max<int64_t>(partials, 1);
}

void sum_of_squares(const SumPiece* pieces, int64_t count, double* partials,
                    const NormResult& result, cudaStream_t stream) {
  SumList list;
  list.chunk = sum_chunk(pieces, count);
  list.partials = partials;
  list.count = 0;
  int64_t blocks = 0, total = 0;
  const auto launch = [&] {
    if (list.count > 0)
      sum_chunks<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(list);
    list.partials += blocks;
    list.count = 0;
    total += blocks;
    blocks = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (pieces[i].numel <= 0) continue;
    if (list.count == kSumPieces) launch();
    blocks += divide_up(pieces[i].numel, list.chunk);
    list.places[list.count++] = {pieces[i].data, pieces[i].numel, static_cast<int32_t>(blocks),
                                 pieces[i].dtype};
  }
  launch();
  finish<<<1, kFinish, 0, stream>>>(partials, total, result);
}

void clip_factor(const double* total, const NormResult& result, cudaStream_t stream) {
  finish<<<1, kFinish, 0, stream>>>(total, 1, result);
}

}  // namespace fsdp::kernels::cuda
