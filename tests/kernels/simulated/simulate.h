// Runs CUDA kernels on the CPU, thread by thread, to test their arithmetic and indices without a
// GPU. translate.py turns a kernel's source into C++ that includes this.
//
// A block is a set of fibers that take turns; blocks run one after the other. At __syncthreads()
// and warp operations a fiber stops until the others have arrived; a kernel in which they never all
// arrive (a barrier in a branch) is an error here, where on a GPU it would hang. Threads and blocks
// run in either order (set_reversed): a kernel whose results differ between the two lacks a
// barrier. Pointers are host pointers. Shared memory is static: one block runs at a time.
//
// It can't show speed, how a GPU rounds where nvcc fuses a product with a sum, or races that
// neither order exposes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <strings.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace simulate {

constexpr unsigned kWarp = 32;

struct Shape {
  dim3 grid, block;
  Shape(dim3 grid_, dim3 block_, size_t = 0, cudaStream_t = nullptr) : grid(grid_), block(block_) {}
};

// Calls `kernel` once per thread. A shape that a GPU would reject ends the program.
void launch(const Shape& shape, const std::function<void()>& kernel);

// true: from now on the last threads and blocks run first; false: the first ones.
void set_reversed(bool reversed);

// --- inside a kernel ---

void wait_for_block();

// What the threads of a warp gave to an operation that all of them have reached.
struct Given {
  const uint64_t* values;  // [kWarp], until the thread's next operation
  uint32_t present;        // one bit per thread; the others have ended or never existed
};
Given exchange(uint64_t value);

// Lane `from`'s value; if there is no such thread, bits that no result should show.
template <typename T>
T shuffle(T value, unsigned from) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const Given given = exchange(bits);
  bits = given.present >> from & 1 ? given.values[from] : ~uint64_t{0};
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
unsigned lane();

}  // namespace simulate

// --- the CUDA built-ins that the kernels use ---

inline void __syncthreads() {
  simulate::wait_for_block();
}
inline void __syncwarp(unsigned = ~0u) {
  simulate::exchange(0);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  return simulate::shuffle(value, simulate::lane() ^ mask);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {  // past the last lane, its own value
  const unsigned from = simulate::lane() + delta;
  return simulate::shuffle(value, from < simulate::kWarp ? from : simulate::lane());
}
template <typename T>
T __shfl_sync(unsigned, T value, unsigned from) {
  return simulate::shuffle(value, from % simulate::kWarp);
}
inline unsigned __activemask() {
  return ~0u;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const simulate::Given given = simulate::exchange(value);
  unsigned most = 0;
  for (unsigned i = 0; i < simulate::kWarp; ++i)
    if (given.present >> i & 1) most = std::max(most, static_cast<unsigned>(given.values[i]));
  return most;
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  const simulate::Given given = simulate::exchange(predicate);
  unsigned bits = 0;
  for (unsigned i = 0; i < simulate::kWarp; ++i)
    if ((given.present >> i & 1) && given.values[i]) bits |= 1u << i;
  return bits;
}

template <typename A, typename B>
constexpr auto min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
constexpr auto max(A a, B b) {
  return a < b ? b : a;
}

inline float __fmaf_rn(float a, float b, float c) {
  return std::fmaf(a, b, c);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fsqrt_rn(float a) {
  return std::sqrt(a);
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dsub_rn(double a, double b) {
  return a - b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline double __ddiv_rn(double a, double b) {
  return a / b;
}
inline float rsqrtf(float a) {
  return 1.0f / std::sqrt(a);
}
inline float __expf(float a) {
  return std::exp(a);
}
inline float __uint_as_float(unsigned a) {
  return std::bit_cast<float>(a);
}
inline unsigned __float_as_uint(float a) {
  return std::bit_cast<unsigned>(a);
}
inline float __int_as_float(int a) {
  return std::bit_cast<float>(a);
}
inline int __float_as_int(float a) {
  return std::bit_cast<int>(a);
}
inline int __popc(unsigned a) {
  return std::popcount(a);
}
inline int __ffs(int a) {
  return ffs(a);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = (uint64_t{b} << 32) | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return result;
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldcs(const T* from) {
  return *from;
}
template <typename T>
void __stcs(T* to, T value) {
  *to = value;
}

inline unsigned atomicMax(unsigned* at, unsigned value) {
  const unsigned before = *at;
  if (value > before) *at = value;
  return before;
}

#define cudaMemsetAsync(to, value, bytes, stream) (std::memset(to, value, bytes), cudaSuccess)
#define cudaGetLastError() cudaSuccess
