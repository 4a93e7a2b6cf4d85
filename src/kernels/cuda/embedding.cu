// Backward of an embedding: adds each row of the gradient to the row of the weight's gradient that
// its id names, always in row order.
//
// Few rows (kUnsortedRows): one kernel. One block per row searches all ids for its own; the first
// row of an id adds up the others too.
//
// More rows come sorted by id. The sorted list is cut into chunks, one block each, which add up
// runs of equal ids; a run within one chunk is written at once. If a run crosses into the next
// chunk, its pieces go to a list of partial sums (two rows per chunk: one for the run that comes
// from the previous chunk, one for the run that continues in the next), and a second kernel adds
// those. An id that occurs n times thus costs n / chunks rows in sequence, then one partial row for
// each chunk it fills: for 100,000 occurrences, about 50 + 2000 rows.
#include <algorithm>

#include "kernels/cuda/common.cuh"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;  // rows read at a time
constexpr int64_t kMostChunks = 2048;
constexpr int64_t kLeastRows = 32;  // per chunk

int64_t rows_of_chunk(int64_t rows) {
  return std::max(kLeastRows, divide_up(rows, kMostChunks));
}

__device__ inline bool counts(const EmbeddingBackward& a, int64_t id) {
  return id >= 0 && id < a.vocab && id != a.padding_idx;
}

template <int N>
__device__ inline void write(const EmbeddingBackward& a, int64_t id, int64_t column,
                             const float (&sum)[N]) {
  if (counts(a, id))
    put<N>(a.grad_weight, a.grad_weight_dtype, id * a.dim + column, sum, a.accumulate);
}

// Adds the rows list[0], list[1], … of `from` at a column, reading kAhead of them at a time.
template <class T, int N, class List>
__device__ inline void add_rows(const T* from, int64_t dim, int count, List list, float (&sum)[N]) {
  for (int i = 0; i < count; i += kAhead) {
    Vec<T, N> ahead[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      if (i + k < count) ahead[k] = load<T, N>(from + list(i + k) * dim);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (i + k >= count) continue;
      float x[N];
      to_floats(ahead[k], x);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[j];
    }
  }
}

// --- few rows, as they come ---

template <class T, int N>
__global__ void __launch_bounds__(kThreads) unsorted_kernel(EmbeddingBackward a) {
  constexpr int kWords = kUnsortedRows / kWarp;
  __shared__ unsigned equal[kWords];  // one bit per row, set if it has this row's id
  __shared__ int list[kUnsortedRows];
  __shared__ int count;
  const int rows = static_cast<int>(a.rows);
  const int row = blockIdx.x;
  const int64_t id = a.ids[row];
  if (!counts(a, id)) return;
  for (int start = 0; start < rows; start += blockDim.x) {
    const int i = start + threadIdx.x;
    const unsigned bits = __ballot_sync(kAll, i < rows && a.ids[i] == id);
    if (i % kWarp == 0 && i < kUnsortedRows) equal[i / kWarp] = bits;
  }
  __syncthreads();
  const int words = (rows + kWarp - 1) / kWarp;
  if (threadIdx.x < words) {
    int place = 0;
    for (int w = 0; w < threadIdx.x; ++w) place += __popc(equal[w]);
    for (unsigned bits = equal[threadIdx.x]; bits != 0; bits &= bits - 1)
      list[place++] = threadIdx.x * kWarp + __ffs(bits) - 1;
    if (threadIdx.x == words - 1) count = place;
  }
  __syncthreads();
  if (list[0] != row) return;
  for (int64_t column = int64_t(threadIdx.x) * N; column < a.dim;
       column += int64_t(blockDim.x) * N) {
    float sum[N] = {};
    add_rows<T, N>(
        static_cast<const T*>(a.grad) + column, a.dim, count,
        [&](int i) { return int64_t(list[i]); }, sum);
    write<N>(a, id, column, sum);
  }
}

// --- many rows, sorted ---

struct Chunk {
  int64_t begin, end;
  bool from_before, goes_on;  // its first run began earlier; its last one continues

  __device__ Chunk(const EmbeddingBackward& a, int64_t number, int64_t rows) {
    begin = number * rows;
    end = min(begin + rows, a.rows);
    from_before = begin > 0 && a.ids[begin - 1] == a.ids[begin];
    goes_on = end < a.rows && a.ids[end - 1] == a.ids[end];
  }
};

// Rows of `partials`: a chunk's run from before, and its run that continues.
__device__ inline int64_t before_row(int64_t chunk) {
  return 2 * chunk;
}
__device__ inline int64_t onward_row(int64_t chunk) {
  return 2 * chunk + 1;
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) runs_kernel(EmbeddingBackward a, int64_t chunk_rows) {
  const int64_t column = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  if (column >= a.dim) return;
  const int64_t number = blockIdx.x;
  const Chunk chunk(a, number, chunk_rows);
  const T* grad = static_cast<const T*>(a.grad) + column;
  int64_t id = a.ids[chunk.begin];
  bool first = true;  // run in the chunk
  float sum[N] = {};
  for (int64_t start = chunk.begin; start < chunk.end; start += kAhead) {
    int64_t ids[kAhead];
    Vec<T, N> ahead[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (start + k >= chunk.end) continue;
      ids[k] = a.ids[start + k];
      ahead[k] = load<T, N>(grad + a.order[start + k] * a.dim);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (start + k >= chunk.end) continue;
      if (ids[k] != id) {
        if (first && chunk.from_before)
          store_floats<float, N>(a.partials + before_row(number) * a.dim + column, sum);
        else
          write<N>(a, id, column, sum);
        first = false;
        id = ids[k];
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = 0.0f;
      }
      float x[N];
      to_floats(ahead[k], x);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[j];
    }
  }
  if (first && chunk.from_before)
    store_floats<float, N>(a.partials + before_row(number) * a.dim + column, sum);
  else if (chunk.goes_on)
    store_floats<float, N>(a.partials + onward_row(number) * a.dim + column, sum);
  else
    write<N>(a, id, column, sum);
}

// Runs that begin in a chunk and continue in the next ones.
template <int N>
__global__ void __launch_bounds__(kThreads)
    crossing_kernel(EmbeddingBackward a, int64_t chunk_rows) {
  const int64_t column = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  if (column >= a.dim) return;
  const int64_t number = blockIdx.x;
  const Chunk chunk(a, number, chunk_rows);
  const int64_t id = a.ids[chunk.end - 1];
  if (!chunk.goes_on || (chunk.from_before && a.ids[chunk.begin] == id)) return;
  int64_t low = chunk.end, high = a.rows;  // the run's end, by binary search
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (a.ids[middle] == id)
      low = middle + 1;
    else
      high = middle;
  }
  const int64_t last = (low - 1) / chunk_rows;
  float sum[N];
  load_floats<float, N>(a.partials + onward_row(number) * a.dim + column, sum);
  add_rows<float, N>(
      a.partials + column, a.dim, static_cast<int>(last - number),
      [&](int i) { return before_row(number + 1 + i); }, sum);
  write<N>(a, id, column, sum);
}

template <class T, int N>
void backward_of(const EmbeddingBackward& a, cudaStream_t stream) {
  const int64_t vectors = divide_up(a.dim, N);
  const unsigned threads =
      static_cast<unsigned>(std::min<int64_t>(kThreads, divide_up(vectors, kWarp) * kWarp));
  if (a.order == nullptr) {
    unsorted_kernel<T, N><<<static_cast<unsigned>(a.rows), threads, 0, stream>>>(a);
    return;
  }
  const int64_t chunk_rows = rows_of_chunk(a.rows);
  const dim3 grid(static_cast<unsigned>(divide_up(a.rows, chunk_rows)),
                  static_cast<unsigned>(divide_up(vectors, threads)));
  runs_kernel<T, N><<<grid, threads, 0, stream>>>(a, chunk_rows);
  crossing_kernel<N><<<grid, threads, 0, stream>>>(a, chunk_rows);
}

}  // namespace

int64_t embedding_partials(int64_t rows) {
  return rows == 0 ? 0 : 2 * divide_up(rows, rows_of_chunk(rows));
}

void embedding_backward(const EmbeddingBackward& embedding, cudaStream_t stream) {
  const EmbeddingBackward& a = embedding;
  if (!a.accumulate && a.vocab * a.dim > 0)
    cudaMemsetAsync(a.grad_weight, 0, a.vocab * a.dim * size_of(a.grad_weight_dtype), stream);
  if (a.rows == 0 || a.dim == 0) return;
  const bool vectors = a.dim % 8 == 0 && aligned16(a.grad, a.grad_weight, a.partials);
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (vectors)
      backward_of<T, 8>(a, stream);
    else
      backward_of<T, 1>(a, stream);
  });
}

}  // namespace fsdp::kernels::cuda
