// Cross-entropy over rows of logits, and its gradient written over them.
//
// Each block handles a row. One pass over the logits finds the largest one and the sum of
// exponentials together; the second pass, if a gradient is wanted, finds the row in the cache. Rows
// may start anywhere: elements before the first and after the last aligned 16 bytes are handled one
// by one. So the logits cross the memory bus once each way, and no float32 copy of them exists.
#include <cmath>

#include "kernels/cuda/common.cuh"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kMostThreads = 1024;

// exp(x) / 2^less, computed as a power of 2 of x * log2(e): one instruction.
__device__ inline float exp_of(float x, float less) {
  return fast_exp2(__fmaf_rn(x, kLog2E, -less));
}

// The sum of exponentials of some logits is sum * 2^less, where the largest is near 2^less.
struct Peak {
  float less = -1e38f;  // below every logit
  float sum = 0.0f;
};

__device__ inline Peak join(Peak a, Peak b) {
  const float less = fmaxf(a.less, b.less);
  return {less, a.sum * fast_exp2(a.less - less) + b.sum * fast_exp2(b.less - less)};
}

template <int N>
__device__ inline void include(Peak& peak, const float (&x)[N]) {
  float most = x[0];
#pragma unroll
  for (int i = 1; i < N; ++i) most = fmaxf(most, x[i]);
  const float less = fmaxf(peak.less, __fmul_rn(most, kLog2E));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += exp_of(x[i], less);
  peak.sum = peak.sum * fast_exp2(peak.less - less) + sum;
  peak.less = less;
}

// Every thread gets the same bits.
__device__ inline Peak block_join(Peak peak) {
  __shared__ Peak shared[kWarp];
  const int lane = threadIdx.x % kWarp;
  auto over_warp = [](Peak p) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      Peak other;
      other.less = __shfl_xor_sync(kAll, p.less, step);
      other.sum = __shfl_xor_sync(kAll, p.sum, step);
      // The lower lane's value comes first, so that both lanes round alike.
      p = threadIdx.x & step ? join(other, p) : join(p, other);
    }
    return p;
  };
  peak = over_warp(peak);
  if (lane == 0) shared[threadIdx.x / kWarp] = peak;
  __syncthreads();
  return over_warp(lane < blockDim.x / kWarp ? shared[lane] : Peak{});
}

// A row cut at 16-byte boundaries: `head` elements, `vectors` of N, `tail` elements.
template <class T>
struct Cut {
  static constexpr int N = 16 / sizeof(T);
  int64_t head, vectors, tail;

  __device__ Cut(const T* row, int64_t numel) {
    const int64_t past = reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T);
    head = min(past == 0 ? int64_t(0) : N - past, numel);
    vectors = (numel - head) / N;
    tail = numel - head - vectors * N;
  }
};

// to[i] = f(from[i]) over a row, by the whole block; `to` may be `from`.
template <class T, class F>
__device__ inline void map_row(const T* from, T* to, int64_t numel, F f) {
  constexpr int N = Cut<T>::N;
  const bool alike = reinterpret_cast<uintptr_t>(from) % 16 == reinterpret_cast<uintptr_t>(to) % 16;
  if (!alike) {
    for (int64_t i = threadIdx.x; i < numel; i += blockDim.x)
      to[i] = from_float<T>(f(to_float(from[i])));
    return;
  }
  const Cut<T> cut(from, numel);
  if (threadIdx.x < cut.head) to[threadIdx.x] = from_float<T>(f(to_float(from[threadIdx.x])));
  const int64_t last = cut.head + cut.vectors * N;
  if (threadIdx.x < cut.tail)
    to[last + threadIdx.x] = from_float<T>(f(to_float(from[last + threadIdx.x])));
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < cut.vectors; i += blockDim.x) {
    float x[N];
    load_floats<T, N>(from + cut.head + i * N, x);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = f(x[j]);
    store_floats<T, N>(to + cut.head + i * N, x);
  }
}

template <class T>
__device__ inline void fill_row(T* to, int64_t numel, float value) {
  const Cut<T> cut(to, numel);
  const T one = from_float<T>(value);
  if (threadIdx.x < cut.head) to[threadIdx.x] = one;
  const int64_t last = cut.head + cut.vectors * cut.N;
  if (threadIdx.x < cut.tail) to[last + threadIdx.x] = one;
  float values[Cut<T>::N];
#pragma unroll
  for (int j = 0; j < cut.N; ++j) values[j] = value;
  for (int64_t i = threadIdx.x; i < cut.vectors; i += blockDim.x)
    store_floats<T, Cut<T>::N>(to + cut.head + i * cut.N, values);
}

template <class T>
__global__ void __launch_bounds__(kMostThreads, 2) cross_entropy_kernel(CrossEntropy a) {
  const int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(a.logits) + row * a.row_stride;
  T* gradient = a.gradient ? static_cast<T*>(a.gradient) + row * a.row_stride : nullptr;
  const int64_t target = a.targets[row];
  const bool ignored = target == a.ignore_index;
  const bool outside = !ignored && (target < 0 || target >= a.vocab);
  if ((ignored || outside) && !a.log_sum) {  // nothing to read
    const float value = outside ? NAN : 0.0f;
    if (threadIdx.x == 0) a.losses[row] = value;
    if (gradient) fill_row<T>(gradient, a.vocab, value);
    return;
  }
  const float at_target = ignored || outside ? 0.0f : to_float(logits[target]);

  constexpr int N = Cut<T>::N;
  const Cut<T> cut(logits, a.vocab);
  const int64_t last = cut.head + cut.vectors * N;
  Peak peak;
  if (threadIdx.x < cut.head) include<1>(peak, {to_float(logits[threadIdx.x])});
  if (threadIdx.x < cut.tail) include<1>(peak, {to_float(logits[last + threadIdx.x])});
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < cut.vectors; i += blockDim.x) {
    float x[N];
    load_floats<T, N>(logits + cut.head + i * N, x);
    include<N>(peak, x);
  }
  peak = block_join(peak);
  const float log2_sum = peak.less + log2f(peak.sum);
  const float log_sum = log2_sum * kLn2;
  if (threadIdx.x == 0) {
    a.losses[row] = ignored ? 0.0f : outside ? NAN : log_sum - at_target;
    if (a.log_sum) a.log_sum[row] = log_sum;
  }
  if (!gradient) return;
  const float scale = *a.scale;
  map_row<T>(gradient, gradient, a.vocab, [=](float x) { return exp_of(x, log2_sum) * scale; });
  __syncthreads();
  if (threadIdx.x == 0)
    gradient[target] = from_float<T>((exp_of(at_target, log2_sum) - 1.0f) * scale);
}

template <class T>
__global__ void __launch_bounds__(kMostThreads, 2)
    cross_entropy_backward_kernel(CrossEntropyBackward a) {
  const int64_t row = blockIdx.x;
  const T* logits = static_cast<const T*>(a.logits) + row * a.row_stride;
  T* out = static_cast<T*>(a.grad_logits) + row * a.vocab;
  const int64_t target = a.targets[row];
  const bool ignored = target == a.ignore_index;
  if (ignored || target < 0 || target >= a.vocab) {
    fill_row<T>(out, a.vocab, ignored ? 0.0f : NAN);
    return;
  }
  const float grad = a.grad[row];
  const float log2_sum = a.log_sum[row] * kLog2E;
  map_row<T>(logits, out, a.vocab, [=](float x) { return exp_of(x, log2_sum) * grad; });
  __syncthreads();
  if (threadIdx.x == 0)
    out[target] = from_float<T>((exp_of(to_float(logits[target]), log2_sum) - 1.0f) * grad);
}

int threads_for(int64_t vocab) {
  return vocab >= 16384 ? kMostThreads : vocab >= 4096 ? 512 : vocab >= 1024 ? 256 : 128;
}

}  // namespace

void cross_entropy(const CrossEntropy& loss, cudaStream_t stream) {
  if (loss.rows == 0) return;
  with_type(loss.dtype, [&](auto type) {
    cross_entropy_kernel<typename decltype(type)::type>
        <<<static_cast<unsigned>(loss.rows), threads_for(loss.vocab), 0, stream>>>(loss);
  });
}

void cross_entropy_backward(const CrossEntropyBackward& loss, cudaStream_t stream) {
  if (loss.rows == 0) return;
  with_type(loss.dtype, [&](auto type) {
    cross_entropy_backward_kernel<typename decltype(type)::type>
        <<<static_cast<unsigned>(loss.rows), threads_for(loss.vocab), 0, stream>>>(loss);
  });
}

}  // namespace fsdp::kernels::cuda
