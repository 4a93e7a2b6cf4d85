// Rotary positions: in place on the heads of packed rows, and their backward, which also packs the
// gradients of q, k and v.
//
// A thread handles N elements of a head's first half with their partners in the second half, for up
// to four heads of the token, so that cosines are read once for them. Each element is read and
// written once.
#include <algorithm>

#include "kernels/cuda/common.cuh"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 4;                      // per thread, if there is work for all threads
constexpr int64_t kFew = int64_t(132) * 2048;  // threads that a large device runs at once

// Threads per token, and tokens per block.
struct Shape {
  unsigned vectors;  // per half head
  unsigned groups;   // of heads: group g takes heads g, g + groups, …
  dim3 block;
  unsigned grid;
};

Shape shape_of(int64_t all_tokens, int64_t heads, int64_t half, int n) {
  Shape shape;
  shape.vectors = static_cast<unsigned>(half / n);
  const bool few = all_tokens * heads * shape.vectors <= kFew;
  shape.groups = static_cast<unsigned>(few ? heads : divide_up(heads, kHeads));
  const unsigned x = std::min<unsigned>(shape.vectors * shape.groups, kThreads);
  const unsigned y = kThreads / x;
  shape.block = dim3(x, y);
  shape.grid = static_cast<unsigned>(divide_up(all_tokens, y));
  return shape;
}

template <class C, int N>
__device__ inline void read_table(const RopeTable& table, int64_t batch, int64_t place,
                                  bool inverse, float (&cos)[N], float (&sin)[N]) {
  const int64_t offset = batch * table.batch_stride + place;
  load_floats<C, N>(static_cast<const C*>(table.cos) + offset, cos);
  load_floats<C, N>(static_cast<const C*>(table.sin) + offset, sin);
  if (inverse) {
#pragma unroll
    for (int i = 0; i < N; ++i) sin[i] = -sin[i];
  }
}

template <int N>
__device__ inline void turn(float (&first)[N], float (&second)[N], const float (&cos)[N],
                            const float (&sin)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float x = first[i], y = second[i];
    first[i] = x * cos[i] - y * sin[i];
    second[i] = y * cos[i] + x * sin[i];
  }
}

template <class T, class C, int N>
__global__ void __launch_bounds__(kThreads) rope_kernel(Rope a, unsigned vectors, unsigned groups) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (at >= a.batch * a.tokens) return;
  const unsigned batch = static_cast<unsigned>(at) / static_cast<unsigned>(a.tokens);
  const unsigned token = static_cast<unsigned>(at) - batch * static_cast<unsigned>(a.tokens);
  const int half = static_cast<int>(a.head_dim / 2);
  T* row = static_cast<T*>(a.x) + batch * a.batch_stride + token * a.token_stride;
  for (unsigned item = threadIdx.x; item < vectors * groups; item += blockDim.x) {
    const unsigned group = item / vectors;
    const int column = static_cast<int>(item - group * vectors) * N;
    float cos[N], sin[N];
    read_table<C, N>(a.table, batch, token * a.head_dim + column, a.inverse, cos, sin);
    T* start = row + group * a.head_dim + column;
    const int64_t step = groups * a.head_dim;
    Vec<T, N> firsts[kHeads], seconds[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (group + k * groups >= a.heads) continue;
      firsts[k] = load<T, N>(start + k * step);
      seconds[k] = load<T, N>(start + k * step + half);
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (group + k * groups >= a.heads) continue;
      float first[N], second[N];
      to_floats(firsts[k], first);
      to_floats(seconds[k], second);
      turn<N>(first, second, cos, sin);
      store_floats<T, N>(start + k * step, first);
      store_floats<T, N>(start + k * step + half, second);
    }
  }
}

// A thread's part of token `at`. Returns the largest magnitude it wrote if AMAX.
template <class T, class C, int N, bool AMAX>
__device__ __forceinline__ unsigned rope_pack_part(const RopePack& a, int64_t at, unsigned vectors,
                                                   unsigned groups) {
  unsigned most = 0;
  const unsigned batch = static_cast<unsigned>(at) / static_cast<unsigned>(a.tokens);
  const unsigned token = static_cast<unsigned>(at) - batch * static_cast<unsigned>(a.tokens);
  const int half = static_cast<int>(a.head_dim / 2);
  const int64_t turned = a.heads + a.kv_heads;
  const int64_t heads = turned + a.kv_heads;
  T* row = static_cast<T*>(a.out) + at * heads * a.head_dim;
  for (unsigned item = threadIdx.x; item < vectors * groups; item += blockDim.x) {
    const unsigned group = item / vectors;
    const int column = static_cast<int>(item - group * vectors) * N;
    float cos[N], sin[N];
    if (group < turned)
      read_table<C, N>(a.table, batch, token * a.head_dim + column, true, cos, sin);
    T* start = row + group * a.head_dim + column;
    const int64_t step = groups * a.head_dim;
    Vec<T, N> firsts[kHeads], seconds[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      const int64_t head = group + k * groups;
      if (head >= heads) continue;
      const HeadsView& from = head < a.heads ? a.q : head < turned ? a.k : a.v;
      const int64_t of = head < a.heads ? head : head < turned ? head - a.heads : head - turned;
      const T* source = static_cast<const T*>(from.data) + batch * from.batch_stride +
                        of * from.head_stride + token * from.token_stride + column;
      firsts[k] = load<T, N>(source);
      seconds[k] = load<T, N>(source + half);
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      const int64_t head = group + k * groups;
      if (head >= heads) continue;
      float first[N], second[N];
      to_floats(firsts[k], first);
      to_floats(seconds[k], second);
      if (head < turned) turn<N>(first, second, cos, sin);
      store_floats<T, N>(start + k * step, first);
      store_floats<T, N>(start + k * step + half, second);
      if constexpr (AMAX) {
#pragma unroll
        for (int i = 0; i < N; ++i)
          most =
              larger(most, larger(stored_magnitude<T>(first[i]), stored_magnitude<T>(second[i])));
      }
    }
  }
  return most;
}

// AMAX: also raises a.amax by the magnitudes of out.
template <class T, class C, int N, bool AMAX>
__global__ void __launch_bounds__(kThreads)
    rope_pack_kernel(RopePack a, unsigned vectors, unsigned groups) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  unsigned most = 0;
  if (at < a.batch * a.tokens) most = rope_pack_part<T, C, N, AMAX>(a, at, vectors, groups);
  if constexpr (AMAX) raise_by_block(a.amax, most);
}

// Whether vectors of 8 may be read: every half head starts at a multiple of 16 bytes.
bool in_vectors(const void* data, Dtype dtype, int64_t head_dim,
                std::initializer_list<int64_t> strides) {
  const int64_t step = 16 / size_of(dtype);
  for (const int64_t stride : strides)
    if (stride % step != 0) return false;
  return head_dim % 16 == 0 && aligned16(data);
}

bool in_vectors(const RopeTable& table, int64_t head_dim) {
  return head_dim % 16 == 0 && table.batch_stride % 8 == 0 && aligned16(table.cos, table.sin);
}

bool in_vectors(const HeadsView& view, Dtype dtype, int64_t head_dim) {
  return in_vectors(view.data, dtype, head_dim,
                    {view.batch_stride, view.head_stride, view.token_stride});
}

template <class T, class C>
void rope_of(const Rope& a, cudaStream_t stream) {
  const bool vectors = in_vectors(a.table, a.head_dim) &&
                       in_vectors(a.x, a.dtype, a.head_dim, {a.batch_stride, a.token_stride});
  const Shape shape = shape_of(a.batch * a.tokens, a.heads, a.head_dim / 2, vectors ? 8 : 1);
  if (vectors)
    rope_kernel<T, C, 8><<<shape.grid, shape.block, 0, stream>>>(a, shape.vectors, shape.groups);
  else
    rope_kernel<T, C, 1><<<shape.grid, shape.block, 0, stream>>>(a, shape.vectors, shape.groups);
}

template <class T, class C>
void rope_pack_of(const RopePack& a, cudaStream_t stream) {
  const bool vectors = in_vectors(a.table, a.head_dim) && in_vectors(a.q, a.dtype, a.head_dim) &&
                       in_vectors(a.k, a.dtype, a.head_dim) &&
                       in_vectors(a.v, a.dtype, a.head_dim) && aligned16(a.out);
  const int64_t heads = a.heads + 2 * a.kv_heads;
  const Shape shape = shape_of(a.batch * a.tokens, heads, a.head_dim / 2, vectors ? 8 : 1);
  const auto kernel =
      vectors ? (a.amax ? rope_pack_kernel<T, C, 8, true> : rope_pack_kernel<T, C, 8, false>)
              : (a.amax ? rope_pack_kernel<T, C, 1, true> : rope_pack_kernel<T, C, 1, false>);
  kernel<<<shape.grid, shape.block, 0, stream>>>(a, shape.vectors, shape.groups);
}

}  // namespace

void rope(const Rope& rope, cudaStream_t stream) {
  if (rope.batch * rope.tokens * rope.heads * rope.head_dim == 0) return;
  with_type(rope.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (rope.table.float32)
      rope_of<T, float>(rope, stream);
    else
      rope_of<T, T>(rope, stream);
  });
}

void rope_pack(const RopePack& rope, cudaStream_t stream) {
  if (rope.amax) cudaMemsetAsync(rope.amax, 0, sizeof(float), stream);
  if (rope.batch * rope.tokens * (rope.heads + 2 * rope.kv_heads) * rope.head_dim == 0) return;
  with_type(rope.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (rope.table.float32)
      rope_pack_of<T, float>(rope, stream);
    else
      rope_pack_of<T, T>(rope, stream);
  });
}

}  // namespace fsdp::kernels::cuda
