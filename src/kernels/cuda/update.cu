// Optimizer updates in one pass over memory, and splitting and joining of masters.
//
// A launch takes a whole list of pieces; their addresses are passed by value as kernel parameters.
// Each block handles one chunk of one piece, four elements per thread at a time (16 bytes of
// float32), several of them in flight. Every element goes through the same instructions regardless
// of its position, so cutting a flat elsewhere changes no bit. For that reason products and sums
// are written as intrinsics, which the compiler neither fuses nor splits.
//
// Bytes per element for AdamW: 14 read and 12 written with a split master and a bfloat16 gradient;
// 16 read and 12 written with a float32 master and gradient, plus 2 written for a low copy.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/halves.cuh"
#include "kernels/cuda/update.h"

namespace fsdp::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kChunk = int64_t{kThreads} * kWide;  // per block: fastest with one vector each
constexpr int kPieces = 256;  // per launch
constexpr int64_t kMostBlocks = 1 << 30;
constexpr size_t kMostParameterBytes = 32764;

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// --- the arrays of a piece ---

struct PieceArgs {  // a piece as a kernel sees it
  void* master;
  void* low;
  const void* grad;
  float* first;
  float* second;
  int64_t numel;
  float numbers[3];
  int32_t group;
  int32_t count;
  int32_t end;   // one past its last block in this launch
  int32_t head;  // elements until every array is aligned; -1: they never all are
};

template <typename Shared>
struct List {
  Shared shared;
  int32_t count;
  PieceArgs pieces[kPieces];
};

enum class Low { kNone, kBFloat16, kFloat16 };

// Reads and writes masters, gradients and copies, four at a time or singly.
template <bool kSplit, bool kShortGrad, Low kLow>
struct Arrays {
  static __device__ Four masters(const PieceArgs& p, int64_t i) {
    if constexpr (kSplit)
      return load_split(p.master, p.low, i);
    else
      return load_float(p.master, i);
  }
  static __device__ float master(const PieceArgs& p, int64_t i) {
    if constexpr (kSplit)
      return join(load_half(p.master, i), first_signed(load_half(p.low, i)));
    else
      return static_cast<const float*>(p.master)[i];
  }
  static __device__ Four grads(const PieceArgs& p, int64_t i) {
    if constexpr (kShortGrad) {
      const uint2 g = load_halves(p.grad, i);
      return {__uint_as_float(g.x << 16), __uint_as_float(g.x & 0xffff0000u),
              __uint_as_float(g.y << 16), __uint_as_float(g.y & 0xffff0000u)};
    } else {
      return load_float(p.grad, i);
    }
  }
  static __device__ float grad(const PieceArgs& p, int64_t i) {
    if constexpr (kShortGrad)
      return __uint_as_float(static_cast<uint32_t>(load_half(p.grad, i)) << 16);
    else
      return static_cast<const float*>(p.grad)[i];
  }
  static __device__ void put(const PieceArgs& p, int64_t i, const Four& w) {
    if constexpr (kSplit)
      store_split(p.master, p.low, i, w);
    else
      store_float(p.master, i, w);
    if constexpr (kLow != Low::kNone)
      store_halves(p.low, i, lower_halves(rounded(w.x[0]), rounded(w.x[1])),
                   lower_halves(rounded(w.x[2]), rounded(w.x[3])));
  }
  static __device__ void put(const PieceArgs& p, int64_t i, float w) {
    if constexpr (kSplit) {
      const Split s = split(w);
      store_half(p.master, i, s.rounded >> 16);
      store_half(p.low, i, s.rest);
    } else {
      static_cast<float*>(p.master)[i] = w;
    }
    if constexpr (kLow != Low::kNone) store_half(p.low, i, rounded(w));
  }
  // The copy's bits, in the lower half.
  static __device__ uint32_t rounded(float w) {
    if constexpr (kLow == Low::kFloat16)
      return __half_as_ushort(__float2half_rn(w));
    else
      return __bfloat16_as_ushort(__float2bfloat16_rn(w));
  }
};

// --- update rules ---

// Reads the factor into `scale`; returns false if the update is skipped.
__device__ inline bool read_scale(const float* factor, bool maximize, float& scale) {
  const float value = factor ? *factor : 1.0f;
  scale = maximize ? -value : value;
  return finite(value);
}

struct AdamWRule {
  using Shared = AdamWLaunch;
  static constexpr int kStates = 2;
  float beta1, rest1, beta2, rest2, eps, scale, keep, size, correction;

  __device__ bool begin(const Shared& s, const PieceArgs& p) {
    beta1 = s.beta1, rest1 = s.one_minus_beta1, beta2 = s.beta2, rest2 = s.one_minus_beta2;
    eps = s.eps;
    keep = p.numbers[0], size = p.numbers[1], correction = p.numbers[2];
    if (s.rates) {
      const double lr = s.rates[2 * p.group], decay = s.rates[2 * p.group + 1];
      keep = static_cast<float>(__dsub_rn(1.0, __dmul_rn(lr, decay)));
      size = static_cast<float>(__ddiv_rn(lr, s.corrections[2 * p.count]));
      correction = static_cast<float>(s.corrections[2 * p.count + 1]);
    }
    return read_scale(s.factor, s.maximize, scale);
  }
  __device__ void apply(float& w, float g, float& m, float& v) const {
    g = __fmul_rn(g, scale);
    m = __fmaf_rn(g, rest1, __fmul_rn(m, beta1));
    v = __fmaf_rn(__fmul_rn(g, g), rest2, __fmul_rn(v, beta2));
    const float below = __fmaf_rn(__fsqrt_rn(v), correction, eps);
    w = __fmaf_rn(w, keep, -__fdiv_rn(__fmul_rn(size, m), below));
  }
};

template <bool kMomentum>
struct SGDRule {
  using Shared = SGDLaunch;
  static constexpr int kStates = kMomentum ? 1 : 0;
  float momentum, take, scale, lr, decay;
  bool nesterov, first;

  __device__ bool begin(const Shared& s, const PieceArgs& p) {
    momentum = s.momentum, take = s.one_minus_dampening, nesterov = s.nesterov;
    lr = p.numbers[0], decay = p.numbers[1], first = p.numbers[2] != 0;
    if (s.rates) {
      lr = static_cast<float>(s.rates[2 * p.group]);
      decay = static_cast<float>(s.rates[2 * p.group + 1]);
      first = s.counts[p.count] == 1;
    }
    return read_scale(s.factor, s.maximize, scale);
  }
  __device__ void apply(float& w, float g, float& m, float&) const {
    g = __fmaf_rn(g, scale, __fmul_rn(w, decay));
    if constexpr (kMomentum) {
      // The first buffer is the undamped gradient; the memory may hold anything before.
      m = first ? g : __fmaf_rn(m, momentum, __fmul_rn(g, take));
      g = nesterov ? __fmaf_rn(m, momentum, g) : m;
    }
    w = __fmaf_rn(-lr, g, w);
  }
};

// --- the kernel ---

// The first piece whose blocks end after `block`.
template <typename Shared>
__device__ inline int find_place(const List<Shared>& list, int32_t block) {
  int low = 0, high = list.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list.pieces[middle].end > block)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

template <typename Rule, typename Memory>
__device__ inline void update_one(const Rule& rule, const PieceArgs& p, int64_t i) {
  float w = Memory::master(p, i), m = 0, v = 0;
  const float g = Memory::grad(p, i);
  if constexpr (Rule::kStates > 0) m = p.first[i];
  if constexpr (Rule::kStates > 1) v = p.second[i];
  rule.apply(w, g, m, v);
  if constexpr (Rule::kStates > 0) p.first[i] = m;
  if constexpr (Rule::kStates > 1) p.second[i] = v;
  Memory::put(p, i, w);
}

template <typename Rule, typename Memory>
__global__ void __launch_bounds__(kThreads)
    update(const __grid_constant__ List<typename Rule::Shared> list) {
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  const int at = find_place(list, block);
  const PieceArgs& p = list.pieces[at];
  const int64_t chunk = block - (at > 0 ? list.pieces[at - 1].end : 0);
  Rule rule;
  if (!rule.begin(list.shared, p)) return;

  if (p.head < 0) {
    const int64_t end = min(p.numel, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk + threadIdx.x; i < end; i += kThreads)
      update_one<Rule, Memory>(rule, p, i);
    return;
  }

  const int64_t vectors = (p.numel - p.head) / kWide;
  const int64_t vector = chunk * kThreads + threadIdx.x;
  if (vector < vectors) {
    const int64_t i = p.head + vector * kWide;
    Four w = Memory::masters(p, i), m, v;
    const Four g = Memory::grads(p, i);
    if constexpr (Rule::kStates > 0) m = load_float(p.first, i);
    if constexpr (Rule::kStates > 1) v = load_float(p.second, i);
#pragma unroll
    for (int k = 0; k < kWide; ++k) rule.apply(w.x[k], g.x[k], m.x[k], v.x[k]);
    if constexpr (Rule::kStates > 0) store_float(p.first, i, m);
    if constexpr (Rule::kStates > 1) store_float(p.second, i, v);
    Memory::put(p, i, w);
  }

  if (chunk == 0) {  // before and after the aligned part: less than kWide elements each
    const int64_t tail = p.head + vectors * kWide;
    const int64_t i = threadIdx.x;
    if (i < p.head)
      update_one<Rule, Memory>(rule, p, i);
    else if (i - p.head < p.numel - tail)
      update_one<Rule, Memory>(rule, p, tail + i - p.head);
  }
}

int32_t head_of(const UpdatePiece& piece, const UpdateStorage& storage, int states) {
  const int64_t head = until_aligned(piece.master, storage.split ? 2 : 4);
  bool alike = until_aligned(piece.grad, storage.grad == Dtype::kFloat32 ? 4 : 2) == head;
  if (storage.split || storage.has_low) alike = alike && until_aligned(piece.low, 2) == head;
  if (states > 0) alike = alike && until_aligned(piece.first, 4) == head;
  if (states > 1) alike = alike && until_aligned(piece.second, 4) == head;
  if (!alike || head < 0) return -1;
  return static_cast<int32_t>(std::min(head, piece.numel));
}

template <typename Rule, typename Memory>
void launch_lists(const UpdatePiece* pieces, int64_t count, const UpdateStorage& storage,
                  const typename Rule::Shared& shared, cudaStream_t stream) {
  static_assert(sizeof(List<typename Rule::Shared>) <= kMostParameterBytes);
  List<typename Rule::Shared> list;
  list.shared = shared;
  list.count = 0;
  int64_t blocks = 0;
  const auto launch = [&] {
    if (list.count > 0)
      update<Rule, Memory><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(list);
    list.count = 0;
    blocks = 0;
  };
  for (int64_t n = 0; n < count; ++n) {
    const UpdatePiece& piece = pieces[n];
    if (piece.numel <= 0) continue;
    const int64_t more = divide_up(piece.numel, kChunk);
    if (list.count == kPieces || blocks + more > kMostBlocks) launch();
    blocks += more;
    list.pieces[list.count++] = {
        piece.master, piece.low,   piece.grad,  piece.first,
        piece.second, piece.numel, {piece.numbers[0], piece.numbers[1], piece.numbers[2]},
        piece.group,  piece.count, static_cast<int32_t>(blocks),
        head_of(piece, storage, Rule::kStates)};
  }
  launch();
}

template <typename Rule>
void launch_rule(const UpdatePiece* pieces, int64_t count, const UpdateStorage& storage,
                 const typename Rule::Shared& shared, cudaStream_t stream) {
  const auto with = [&](auto memory) {
    launch_lists<Rule, decltype(memory)>(pieces, count, storage, shared, stream);
  };
  const bool short_grad = storage.grad == Dtype::kBFloat16;
  if (storage.split)
    short_grad ? with(Arrays<true, true, Low::kNone>{}) : with(Arrays<true, false, Low::kNone>{});
  else if (!storage.has_low)
    short_grad ? with(Arrays<false, true, Low::kNone>{}) : with(Arrays<false, false, Low::kNone>{});
  else if (storage.low == Dtype::kBFloat16)
    short_grad ? with(Arrays<false, true, Low::kBFloat16>{})
               : with(Arrays<false, false, Low::kBFloat16>{});
  else
    short_grad ? with(Arrays<false, true, Low::kFloat16>{})
               : with(Arrays<false, false, Low::kFloat16>{});
}

// --- counts ---

constexpr int kCounts = 512;  // per launch
struct Which {
  int32_t count;
  int32_t places[kCounts];
};
static_assert(sizeof(Which) <= kMostParameterBytes);

__global__ void advance_counts(const __grid_constant__ Which which, double* counts,
                               double* corrections, double beta1, double beta2,
                               const float* factor) {
  const int n = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (n >= which.count) return;
  const int i = which.places[n];
  const bool skipped = factor && !finite(*factor);
  const double step = counts[i] + (skipped ? 0 : 1);
  counts[i] = step;
  if (!corrections) return;
  corrections[2 * i] = 1 - pow(beta1, step);
  corrections[2 * i + 1] = 1 / sqrt(1 - pow(beta2, step));
}

// --- split and join ---

__global__ void __launch_bounds__(kThreads)
    split_all(const float* whole, void* high, void* rest, int64_t numel, bool aligned) {
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t threads = gridDim.x * int64_t{kThreads};
  const int64_t vectors = aligned ? numel / kWide : 0;
  for (int64_t v = thread; v < vectors; v += threads)
    store_split(high, rest, v * kWide, load_float(whole, v * kWide));
  for (int64_t i = vectors * kWide + thread; i < numel; i += threads) {
    const Split s = split(whole[i]);
    store_half(high, i, s.rounded >> 16);
    store_half(rest, i, s.rest);
  }
}

__global__ void __launch_bounds__(kThreads)
    join_all(const void* high, const void* rest, float* whole, int64_t numel, bool aligned) {
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t threads = gridDim.x * int64_t{kThreads};
  const int64_t vectors = aligned ? numel / kWide : 0;
  for (int64_t v = thread; v < vectors; v += threads)
    store_float(whole, v * kWide, load_split(high, rest, v * kWide));
  for (int64_t i = vectors * kWide + thread; i < numel; i += threads)
    whole[i] = join(load_half(high, i), first_signed(load_half(rest, i)));
}

bool all_aligned(const void* whole, const void* high, const void* rest) {
  return until_aligned(whole, 4) == 0 && until_aligned(high, 2) == 0 && until_aligned(rest, 2) == 0;
}

unsigned grid_for(int64_t numel) {
  return static_cast<unsigned>(
      std::min<int64_t>(divide_up(numel, int64_t{kThreads} * kWide), 1 << 16));
}

}  // namespace

void adamw(const UpdatePiece* pieces, int64_t count, const UpdateStorage& storage,
           const AdamWLaunch& launch, cudaStream_t stream) {
  launch_rule<AdamWRule>(pieces, count, storage, launch, stream);
}

void sgd(const UpdatePiece* pieces, int64_t count, const UpdateStorage& storage,
         const SGDLaunch& launch, cudaStream_t stream) {
  if (launch.momentum != 0)
    launch_rule<SGDRule<true>>(pieces, count, storage, launch, stream);
  else
    launch_rule<SGDRule<false>>(pieces, count, storage, launch, stream);
}

void advance(double* counts, const int32_t* which, int64_t count, double* corrections, double beta1,
             double beta2, const float* factor, cudaStream_t stream) {
  Which list;
  for (int64_t done = 0; done < count; done += kCounts) {
    list.count = static_cast<int32_t>(std::min<int64_t>(kCounts, count - done));
    std::copy(which + done, which + done + list.count, list.places);
    advance_counts<<<static_cast<unsigned>(divide_up(list.count, 64)), 64, 0, stream>>>(
        list, counts, corrections, beta1, beta2, factor);
  }
}

void split_float(const float* whole, void* high, int16_t* rest, int64_t numel,
                 cudaStream_t stream) {
  if (numel > 0)
    split_all<<<grid_for(numel), kThreads, 0, stream>>>(whole, high, rest, numel,
                                                        all_aligned(whole, high, rest));
}

void join_float(const void* high, const int16_t* rest, float* whole, int64_t numel,
                cudaStream_t stream) {
  if (numel > 0)
    join_all<<<grid_for(numel), kThreads, 0, stream>>>(high, rest, whole, numel,
                                                       all_aligned(whole, high, rest));
}

}  // namespace fsdp::kernels::cuda
