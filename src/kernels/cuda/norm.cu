// RMSNorm and LayerNorm, forward and backward, with the addition of the residual.
//
// A block (for short rows, a warp) handles a row and keeps it in registers between the pass that
// sums it and the pass that writes it; rows too long for that are read again. Bytes moved per row:
// forward reads x (and the residual) and writes out (and the sum); backward reads grad, x (and
// grad_sum) and writes grad_x (and out).
//
// Gradients of parameters: each block adds up its rows in registers (block b has rows b, b + grid,
// …) and writes one row of partial sums; a second kernel adds those. The grid depends only on the
// sizes, so the result is the same on every device.
#include <algorithm>

#include "kernels/cuda/common.cuh"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kRowsOfBlock = 8;  // if a warp handles a row

template <bool CENTER>
__device__ inline float normalised(float x, float mean, float rstd) {
  return CENTER ? (x - mean) * rstd : x * rstd;
}

template <bool CENTER>
__device__ inline float scaled(float normalised, float weight, float bias) {
  return CENTER ? __fmaf_rn(normalised, weight, bias) : normalised * weight;
}

template <bool WARP, int K>
__device__ inline void row_sum(float (&x)[K], float (&shared)[K][kWarp]) {
  if constexpr (WARP) {
#pragma unroll
    for (int k = 0; k < K; ++k) x[k] = warp_sum(x[k]);
  } else {
    block_sum<K>(x, shared);
  }
}

// The sum of x and the residual, rounded to their dtype.
template <class T, int N>
__device__ inline Vec<T, N> add(const Vec<T, N>& x, const Vec<T, N>& residual) {
  float a[N], b[N];
  to_floats(x, a);
  to_floats(residual, b);
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] += b[i];
  return from_floats<T, N>(a);
}

// --- forward ---

template <bool CENTER>
__device__ inline void put_statistics(const NormForward& a, int64_t row, float mean, float rstd) {
  if (threadIdx.x != 0) return;
  a.rstd[row] = rstd;
  if constexpr (CENTER) a.mean[row] = mean;
}

// Calls f(i, column) for each vector of N elements of the row that this thread holds.
template <int N, int ITEMS, class F>
__device__ __forceinline__ void for_vectors(int dim, F f) {
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int column = (threadIdx.x + i * blockDim.x) * N;
    if (column < dim) f(i, column);
  }
}

// Each thread holds ITEMS vectors of N elements of its row.
template <class T, int N, int ITEMS, bool CENTER, bool WARP>
__global__ void __launch_bounds__(WARP ? kWarp* kRowsOfBlock : 1024) forward_kernel(NormForward a) {
  constexpr bool kWeightEarly = ITEMS * N * sizeof(T) <= 32;  // loaded while the sum is computed
  __shared__ float shared[2][1][kWarp];
  const int64_t row = WARP ? int64_t(blockIdx.x) * kRowsOfBlock + threadIdx.y : blockIdx.x;
  if (row >= a.rows) return;  // a whole warp; no other warp waits for it
  const int dim = static_cast<int>(a.dim);
  const int64_t start = row * a.dim;
  const T* weight = static_cast<const T*>(a.weight);
  const T* bias = static_cast<const T*>(a.bias);

  Vec<T, N> values[ITEMS], residual[ITEMS], early[ITEMS];
  for_vectors<N, ITEMS>(dim, [&](int i, int column) {
    values[i] = load<T, N>(static_cast<const T*>(a.x) + start + column);
    if (a.residual) residual[i] = load<T, N>(static_cast<const T*>(a.residual) + start + column);
  });
  if constexpr (kWeightEarly)
    for_vectors<N, ITEMS>(dim,
                          [&](int i, int column) { early[i] = load<T, N>(weight + column); });
  float total[1] = {0.0f};
  for_vectors<N, ITEMS>(dim, [&](int i, int column) {
    if (a.residual) {
      values[i] = add<T, N>(values[i], residual[i]);
      *reinterpret_cast<Vec<T, N>*>(static_cast<T*>(a.sum) + start + column) = values[i];
    }
    float x[N];
    to_floats(values[i], x);
#pragma unroll
    for (int j = 0; j < N; ++j) total[0] += CENTER ? x[j] : x[j] * x[j];
  });
  row_sum<WARP, 1>(total, shared[0]);
  float mean = 0.0f;
  if constexpr (CENTER) {
    mean = total[0] / dim;
    total[0] = 0.0f;
    for_vectors<N, ITEMS>(dim, [&](int i, int) {
      float x[N];
      to_floats(values[i], x);
#pragma unroll
      for (int j = 0; j < N; ++j) total[0] += (x[j] - mean) * (x[j] - mean);
    });
    row_sum<WARP, 1>(total, shared[1]);
  }
  const float rstd = rsqrtf(total[0] / dim + a.eps);
  put_statistics<CENTER>(a, row, mean, rstd);
  unsigned most = 0;
  for_vectors<N, ITEMS>(dim, [&](int i, int column) {
    float x[N], w[N], b[N] = {};
    to_floats(values[i], x);
    kWeightEarly ? to_floats(early[i], w) : load_floats<T, N>(weight + column, w);
    if (CENTER && bias) load_floats<T, N>(bias + column, b);
#pragma unroll
    for (int j = 0; j < N; ++j)
      x[j] = scaled<CENTER>(normalised<CENTER>(x[j], mean, rstd), w[j], b[j]);
    if (a.out) store_floats<T, N>(static_cast<T*>(a.out) + start + column, x);
    if (!CENTER && a.amax) most = largest_stored<T, N>(x, most);
  });
  if (!CENTER && a.amax)
    put_row_amax<WARP>(a.amax_per_row ? a.amax + row : a.amax, a.amax_per_row, most);
}

// Rows of any length: read once for each sum and once more.
template <class T, bool CENTER>
__global__ void __launch_bounds__(1024) forward_long_kernel(NormForward a) {
  __shared__ float shared[2][1][kWarp];
  const int64_t row = blockIdx.x;
  const int64_t start = row * a.dim;
  const T* x = static_cast<const T*>(a.x) + start;
  float total[1] = {0.0f};
  for (int64_t i = threadIdx.x; i < a.dim; i += blockDim.x) {
    float value = to_float(x[i]);
    if (a.residual) {
      const T sum = from_float<T>(value + to_float(static_cast<const T*>(a.residual)[start + i]));
      static_cast<T*>(a.sum)[start + i] = sum;
      value = to_float(sum);
    }
    total[0] += CENTER ? value : value * value;
  }
  block_sum<1>(total, shared[0]);
  if (a.residual) x = static_cast<const T*>(a.sum) + start;  // each thread reads what it wrote
  float mean = 0.0f;
  if constexpr (CENTER) {
    mean = total[0] / a.dim;
    total[0] = 0.0f;
    for (int64_t i = threadIdx.x; i < a.dim; i += blockDim.x) {
      const float value = to_float(x[i]) - mean;
      total[0] += value * value;
    }
    block_sum<1>(total, shared[1]);
  }
  const float rstd = rsqrtf(total[0] / a.dim + a.eps);
  put_statistics<CENTER>(a, row, mean, rstd);
  unsigned most = 0;
  for (int64_t i = threadIdx.x; i < a.dim; i += blockDim.x) {
    const float w = to_float(static_cast<const T*>(a.weight)[i]);
    const float b = CENTER && a.bias ? to_float(static_cast<const T*>(a.bias)[i]) : 0.0f;
    const T value =
        from_float<T>(scaled<CENTER>(normalised<CENTER>(to_float(x[i]), mean, rstd), w, b));
    if (a.out) static_cast<T*>(a.out)[start + i] = value;
    most = larger(most, magnitude(to_float(value)));
  }
  if constexpr (!CENTER) {
    if (a.amax) put_row_amax<false>(a.amax_per_row ? a.amax + row : a.amax, a.amax_per_row, most);
  }
}

int threads_for(int64_t items) {  // whole warps
  return static_cast<int>(divide_up(items, kWarp) * kWarp);
}

template <class T, bool CENTER>
void forward_of(const NormForward& a, cudaStream_t stream) {
  const unsigned rows = static_cast<unsigned>(a.rows);
  const bool vectors = a.dim % 8 == 0 && aligned16(a.x, a.residual, a.weight, a.bias, a.out, a.sum);
  const int64_t items = vectors ? a.dim / 8 : a.dim;
  if (vectors && items <= kWarp)
    forward_kernel<T, 8, 1, CENTER, true>
        <<<divide_up(rows, kRowsOfBlock), dim3(kWarp, kRowsOfBlock), 0, stream>>>(a);
  else if (vectors && items <= 256)
    forward_kernel<T, 8, 1, CENTER, false><<<rows, threads_for(items), 0, stream>>>(a);
  else if (vectors && items <= (sizeof(T) == 4 ? 2048 : 512))
    forward_kernel<T, 8, 2, CENTER, false>
        <<<rows, threads_for(divide_up(items, 2)), 0, stream>>>(a);
  else if (vectors && items <= 4096)
    forward_kernel<T, 8, 4, CENTER, false>
        <<<rows, threads_for(divide_up(items, 4)), 0, stream>>>(a);
  else if (!vectors && items <= 4096)
    forward_kernel<T, 1, 4, CENTER, false>
        <<<rows, threads_for(divide_up(items, 4)), 0, stream>>>(a);
  else
    forward_long_kernel<T, CENTER><<<rows, 1024, 0, stream>>>(a);
}

// --- backward ---

// What a thread needs of a row.
template <class T, int N, bool CENTER>
struct RowInputs {
  Vec<T, N> grad, x, grad_sum;
  float mean, rstd;

  __device__ __forceinline__ void read(const NormBackward& a, int64_t row, int column) {
    if (column < a.dim) {
      const int64_t offset = row * a.dim + column;
      grad = load<T, N>(static_cast<const T*>(a.grad) + offset);
      x = load<T, N>(static_cast<const T*>(a.x) + offset);
      if (a.grad_sum) grad_sum = load<T, N>(static_cast<const T*>(a.grad_sum) + offset);
    }
    rstd = a.rstd[row];
    if constexpr (CENTER) mean = a.mean[row];
  }
};

template <int N>
__device__ inline void put_partials(float* partials, const float (&sums)[N], int column,
                                    int64_t dim) {
  store_floats<float, N>(partials + blockIdx.x * dim + column, sums);
}

// Adds the sums of a block's warps, which hold the same columns of different rows.
template <int N>
__device__ inline void put_warps(float* partials, const float (&sums)[N], int column, int64_t dim) {
  __shared__ float shared[kRowsOfBlock][N][kWarp];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) shared[threadIdx.y][i][threadIdx.x] = sums[i];
  __syncthreads();
  if (threadIdx.y != 0 || column >= dim) return;
  float total[N] = {};
  for (int y = 0; y < kRowsOfBlock; ++y)
#pragma unroll
    for (int i = 0; i < N; ++i) total[i] += shared[y][i][threadIdx.x];
  put_partials<N>(partials, total, column, dim);
}

// A block's sums for a parameter's gradient; partials may be null.
template <bool WARP, int N>
__device__ inline void put_sums(float* partials, const float (&sums)[N], int column, int64_t dim) {
  if (!partials) return;
  if constexpr (WARP)
    put_warps<N>(partials, sums, column, dim);
  else if (column < dim)
    put_partials<N>(partials, sums, column, dim);
}

// One vector of N elements per thread. AHEAD: the next row is read while this one is summed. AMAX:
// also raises a.amax by the magnitudes of grad_x.
template <class T, int N, bool CENTER, bool WARP, bool AHEAD, int THREADS, int BLOCKS, bool AMAX>
__global__ void __launch_bounds__(THREADS, BLOCKS) backward_kernel(NormBackward a) {
  constexpr int K = CENTER ? 2 : 1;
  __shared__ float shared[2][K][kWarp];
  const int column = threadIdx.x * N;
  const bool inside = column < a.dim;
  const int64_t stride = WARP ? int64_t(gridDim.x) * kRowsOfBlock : gridDim.x;
  const float per_dim = 1.0f / a.dim;
  Vec<T, N> weight;
  if (inside) weight = load<T, N>(static_cast<const T*>(a.weight) + column);
  float grad_weight[N] = {}, grad_bias[N] = {};
  unsigned most = 0;
  RowInputs<T, N, CENTER> next;
  int64_t row = WARP ? int64_t(blockIdx.x) * kRowsOfBlock + threadIdx.y : blockIdx.x;
  if (AHEAD && row < a.rows) next.read(a, row, column);
  for (int turn = 0; row < a.rows; row += stride, turn ^= 1) {
    if constexpr (!AHEAD) next.read(a, row, column);
    const RowInputs<T, N, CENTER> in = next;
    if (AHEAD && row + stride < a.rows) next.read(a, row + stride, column);
    float sums[K] = {};
    float grad[N], x[N], w[N];
    if (inside) {
      to_floats(in.grad, grad);
      to_floats(in.x, x);
      to_floats(weight, w);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        x[i] = normalised<CENTER>(x[i], in.mean, in.rstd);
        grad_weight[i] += grad[i] * x[i];
        if constexpr (CENTER) grad_bias[i] += grad[i];
        sums[0] += grad[i] * w[i] * x[i];
        if constexpr (CENTER) sums[1] += grad[i] * w[i];
      }
    }
    row_sum<WARP, K>(sums, shared[turn]);
    if (!inside) continue;
    const int64_t offset = row * a.dim + column;
    const float along = sums[0] * per_dim;
    const float average = CENTER ? sums[K - 1] * per_dim : 0.0f;
    float dx[N], added[N] = {};
    if (a.grad_sum) to_floats(in.grad_sum, added);
#pragma unroll
    for (int i = 0; i < N; ++i)
      dx[i] = in.rstd * (grad[i] * w[i] - average - x[i] * along) + added[i];
    store_floats<T, N>(static_cast<T*>(a.grad_x) + offset, dx);
    if constexpr (AMAX) most = largest_stored<T, N>(dx, most);
    if (a.out) {
      float b[N] = {};
      if (CENTER && a.bias) load_floats<T, N>(static_cast<const T*>(a.bias) + column, b);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = scaled<CENTER>(x[i], w[i], b[i]);
      store_floats<T, N>(static_cast<T*>(a.out) + offset, x);
    }
  }
  if constexpr (AMAX) raise_by_block(a.amax, most);
  put_sums<WARP, N>(a.weight_partials, grad_weight, column, a.dim);
  if constexpr (CENTER) put_sums<WARP, N>(a.bias_partials, grad_bias, column, a.dim);
}

// Rows of any length: read twice, and partial sums kept in memory.
template <class T, int N, bool CENTER>
__global__ void __launch_bounds__(1024) backward_long_kernel(NormBackward a) {
  constexpr int K = CENTER ? 2 : 1;
  __shared__ float shared[2][K][kWarp];
  const int64_t step = int64_t(blockDim.x) * N;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const int64_t start = row * a.dim;
    const float rstd = a.rstd[row];
    const float mean = CENTER ? a.mean[row] : 0.0f;
    float sums[K] = {};
    for (int64_t column = int64_t(threadIdx.x) * N; column < a.dim; column += step) {
      float grad[N], x[N], w[N];
      load_floats<T, N>(static_cast<const T*>(a.grad) + start + column, grad);
      load_floats<T, N>(static_cast<const T*>(a.x) + start + column, x);
      load_floats<T, N>(static_cast<const T*>(a.weight) + column, w);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sums[0] += grad[i] * w[i] * normalised<CENTER>(x[i], mean, rstd);
        if constexpr (CENTER) sums[1] += grad[i] * w[i];
      }
    }
    block_sum<K>(sums, shared[turn]);
    const float along = sums[0] / a.dim;
    const float average = CENTER ? sums[K - 1] / a.dim : 0.0f;
    for (int64_t column = int64_t(threadIdx.x) * N; column < a.dim; column += step) {
      float grad[N], x[N], w[N], dx[N], added[N] = {}, b[N] = {};
      load_floats<T, N>(static_cast<const T*>(a.grad) + start + column, grad);
      load_floats<T, N>(static_cast<const T*>(a.x) + start + column, x);
      load_floats<T, N>(static_cast<const T*>(a.weight) + column, w);
      if (a.grad_sum) load_floats<T, N>(static_cast<const T*>(a.grad_sum) + start + column, added);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        x[i] = normalised<CENTER>(x[i], mean, rstd);
        dx[i] = rstd * (grad[i] * w[i] - average - x[i] * along) + added[i];
      }
      store_floats<T, N>(static_cast<T*>(a.grad_x) + start + column, dx);
      float grad_weight[N];
#pragma unroll
      for (int i = 0; i < N; ++i) grad_weight[i] = grad[i] * x[i];
      const bool first = row == blockIdx.x;
      const int64_t place = blockIdx.x * a.dim + column;
      if (a.weight_partials) put_as<N>(a.weight_partials + place, grad_weight, !first);
      if (CENTER && a.bias_partials) put_as<N>(a.bias_partials + place, grad, !first);
      if (!a.out) continue;
      if (CENTER && a.bias) load_floats<T, N>(static_cast<const T*>(a.bias) + column, b);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = scaled<CENTER>(x[i], w[i], b[i]);
      store_floats<T, N>(static_cast<T*>(a.out) + start + column, x);
    }
  }
}

struct Parameter {
  const float* partials;
  void* grad;
  Dtype dtype;
};

// 32 columns per block; warp y first adds partial rows y, y + 32, …, then column y of the 32 sums.
__global__ void __launch_bounds__(1024)
    partials_kernel(Parameter weight, Parameter bias, int64_t partials, int64_t dim,
                    bool accumulate) {
  __shared__ float shared[kWarp][kWarp + 1];
  const Parameter parameter = blockIdx.y == 0 ? weight : bias;
  const int64_t first = int64_t(blockIdx.x) * kWarp;
  float sum = 0.0f;
  if (first + threadIdx.x < dim) {
    const float* column = parameter.partials + first + threadIdx.x;
#pragma unroll 8
    for (int64_t p = threadIdx.y; p < partials; p += kWarp) sum += column[p * dim];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  const float total[1] = {warp_sum(shared[threadIdx.x][threadIdx.y])};
  if (threadIdx.x == 0 && first + threadIdx.y < dim)
    put<1>(parameter.grad, parameter.dtype, first + threadIdx.y, total, accumulate);
}

// Returns the number of partial rows.
template <class T, bool CENTER, bool AMAX>
int64_t backward_of(const NormBackward& a, cudaStream_t stream) {
  const bool vectors =
      a.dim % 8 == 0 && aligned16(a.grad, a.grad_sum, a.x, a.weight, a.bias, a.grad_x, a.out,
                                  a.weight_partials, a.bias_partials);
  const int64_t items = vectors ? a.dim / 8 : a.dim;
  constexpr int kBlocks = CENTER || sizeof(T) == 4 ? 3 : 4;  // per multiprocessor, by registers
  const int64_t most = norm_partials(a.rows, a.dim);
  const unsigned grid = static_cast<unsigned>(
      vectors && items <= kWarp ? std::min(most, divide_up(a.rows, kRowsOfBlock)) : most);
  if (grid == 0) return 0;
  if (vectors && items <= kWarp)
    backward_kernel<T, 8, CENTER, true, true, kWarp * kRowsOfBlock, 3, AMAX>
        <<<grid, dim3(kWarp, kRowsOfBlock), 0, stream>>>(a);
  else if (vectors && items <= 256)
    backward_kernel<T, 8, CENTER, false, true, 256, kBlocks, AMAX>
        <<<grid, threads_for(items), 0, stream>>>(a);
  else if (vectors && items <= 1024)
    backward_kernel<T, 8, CENTER, false, false, 1024, 1, AMAX>
        <<<grid, threads_for(items), 0, stream>>>(a);
  else if (vectors)
    backward_long_kernel<T, 8, CENTER><<<grid, 1024, 0, stream>>>(a);
  else if (items <= 1024)
    backward_kernel<T, 1, CENTER, false, false, 1024, 1, false>
        <<<grid, threads_for(items), 0, stream>>>(a);
  else
    backward_long_kernel<T, 1, CENTER><<<grid, 1024, 0, stream>>>(a);
  return grid;
}

template <bool CENTER>
void forward(const NormForward& norm, cudaStream_t stream) {
  if (norm.rows == 0 || norm.dim == 0) return;
  if (norm.amax && !norm.amax_per_row) cudaMemsetAsync(norm.amax, 0, sizeof(float), stream);
  with_type(norm.dtype,
            [&](auto type) { forward_of<typename decltype(type)::type, CENTER>(norm, stream); });
}

template <bool CENTER>
void backward(const NormBackward& norm, cudaStream_t stream) {
  if (norm.dim == 0) return;
  int64_t partials = 0;
  with_type(norm.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (!CENTER) {
      if (norm.amax) {
        cudaMemsetAsync(norm.amax, 0, sizeof(float), stream);
        partials = backward_of<T, CENTER, true>(norm, stream);
        return;
      }
    }
    partials = backward_of<T, CENTER, false>(norm, stream);
  });
  const Parameter weight{norm.weight_partials, norm.grad_weight, norm.grad_weight_dtype};
  const Parameter bias{norm.bias_partials, norm.grad_bias, norm.grad_bias_dtype};
  const unsigned wanted = (weight.grad ? 1 : 0) + (bias.grad ? 1 : 0);
  if (wanted == 0) return;
  const dim3 grid(static_cast<unsigned>(divide_up(norm.dim, kWarp)), wanted);
  partials_kernel<<<grid, dim3(kWarp, kWarp), 0, stream>>>(weight.grad ? weight : bias, bias,
                                                           partials, norm.dim, norm.accumulate);
}

}  // namespace

void rms_norm(const NormForward& norm, cudaStream_t stream) {
  forward<false>(norm, stream);
}

void layer_norm(const NormForward& norm, cudaStream_t stream) {
  forward<true>(norm, stream);
}

int64_t norm_partials(int64_t rows, int64_t dim) {
  // Four blocks of 256 threads, or eight of 128, for each of 132 multiprocessors. A constant, so
  // that the order of sums is the same everywhere.
  return std::min<int64_t>(rows, dim <= 1024 ? 1056 : 528);
}

bool finds_amax(const NormBackward& norm) {
  return norm.dim % 8 == 0 && norm.dim <= 8192 &&
         aligned16(norm.grad, norm.grad_sum, norm.x, norm.weight, norm.grad_x, norm.out);
}

void rms_norm_backward(const NormBackward& norm, cudaStream_t stream) {
  backward<false>(norm, stream);
}

void layer_norm_backward(const NormBackward& norm, cudaStream_t stream) {
  backward<true>(norm, stream);
}

}  // namespace fsdp::kernels::cuda
