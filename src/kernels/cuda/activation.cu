// Activations, forward and backward, and scaled copies: each element is read once and written once.
// Backward can write forward's result again in the same pass, so that it needn't be kept.
#include "kernels/cuda/common.cuh"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// --- swiglu: each thread takes one vector of N columns of a row ---

// Index is 32 bits wide where that is enough; otherwise the division would be most of the
// arithmetic.
template <class T, int N, class Index>
__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const T* gate_up, T* out, Index items, Index of_row) {
  const Index item = Index(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= items) return;
  const Index row = item / of_row;
  const int64_t start = (int64_t(item) + int64_t(row) * of_row) * N;
  float gate[N], up[N];
  load_floats<T, N>(gate_up + start, gate);
  load_floats<T, N>(gate_up + start + int64_t(of_row) * N, up);
#pragma unroll
  for (int i = 0; i < N; ++i) gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
  store_floats<T, N>(out + int64_t(item) * N, gate);
}

// AMAX: also raises `amax` by the magnitudes of grad_gate_up.
template <class T, int N, class Index, bool AMAX>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const T* grad, const T* gate_up, T* grad_gate_up, T* out, float* amax,
                           Index items, Index of_row) {
  const Index item = Index(blockIdx.x) * kThreads + threadIdx.x;
  unsigned most = 0;
  if (item < items) {
    const Index row = item / of_row;
    const int64_t start = (int64_t(item) + int64_t(row) * of_row) * N;
    const int64_t width = int64_t(of_row) * N;
    float gate[N], up[N], d[N];
    load_floats<T, N>(gate_up + start, gate);
    load_floats<T, N>(gate_up + start + width, up);
    load_floats<T, N>(grad + int64_t(item) * N, d);
    float product[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = sigmoid(gate[i]);
      const float silu = gate[i] * s;
      product[i] = silu * up[i];
      gate[i] = d[i] * up[i] * (s + silu * (1.0f - s));
      up[i] = d[i] * silu;
      if constexpr (AMAX)
        most = larger(most, larger(stored_magnitude<T>(gate[i]), stored_magnitude<T>(up[i])));
    }
    store_floats<T, N>(grad_gate_up + start, gate);
    store_floats<T, N>(grad_gate_up + start + width, up);
    if (out) store_floats<T, N>(out + int64_t(item) * N, product);
  }
  if constexpr (AMAX) raise_by_block(amax, most);
}

// Calls f<Index>(items, blocks) with the narrower of two index types that can count all threads.
template <class F>
void with_index(int64_t items, F f) {
  const unsigned blocks = static_cast<unsigned>(divide_up(items, kThreads));
  if (items < (int64_t(1) << 32) - kThreads)
    f(Type<uint32_t>{}, blocks);
  else
    f(Type<uint64_t>{}, blocks);
}

template <class T, int N>
void swiglu_of(const void* gate_up, void* out, int64_t rows, int64_t width, cudaStream_t stream) {
  with_index(rows * width / N, [&](auto type, unsigned blocks) {
    using Index = typename decltype(type)::type;
    swiglu_kernel<T, N, Index><<<blocks, kThreads, 0, stream>>>(
        static_cast<const T*>(gate_up), static_cast<T*>(out), static_cast<Index>(rows * width / N),
        static_cast<Index>(width / N));
  });
}

template <class T, int N, bool AMAX>
void swiglu_backward_of(const void* grad, const void* gate_up, void* grad_gate_up, void* out,
                        float* amax, int64_t rows, int64_t width, cudaStream_t stream) {
  with_index(rows * width / N, [&](auto type, unsigned blocks) {
    using Index = typename decltype(type)::type;
    swiglu_backward_kernel<T, N, Index, AMAX><<<blocks, kThreads, 0, stream>>>(
        static_cast<const T*>(grad), static_cast<const T*>(gate_up), static_cast<T*>(grad_gate_up),
        static_cast<T*>(out), amax, static_cast<Index>(rows * width / N),
        static_cast<Index>(width / N));
  });
}

// --- elementwise: `items` vectors of N elements, one per thread, then the `rest` singly ---

// Where this thread's elements start, for f(index, N) or f(index, 1).
template <int N, class F>
__device__ inline void each_item(int64_t items, int rest, F f) {
  const int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (item < items)
    f(item * N, Type<Vec<float, N>>{});
  else if (item < items + rest)
    f(items * N + (item - items), Type<Vec<float, 1>>{});
}

template <class V>
struct Count;
template <class T, int N>
struct Count<Vec<T, N>> {
  static constexpr int value = N;
};

struct Gelu {
  float value, slope;
};

constexpr float kInverseSqrt2 = 0.70710678118654752f;
constexpr float kInverseSqrt2Pi = 0.39894228040143268f;
constexpr float kSqrt2OverPi = 0.79788456080286536f;
constexpr float kCubic = 0.044715f;

template <bool TANH>
__device__ inline Gelu gelu_at(float x) {
  if constexpr (TANH) {
    const float inner = kSqrt2OverPi * (x + kCubic * x * x * x);
    const float t = tanhf(inner);
    const float slope = kSqrt2OverPi * (1.0f + 3.0f * kCubic * x * x);
    const float half = 0.5f * (1.0f + t);
    return {x * half, half + 0.5f * x * (1.0f - t * t) * slope};
  } else {
    const float half = 0.5f * (1.0f + erff(x * kInverseSqrt2));
    return {x * half, half + x * kInverseSqrt2Pi * expf(-0.5f * x * x)};
  }
}

template <class T, int N, bool TANH>
__global__ void __launch_bounds__(kThreads)
    gelu_kernel(const T* x, T* out, int64_t items, int rest) {
  each_item<N>(items, rest, [&](int64_t start, auto shape) {
    constexpr int n = Count<typename decltype(shape)::type>::value;
    float v[n];
    load_floats<T, n>(x + start, v);
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = gelu_at<TANH>(v[i]).value;
    store_floats<T, n>(out + start, v);
  });
}

template <class T, int N, bool TANH>
__global__ void __launch_bounds__(kThreads)
    gelu_backward_kernel(const T* grad, const T* x, T* grad_x, T* out, int64_t items, int rest) {
  each_item<N>(items, rest, [&](int64_t start, auto shape) {
    constexpr int n = Count<typename decltype(shape)::type>::value;
    float v[n], d[n];
    load_floats<T, n>(x + start, v);
    load_floats<T, n>(grad + start, d);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const Gelu g = gelu_at<TANH>(v[i]);
      d[i] *= g.slope;
      v[i] = g.value;
    }
    store_floats<T, n>(grad_x + start, d);
    if (out) store_floats<T, n>(out + start, v);
  });
}

template <class T, class S, int N>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(T* target, const S* source, const float* scale, bool accumulate, int64_t items,
                 int rest) {
  const float factor = scale ? *scale : 1.0f;
  each_item<N>(items, rest, [&](int64_t start, auto shape) {
    constexpr int n = Count<typename decltype(shape)::type>::value;
    float v[n], old[n] = {};
    load_floats<S, n>(source + start, v);
    if (accumulate) load_floats<T, n>(target + start, old);
#pragma unroll
    for (int i = 0; i < n; ++i) v[i] = accumulate ? old[i] + v[i] * factor : v[i] * factor;
    store_floats<T, n>(target + start, v);
  });
}

struct Shape {
  int64_t items;
  int rest;
  unsigned blocks;
};

Shape shape_of(int64_t numel, int n) {
  const int64_t items = numel / n;
  const int rest = static_cast<int>(numel % n);
  return {items, rest, static_cast<unsigned>(divide_up(items + rest, kThreads))};
}

template <class T, int N, bool TANH>
void gelu_of(const void* x, void* out, int64_t numel, cudaStream_t stream) {
  const Shape s = shape_of(numel, N);
  gelu_kernel<T, N, TANH><<<s.blocks, kThreads, 0, stream>>>(static_cast<const T*>(x),
                                                             static_cast<T*>(out), s.items, s.rest);
}

template <class T, int N, bool TANH>
void gelu_backward_of(const void* grad, const void* x, void* grad_x, void* out, int64_t numel,
                      cudaStream_t stream) {
  const Shape s = shape_of(numel, N);
  gelu_backward_kernel<T, N, TANH><<<s.blocks, kThreads, 0, stream>>>(
      static_cast<const T*>(grad), static_cast<const T*>(x), static_cast<T*>(grad_x),
      static_cast<T*>(out), s.items, s.rest);
}

template <class T, class S, int N>
void scale_of(void* target, const void* source, const float* scale, bool accumulate, int64_t numel,
              cudaStream_t stream) {
  const Shape s = shape_of(numel, N);
  scale_kernel<T, S, N><<<s.blocks, kThreads, 0, stream>>>(
      static_cast<T*>(target), static_cast<const S*>(source), scale, accumulate, s.items, s.rest);
}

}  // namespace

void swiglu(const void* gate_up, void* out, int64_t rows, int64_t width, Dtype dtype,
            cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (width % 8 == 0 && aligned16(gate_up, out))
      swiglu_of<T, 8>(gate_up, out, rows, width, stream);
    else
      swiglu_of<T, 1>(gate_up, out, rows, width, stream);
  });
}

void swiglu_backward(const void* grad, const void* gate_up, void* grad_gate_up, void* out,
                     float* amax, int64_t rows, int64_t width, Dtype dtype, cudaStream_t stream) {
  if (amax) cudaMemsetAsync(amax, 0, sizeof(float), stream);
  if (rows == 0 || width == 0) return;
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool vectors = width % 8 == 0 && aligned16(grad, gate_up, grad_gate_up, out);
    const auto run =
        vectors ? (amax ? swiglu_backward_of<T, 8, true> : swiglu_backward_of<T, 8, false>)
                : (amax ? swiglu_backward_of<T, 1, true> : swiglu_backward_of<T, 1, false>);
    run(grad, gate_up, grad_gate_up, out, amax, rows, width, stream);
  });
}

void gelu(const void* x, void* out, int64_t numel, bool tanh, Dtype dtype, cudaStream_t stream) {
  if (numel == 0) return;
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (aligned16(x, out))
      tanh ? gelu_of<T, 8, true>(x, out, numel, stream)
           : gelu_of<T, 8, false>(x, out, numel, stream);
    else
      tanh ? gelu_of<T, 1, true>(x, out, numel, stream)
           : gelu_of<T, 1, false>(x, out, numel, stream);
  });
}

void gelu_backward(const void* grad, const void* x, void* grad_x, void* out, int64_t numel,
                   bool tanh, Dtype dtype, cudaStream_t stream) {
  if (numel == 0) return;
  with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (aligned16(grad, x, grad_x, out))
      tanh ? gelu_backward_of<T, 8, true>(grad, x, grad_x, out, numel, stream)
           : gelu_backward_of<T, 8, false>(grad, x, grad_x, out, numel, stream);
    else
      tanh ? gelu_backward_of<T, 1, true>(grad, x, grad_x, out, numel, stream)
           : gelu_backward_of<T, 1, false>(grad, x, grad_x, out, numel, stream);
  });
}

void scale_into(void* target, Dtype target_dtype, const void* source, Dtype source_dtype,
                const float* scale, bool accumulate, int64_t numel, cudaStream_t stream) {
  if (numel == 0) return;
  with_type(target_dtype, [&](auto target_type) {
    using T = typename decltype(target_type)::type;
    with_type(source_dtype, [&](auto source_type) {
      using S = typename decltype(source_type)::type;
      if (aligned16(target, source))
        scale_of<T, S, 8>(target, source, scale, accumulate, numel, stream);
      else
        scale_of<T, S, 1>(target, source, scale, accumulate, numel, stream);
    });
  });
}

}  // namespace fsdp::kernels::cuda
