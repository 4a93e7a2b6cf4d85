// fill_random_: each thread computes 16 bytes of the result, from whole blocks of four numbers.
//
// Compiled without fused products and sums, for the bits of the CPU (kernels/random.h).
#include "kernels/cuda/common.cuh"
#include "kernels/random.h"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Numbers N * group to N * group + N - 1 of the sequence. ALIGNED: number 0 would be at an address
// that is a multiple of 16.
template <class T, int N, bool NORMAL, bool ALIGNED>
__global__ void __launch_bounds__(kThreads)
    random_kernel(T* out, int64_t numel, int64_t first, uint64_t key, float a, float b) {
  const int64_t group = first / N + int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t begin = group * N - first;  // in out
  if (begin >= numel) return;
  float values[N];
#pragma unroll
  for (int block = 0; block < N / 4; ++block) {
    const random::Four four = random::numbers(group * (N / 4) + block, key);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      values[4 * block + i] =
          a + b * (NORMAL ? random::normal(four.word[i]) : random::uniform(four.word[i]));
  }
  if (ALIGNED && begin >= 0 && begin + N <= numel) {
    store_floats<T, N>(out + begin, values);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (begin + i >= 0 && begin + i < numel) out[begin + i] = from_float<T>(values[i]);
  }
}

template <class T, bool NORMAL>
void launch_random(const FillRandom& fill, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  const int64_t groups = divide_up(fill.first + fill.numel, N) - fill.first / N;
  const auto blocks = static_cast<unsigned>(divide_up(groups, kThreads));
  T* out = static_cast<T*>(fill.out);
  if (aligned16(out - fill.first % N))
    random_kernel<T, N, NORMAL, true>
        <<<blocks, kThreads, 0, stream>>>(out, fill.numel, fill.first, fill.key, fill.a, fill.b);
  else
    random_kernel<T, N, NORMAL, false>
        <<<blocks, kThreads, 0, stream>>>(out, fill.numel, fill.first, fill.key, fill.a, fill.b);
}

}  // namespace

void fill_random(const FillRandom& fill, cudaStream_t stream) {
  if (fill.numel == 0) return;
  with_type(fill.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    fill.normal ? launch_random<T, true>(fill, stream) : launch_random<T, false>(fill, stream);
  });
}

}  // namespace fsdp::kernels::cuda
