// Memory access by four elements, and float32 numbers in two halves (kernels/split.h): shared by
// the passes over flat shards.
#pragma once

#include <cstdint>

namespace fsdp::kernels::cuda {

constexpr int kWide = 4;  // elements per access of a thread: 16 bytes of float32

// Elements until an address is aligned for kWide elements of `size` bytes; -1: never.
inline int64_t until_aligned(const void* address, int64_t size) {
  const auto over = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) %
                                         static_cast<uintptr_t>(size * kWide));
  if (over % size != 0) return -1;
  return (size * kWide - over) % (size * kWide) / size;
}

// Data read once and written once per step need not stay in a cache.
template <typename T>
__device__ inline T read_once(const T* from) {
  return __ldcs(from);
}
template <typename T>
__device__ inline void write_once(T* to, T value) {
  __stcs(to, value);
}

__device__ inline bool finite(float x) {
  return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}
// Two 16-bit halves in one word: the upper halves of two words, or the lower ones.
__device__ inline uint32_t upper_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x7632);
}
__device__ inline uint32_t lower_halves(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x5410);
}

struct Four {
  float x[kWide];
};

__device__ inline Four load_float(const void* from, int64_t i) {
  const float4 v = read_once(reinterpret_cast<const float4*>(static_cast<const float*>(from) + i));
  return {v.x, v.y, v.z, v.w};
}
__device__ inline void store_float(void* to, int64_t i, const Four& v) {
  write_once(reinterpret_cast<float4*>(static_cast<float*>(to) + i),
             make_float4(v.x[0], v.x[1], v.x[2], v.x[3]));
}
__device__ inline uint2 load_halves(const void* from, int64_t i) {
  return read_once(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + i));
}
__device__ inline void store_halves(void* to, int64_t i, uint32_t first, uint32_t second) {
  write_once(reinterpret_cast<uint2*>(static_cast<uint16_t*>(to) + i), make_uint2(first, second));
}
__device__ inline uint16_t load_half(const void* from, int64_t i) {
  return static_cast<const uint16_t*>(from)[i];
}
__device__ inline void store_half(void* to, int64_t i, uint32_t bits) {
  static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(bits);
}

// --- split numbers ---

__device__ inline float join(uint32_t high, int32_t rest) {
  return __uint_as_float((high << 16) + static_cast<uint32_t>(rest));
}

struct Split {
  uint32_t rounded;  // the bfloat16 in its upper half
  uint32_t rest;     // the int16 in its lower half
};
__device__ inline Split split(float x) {
  const uint32_t bits = x == x ? __float_as_uint(x) : 0x7fc00000u;
  const uint32_t rounded = bits + 0x8000u;
  return {rounded, bits - (rounded & 0xffff0000u)};
}

__device__ inline int32_t first_signed(uint32_t two) {
  return static_cast<int32_t>(two << 16) >> 16;
}
__device__ inline int32_t second_signed(uint32_t two) {
  return static_cast<int32_t>(two) >> 16;
}

__device__ inline Four load_split(const void* high, const void* rest, int64_t i) {
  const uint2 h = load_halves(high, i), r = load_halves(rest, i);
  return {join(h.x & 0xffffu, first_signed(r.x)), join(h.x >> 16, second_signed(r.x)),
          join(h.y & 0xffffu, first_signed(r.y)), join(h.y >> 16, second_signed(r.y))};
}
__device__ inline void store_split(void* high, void* rest, int64_t i, const Four& v) {
  const Split a = split(v.x[0]), b = split(v.x[1]), c = split(v.x[2]), d = split(v.x[3]);
  store_halves(high, i, upper_halves(a.rounded, b.rounded), upper_halves(c.rounded, d.rounded));
  store_halves(rest, i, lower_halves(a.rest, b.rest), lower_halves(c.rest, d.rest));
}

}  // namespace fsdp::kernels::cuda
