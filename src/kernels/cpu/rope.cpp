// Rotary positions on the CPU, token by token: a token's angles are read once for all its heads.
#include <torch/library.h>

#include <vector>

#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/lane_math.h"
#include "kernels/cpu/parallel.h"
#include "kernels/outputs.h"

namespace fsdp::kernels::cpu {
namespace {

using at::Tensor;

// A token's cosines and sines, for the first half of a head.
template <typename C>
class Angles {
 public:
  Angles(const Tensor& cos, const Tensor& sin, const RopeSizes& size, bool inverse)
      : cos_(cos), sin_(sin), size_(size), sign_(inverse ? -1 : 1), values_(size.head_dim) {}

  void read_token(int64_t batch, int64_t token) {
    const int64_t at = batch * size_.cos_batch + token * size_.head_dim, half = size_.head_dim / 2;
    with_dtype(cos_.scalar_type(), [&]<typename A>(A) {
      const A *cos = read<A>(cos_) + at, *sin = read<A>(sin_) + at;
      for (int64_t i = 0; i < half; ++i) {
        values_[i] = static_cast<C>(cos[i]);
        values_[half + i] = sign_ * static_cast<C>(sin[i]);
      }
    });
  }

  // Rotates a head, from `from` to `to`, which may be the same.
  template <typename T>
  void turn(T* to, const T* from) const {
    const int64_t half = size_.head_dim / 2;
    const auto pairs = [](T* to_first, T* to_second, const T* first, const T* second, const C* c,
                          const C* s) {
      const Lanes<C> a = load<C>(first), b = load<C>(second);
      const Lanes<C> cos = load<C>(c), sin = load<C>(s);
      store<C>(to_first, a * cos - b * sin);
      store<C>(to_second, b * cos + a * sin);
    };
    over<C>(half, pairs, to, to + half, from, from + half, values_.data(), values_.data() + half);
  }

 private:
  const Tensor &cos_, &sin_;
  const RopeSizes size_;
  const C sign_;
  std::vector<C> values_;
};

// Calls body(angles, batch, token) for every token.
template <typename C, typename Body>
void over_tokens(const Tensor& cos, const Tensor& sin, const RopeSizes& size, bool inverse,
                 int64_t width, const Body& body) {
  parallel_rows(size.batch * size.tokens, width, [&](int64_t begin, int64_t end) {
    Angles<C> angles(cos, sin, size, inverse);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t batch = i / size.tokens, token = i % size.tokens;
      angles.read_token(batch, token);
      body(angles, batch, token);
    }
  });
}

void rope_(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t heads, bool inverse) {
  const RopeSizes size = check_rope_(x, cos, sin, heads, inverse);
  with_dtype(x.scalar_type(), [&]<typename T>(T) {
    using C = Compute<T>;
    T* start = write<T>(x);
    const int64_t batch_stride = x.stride(0), token_stride = x.stride(1);
    over_tokens<C>(cos, sin, size, inverse, heads * size.head_dim,
                   [&](const Angles<C>& angles, int64_t batch, int64_t token) {
                     T* row = start + batch * batch_stride + token * token_stride;
                     for (int64_t head = 0; head < heads; ++head) {
                       T* at = row + head * size.head_dim;
                       angles.turn(at, at);
                     }
                   });
  });
}

Tensor rope_pack(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                 const Tensor& sin) {
  const RopeSizes size = check_rope_pack(q, k, v, cos, sin);
  Tensor packed = empty_packed(q, size);
  const int64_t dim = size.head_dim, width = packed.size(2);
  with_dtype(q.scalar_type(), [&]<typename T>(T) {
    using C = Compute<T>;
    T* start = write<T>(packed);
    const auto head_of = [](const Tensor& from, int64_t batch, int64_t head, int64_t token) {
      return read<T>(from) + batch * from.stride(0) + head * from.stride(1) +
             token * from.stride(2);
    };
    over_tokens<C>(cos, sin, size, /*inverse=*/true, width,
                   [&](const Angles<C>& angles, int64_t batch, int64_t token) {
                     T* to = start + (batch * size.tokens + token) * width;
                     for (int64_t head = 0; head < size.heads; ++head, to += dim)
                       angles.turn(to, head_of(q, batch, head, token));
                     for (int64_t head = 0; head < size.kv_heads; ++head, to += dim)
                       angles.turn(to, head_of(k, batch, head, token));
                     for (int64_t head = 0; head < size.kv_heads; ++head, to += dim) {
                       const T* from = head_of(v, batch, head, token);
                       std::copy(from, from + dim, to);
                     }
                   });
  });
  return packed;
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, CPU, m) {
  m.impl("rope_", rope_);
  m.impl("rope_pack", rope_pack);
}

}  // namespace fsdp::kernels::cpu
