// Messages in fewer bits: a warp encodes a block of 256 numbers, and each thread sums eight.
//
// Compiled without fused products and sums, for the bits of the CPU (kernels/wire_code.h).
#include "kernels/cuda/common.cuh"
#include "kernels/cuda/wire.h"
#include "kernels/wire_code.h"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kWireThreads = 256;
constexpr int kEach = 8;  // numbers of a thread
static_assert(kEach * kWarp == wire::kBlock);

struct alignas(8) EightCodes {
  uint32_t words[2];
};

// Of the message of this block's y.
template <class C, class T>
__global__ void __launch_bounds__(kWireThreads)
    encode_kernel(const T* values, uint8_t* bytes, int64_t numel, int64_t message) {
  const int64_t block = int64_t(blockIdx.x) * (kWireThreads / kWarp) + int(threadIdx.x) / kWarp;
  if (block * wire::kBlock >= numel) return;  // the whole warp
  const int lane = int(threadIdx.x) % kWarp;
  const int64_t at = block * wire::kBlock + lane * kEach;
  float x[kEach] = {};
  if (at < numel) load_floats<T, kEach>(values + int64_t(blockIdx.y) * numel + at, x);
  int largest = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) largest = max(largest, wire::magnitude(x[i]));
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2)
    largest = max(largest, __shfl_xor_sync(kAll, largest, step));
  const wire::Scale scale = C::scale_of(largest);
  uint8_t* to = bytes + int64_t(blockIdx.y) * message;
  if (lane == 0) *reinterpret_cast<float*>(to + numel + block * 4) = scale.scale;
  if (at >= numel) return;
  EightCodes codes = {};
  if (scale.inverse != 0) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      codes.words[i / 4] |= uint32_t(C::code(x[i] * scale.inverse)) << (8 * (i % 4));
  }
  *reinterpret_cast<EightCodes*>(to + at) = codes;
}

struct Halves {};  // bfloat16 numbers, without scales

template <class C>
__device__ inline void read_eight(const uint8_t* message, int64_t numel, int64_t at,
                                  float (&to)[kEach]) {
  if constexpr (std::is_same_v<C, Halves>) {
    load_floats<__nv_bfloat16, kEach>(reinterpret_cast<const __nv_bfloat16*>(message) + at, to);
  } else {
    const EightCodes codes = *reinterpret_cast<const EightCodes*>(message + at);
    const float scale = *reinterpret_cast<const float*>(message + numel + at / wire::kBlock * 4);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      to[i] = C::value(uint8_t(codes.words[i / 4] >> (8 * (i % 4)))) * scale;
  }
}

// Of the group of this block's y.
template <class C, class T>
__global__ void __launch_bounds__(kWireThreads)
    sum_kernel(const uint8_t* bytes, T* sums, int64_t numel, int64_t message, int64_t messages,
               float divisor) {
  const int64_t at = (int64_t(blockIdx.x) * kWireThreads + threadIdx.x) * kEach;
  if (at >= numel) return;
  bytes += int64_t(blockIdx.y) * messages * message;
  float sum[kEach];
  read_eight<C>(bytes, numel, at, sum);
#pragma unroll 4
  for (int64_t m = 1; m < messages; ++m) {
    float next[kEach];
    read_eight<C>(bytes + m * message, numel, at, next);
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum[i] += next[i];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum[i] /= divisor;
  store_floats<T, kEach>(sums + int64_t(blockIdx.y) * numel + at, sum);
}

}  // namespace

void encode_wire(const void* values, Dtype dtype, uint8_t* bytes, int64_t messages,
                 const WireMessages& message, cudaStream_t stream) {
  const int64_t blocks = divide_up(message.numel, wire::kBlock);
  const dim3 grid(static_cast<unsigned>(divide_up(blocks, kWireThreads / kWarp)),
                  static_cast<unsigned>(messages));
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(values);
    if (message.code == Code::kInt8)
      encode_kernel<wire::Int8, T>
          <<<grid, kWireThreads, 0, stream>>>(from, bytes, message.numel, message.bytes);
    else
      encode_kernel<wire::Fp8, T>
          <<<grid, kWireThreads, 0, stream>>>(from, bytes, message.numel, message.bytes);
  });
}

void sum_wire(const uint8_t* bytes, void* sums, Dtype dtype, int64_t groups, int64_t messages,
              float divisor, const WireMessages& message, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(message.numel, kWireThreads * kEach)),
                  static_cast<unsigned>(groups));
  const int64_t numel = message.numel, size = message.bytes;
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* to = static_cast<T*>(sums);
    if (message.code == Code::kInt8)
      sum_kernel<wire::Int8, T>
          <<<grid, kWireThreads, 0, stream>>>(bytes, to, numel, size, messages, divisor);
    else if (message.code == Code::kFp8)
      sum_kernel<wire::Fp8, T>
          <<<grid, kWireThreads, 0, stream>>>(bytes, to, numel, size, messages, divisor);
    else
      sum_kernel<Halves, T>
          <<<grid, kWireThreads, 0, stream>>>(bytes, to, numel, size, messages, divisor);
  });
}

}  // namespace fsdp::kernels::cuda
