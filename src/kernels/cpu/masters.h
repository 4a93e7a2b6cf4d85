// Updates of masters in lanes, threaded: every array is read and written once, and the copy in
// forward's dtype is written in the same pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/parallel.h"

namespace fsdp::kernels::cpu {

// Calls body(G{}) with the type of the gradient that goes with a master of T.
template <typename T, typename Body>
void with_grad(const at::Tensor& grad, const Body& body) {
  if constexpr (std::is_same_v<T, float>)
    if (grad.scalar_type() == at::ScalarType::BFloat16) return body(c10::BFloat16{});
  body(T{});
}

template <typename Tensors>
at::ScalarType master_type(const Tensors& t) {
  return t.rest.defined() ? at::ScalarType::Float : t.master.scalar_type();
}

// Elements after which the copy, or the halves of a split master, are written: they are still in
// the L1 cache then, and a separate loop overlaps better with the divisions than one that waits for
// each.
constexpr int64_t kBlock = 1024;

// Writes `count` elements of the master to low[begin, …).
template <typename T>
void write_low(const at::Tensor& low, const T* master, int64_t begin, int64_t count) {
  using C = Compute<T>;
  with_dtype(low.scalar_type(), [&]<typename L>(L) {
    const auto convert = [](L* to, const T* from) { store<C>(to, load<C>(from)); };
    over<C>(count, convert, write<L>(low) + begin, master);
  });
}

// Calls body(master, begin, end) for blocks of the flats, threaded; `master` points to element
// `begin`. Writes the copy after each block.
template <typename T, typename Tensors, typename Body>
void update_whole(const Tensors& t, const Body& body) {
  T* master = write<T>(t.master);
  parallel(t.master.numel(), [&](int64_t, int64_t begin, int64_t end) {
    if (!t.low.defined()) return body(master + begin, begin, end);
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t stop = std::min(end, at + kBlock);
      body(master + at, at, stop);
      write_low(t.low, master + at, at, stop - at);
    }
  });
}

// The same for a split master: each block is joined before body and split again after it.
template <typename Tensors, typename Body>
void update_split(const Tensors& t, const Body& body) {
  auto* high = write<c10::BFloat16>(t.low);
  auto* rest = write<int16_t>(t.rest);
  const auto join = [](float* w, c10::BFloat16* h, int16_t* r) {
    store<float>(w, load_halves<16>(h, r));
  };
  const auto split = [](float* w, c10::BFloat16* h, int16_t* r) {
    store_halves<16>(h, r, load<float>(w));
  };
  parallel(t.rest.numel(), [&](int64_t, int64_t begin, int64_t end) {
    float block[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t stop = std::min(end, at + kBlock);
      over<float>(stop - at, join, static_cast<float*>(block), high + at, rest + at);
      body(block, at, stop);
      over<float>(stop - at, split, static_cast<float*>(block), high + at, rest + at);
    }
  });
}

template <typename T, typename Tensors, typename Body>
void update(const Tensors& t, const Body& body) {
  if constexpr (std::is_same_v<T, float>)
    if (t.rest.defined()) return update_split(t, body);
  update_whole<T>(t, body);
}

}  // namespace fsdp::kernels::cpu
