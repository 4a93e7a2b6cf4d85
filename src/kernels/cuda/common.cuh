// Shared by the kernels of this folder: numbers of three dtypes read and written as float32, eight
// at a time where memory is aligned, and sums over a warp or a block in a fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/launch.h"

namespace fsdp::kernels::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}

template <class T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(x);
  else
    return __float2half_rn(x);
}

// N numbers that are read and written together: N is 1, or fills a multiple of 16 bytes, and then
// the address must be aligned to 16. Stored as words: the compiler would give each 16-bit number a
// register of its own.
template <class T, int N>
struct alignas(16) Vec {
  uint32_t words[N * sizeof(T) / 4];
};

template <class T>
struct Vec<T, 1> {
  T value;
};

template <class T, int N>
__device__ inline Vec<T, N> load(const T* from) {
  return *reinterpret_cast<const Vec<T, N>*>(from);
}

template <class T, int N>
__device__ inline void to_floats(const Vec<T, N>& from, float (&to)[N]) {
  if constexpr (N == 1) {
    to[0] = to_float(from.value);
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = __uint_as_float(from.words[i]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // the upper half of a float32
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      to[2 * i] = __uint_as_float(from.words[i] << 16);
      to[2 * i + 1] = __uint_as_float(from.words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&from.words[i]));
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
  }
}

template <class T, int N>
__device__ inline void load_floats(const T* from, float (&to)[N]) {
  to_floats(load<T, N>(from), to);
}

template <class T, int N>
__device__ inline Vec<T, N> from_floats(const float (&from)[N]) {
  Vec<T, N> to;
  if constexpr (N == 1) {
    to.value = from_float<T>(from[0]);
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < N; ++i) to.words[i] = __float_as_uint(from[i]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
      to.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const __half2 pair = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
      to.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return to;
}

template <class T, int N>
__device__ inline void store_floats(T* to, const float (&from)[N]) {
  *reinterpret_cast<Vec<T, N>*>(to) = from_floats<T, N>(from);
}

// Writes N numbers to to[index], or adds them to what is there. The dtype is looked up at run time,
// because this is for data written once (a gradient), and a template would multiply the kernels.
template <int N, class T>
__device__ inline void put_as(T* to, const float (&values)[N], bool accumulate) {
  float sums[N];
  if (accumulate) {
    load_floats<T, N>(to, sums);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += values[i];
    store_floats<T, N>(to, sums);
  } else {
    store_floats<T, N>(to, values);
  }
}

template <int N>
__device__ inline void put(void* to, Dtype dtype, int64_t index, const float (&values)[N],
                           bool accumulate) {
  if (dtype == Dtype::kFloat32)
    put_as<N>(static_cast<float*>(to) + index, values, accumulate);
  else if (dtype == Dtype::kBFloat16)
    put_as<N>(static_cast<__nv_bfloat16*>(to) + index, values, accumulate);
  else
    put_as<N>(static_cast<__half*>(to) + index, values, accumulate);
}

// --- one instruction each, within about two units in the last place; denormals become 0 ---

__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

__device__ inline float sigmoid(float x) {
  return fast_reciprocal(1.0f + fast_exp2(-kLog2E * x));
}

// --- largest magnitudes, compared as bits: a NaN is the largest ---

__device__ __forceinline__ unsigned magnitude(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
  return a > b ? a : b;
}

// Most calls don't change anything, and then only read: writes to one address wait for each other.
__device__ __forceinline__ void raise(float* to, unsigned bits) {
  unsigned* place = reinterpret_cast<unsigned*>(to);
  if (bits > __ldcg(place)) atomicMax(place, bits);
}

// The largest of THREADS adjacent threads of a warp.
template <int THREADS>
__device__ __forceinline__ unsigned largest_of(unsigned x) {
#pragma unroll
  for (int step = THREADS / 2; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

// Raises `to` by the largest of a block's numbers. All threads of the block call it, once.
__device__ inline void raise_by_block(float* to, unsigned own) {
  __shared__ unsigned most;
  const int thread = threadIdx.x + blockDim.x * threadIdx.y;
  if (thread == 0) most = 0;
  __syncthreads();
  own = __reduce_max_sync(__activemask(), own);
  if (thread % kWarp == 0) atomicMax(&most, own);
  __syncthreads();
  if (thread == 0) raise(to, most);
}

// The largest of a row's threads, a warp's or a block's, whose x counts them: written (`alone`), or
// raised to.
template <bool WARP>
__device__ inline void put_row_amax(float* to, bool alone, unsigned own) {
  __shared__ unsigned shared[kWarp];
  own = largest_of<kWarp>(own);
  if constexpr (!WARP) {
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = own;
    __syncthreads();
    if (threadIdx.x >= kWarp) return;
    own = largest_of<kWarp>(threadIdx.x < blockDim.x / kWarp ? shared[threadIdx.x] : 0);
  }
  if (threadIdx.x != 0) return;
  if (alone)
    *to = __uint_as_float(own);
  else
    raise(to, own);
}

// The magnitude of a number as it would be stored.
template <class T>
__device__ inline unsigned stored_magnitude(float x) {
  return magnitude(to_float(from_float<T>(x)));
}

template <class T, int N>
__device__ inline unsigned largest_stored(const float (&x)[N], unsigned most) {
#pragma unroll
  for (int i = 0; i < N; ++i) most = larger(most, stored_magnitude<T>(x[i]));
  return most;
}

// --- sums; every thread gets the same bits ---

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

// K sums at once over a block of whole warps. `shared` must not be written again before the next
// __syncthreads(): callers alternate between two of them.
template <int K>
__device__ inline void block_sum(float (&x)[K], float (&shared)[K][kWarp]) {
  const int thread = threadIdx.x + blockDim.x * threadIdx.y;
  const int lane = thread % kWarp;
  const int warps = blockDim.x * blockDim.y / kWarp;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    x[k] = warp_sum(x[k]);
    if (lane == 0) shared[k][thread / kWarp] = x[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) x[k] = warp_sum(lane < warps ? shared[k][lane] : 0.0f);
}

// --- on the host ---

template <class... Pointers>
bool aligned16(Pointers... pointers) {  // null is aligned
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

inline int64_t size_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : 2;
}

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<T>{}) with the C++ type of a dtype.
template <class F>
void with_type(Dtype dtype, F f) {
  if (dtype == Dtype::kFloat32)
    f(Type<float>{});
  else if (dtype == Dtype::kBFloat16)
    f(Type<__nv_bfloat16>{});
  else
    f(Type<__half>{});
}

}  // namespace fsdp::kernels::cuda
