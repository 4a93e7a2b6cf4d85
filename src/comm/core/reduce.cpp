#include "comm/core/reduce.h"

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

// Small enough for the accumulators to stay in the L1 cache, large enough to vectorise.
constexpr int64_t kBlock = 1024;

template <typename T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>, float, T>;

template <ReduceOp kOp, typename A>
A combine(A a, A b) {
  if constexpr (kOp == ReduceOp::MAX) {
    if constexpr (std::is_floating_point_v<A>) return (a > b || a != a) ? a : b;
    return std::max(a, b);
  } else if constexpr (kOp == ReduceOp::MIN) {
    if constexpr (std::is_floating_point_v<A>) return (a < b || a != a) ? a : b;
    return std::min(a, b);
  } else if constexpr (std::is_same_v<A, bool>) {
    return kOp == ReduceOp::PRODUCT ? (a && b) : (a || b);
  } else if constexpr (std::is_integral_v<A>) {  // unsigned, so that wrapping is defined
    using U = std::make_unsigned_t<A>;
    using W = std::conditional_t<(sizeof(U) < sizeof(unsigned)), unsigned, U>;
    return kOp == ReduceOp::PRODUCT ? A(W(U(a)) * W(U(b))) : A(W(U(a)) + W(U(b)));
  } else {
    return kOp == ReduceOp::PRODUCT ? a * b : a + b;
  }
}

// Step i of the loops below reads and writes only element i, so `to` may be any of the sources. The
// pragma tells the compiler so; otherwise it doesn't vectorise loops whose arrays may overlap.
template <typename T, ReduceOp kOp>
void reduce_typed(T* to, std::span<const void* const> from, int64_t count) {
  using A = Accumulator<T>;
  const size_t sources = from.size();
  auto source = [&](size_t s) { return static_cast<const T*>(from[s]); };
  auto finish = [&](A sum) {
    if constexpr (kOp == ReduceOp::AVG && !std::is_same_v<A, bool>)
      sum = static_cast<A>(sum / static_cast<A>(sources));
    return static_cast<T>(sum);
  };
  if (sources == 1) {
    std::memmove(to, from[0], count * sizeof(T));
    return;
  }
  A sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const T *first = source(0) + begin, *second = source(1) + begin;
    T* out = to + begin;
    if (sources == 2) {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i)
        out[i] = finish(combine<kOp>(static_cast<A>(first[i]), static_cast<A>(second[i])));
      continue;
    }
    for (int64_t i = 0; i < n; ++i)
      sum[i] = combine<kOp>(static_cast<A>(first[i]), static_cast<A>(second[i]));
    for (size_t s = 2; s + 1 < sources; ++s) {
      const T* next = source(s) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] = combine<kOp>(sum[i], static_cast<A>(next[i]));
    }
    const T* last = source(sources - 1) + begin;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[i] = finish(combine<kOp>(sum[i], static_cast<A>(last[i])));
  }
}

template <typename T>
void reduce_op(void* to, std::span<const void* const> from, int64_t count, ReduceOp op) {
  T* out = static_cast<T*>(to);
  switch (op) {
    case ReduceOp::SUM:
      return reduce_typed<T, ReduceOp::SUM>(out, from, count);
    case ReduceOp::AVG:
      return reduce_typed<T, ReduceOp::AVG>(out, from, count);
    case ReduceOp::MAX:
      return reduce_typed<T, ReduceOp::MAX>(out, from, count);
    case ReduceOp::MIN:
      return reduce_typed<T, ReduceOp::MIN>(out, from, count);
    case ReduceOp::PRODUCT:
      return reduce_typed<T, ReduceOp::PRODUCT>(out, from, count);
  }
}

}  // namespace

const char* name(ReduceOp op) {
  constexpr const char* kNames[] = {"sum", "average", "max", "min", "product"};
  return kNames[static_cast<int>(op)];
}

int64_t element_size(c10::ScalarType type) {
  switch (type) {
#define FSDP_SIZE(ctype, name) \
  case c10::ScalarType::name:  \
    return sizeof(ctype);
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS(FSDP_SIZE)
#undef FSDP_SIZE
    default:
      throw Error("tensors of this type can't be sent.", "convert the tensor first.");
  }
}

bool reducible(c10::ScalarType type) {
  using c10::ScalarType;
  for (ScalarType known : {ScalarType::Float, ScalarType::Double, ScalarType::BFloat16,
                           ScalarType::Half, ScalarType::Byte, ScalarType::Char, ScalarType::Short,
                           ScalarType::Int, ScalarType::Long, ScalarType::Bool})
    if (type == known) return true;
  return false;
}

void reduce(void* to, std::span<const void* const> from, int64_t count, c10::ScalarType type,
            ReduceOp op) {
  using c10::ScalarType;
  switch (type) {
    case ScalarType::Float:
      return reduce_op<float>(to, from, count, op);
    case ScalarType::Double:
      return reduce_op<double>(to, from, count, op);
    case ScalarType::BFloat16:
      return reduce_op<c10::BFloat16>(to, from, count, op);
    case ScalarType::Half:
      return reduce_op<c10::Half>(to, from, count, op);
    case ScalarType::Byte:
      return reduce_op<uint8_t>(to, from, count, op);
    case ScalarType::Char:
      return reduce_op<int8_t>(to, from, count, op);
    case ScalarType::Short:
      return reduce_op<int16_t>(to, from, count, op);
    case ScalarType::Int:
      return reduce_op<int32_t>(to, from, count, op);
    case ScalarType::Long:
      return reduce_op<int64_t>(to, from, count, op);
    case ScalarType::Bool:
      return reduce_op<bool>(to, from, count, op);
    default:
      throw Error(formatted("a reduction of {} isn't supported.", c10::toString(type)),
                  "reduce float32, float64, bfloat16, float16, bool or an integer type.");
  }
}

}  // namespace fsdp::comm
