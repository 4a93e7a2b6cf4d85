// Messages in fewer bits, a block of 256 numbers at a time. Compiled without fused products and
// sums, for the bits of the GPU (kernels/wire_code.h).
#include "kernels/wire.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/dtypes.h"
#include "kernels/cpu/parallel.h"
#include "kernels/wire_code.h"

namespace fsdp::kernels::cpu {
namespace {

using wire::kBlock;

// A message, and the blocks in it.
struct Message {
  explicit Message(int64_t numel, Wire wire)
      : numel(numel), blocks((numel + kBlock - 1) / kBlock), bytes(wire_bytes(numel, wire)) {}
  int64_t size(int64_t block) const { return std::min(kBlock, numel - block * kBlock); }

  int64_t numel, blocks, bytes;
};

template <typename Code, typename T>
void encode_block(const T* from, int64_t count, uint8_t* codes, uint8_t* scale_at) {
  float x[kBlock];
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    x[i] = static_cast<float>(from[i]);
    largest = std::max(largest, wire::magnitude(x[i]));
  }
  const wire::Scale scale = Code::scale_of(largest);
  std::memcpy(scale_at, &scale.scale, sizeof(float));
  if (scale.inverse == 0)
    std::memset(codes, 0, count);
  else
    for (int64_t i = 0; i < count; ++i) codes[i] = Code::code(x[i] * scale.inverse);
}

template <typename Code, typename T>
void encode(const T* values, uint8_t* bytes, int64_t messages, const Message& message) {
  parallel_rows(messages * message.blocks, kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t which = i / message.blocks, block = i % message.blocks;
      uint8_t* to = bytes + which * message.bytes;
      encode_block<Code>(values + which * message.numel + block * kBlock, message.size(block),
                         to + block * kBlock, to + message.numel + block * sizeof(float));
    }
  });
}

// The numbers of one block.
template <typename Code>
void read_block(const uint8_t* message, int64_t numel, int64_t block, int64_t count, float* to) {
  const uint8_t* codes = message + block * kBlock;
  float scale;
  std::memcpy(&scale, message + numel + block * sizeof(float), sizeof(float));
  for (int64_t i = 0; i < count; ++i) to[i] = Code::value(codes[i]) * scale;
}

struct Halves {};  // bfloat16 numbers, without scales

template <>
void read_block<Halves>(const uint8_t* message, int64_t, int64_t block, int64_t count, float* to) {
  const auto* from = reinterpret_cast<const c10::BFloat16*>(message) + block * kBlock;
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

template <typename Code, typename T>
void sum(const uint8_t* bytes, T* sums, const WireSum& what, const Message& message) {
  parallel_rows(what.groups * message.blocks, kBlock, [&](int64_t begin, int64_t end) {
    float total[kBlock], next[kBlock];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i / message.blocks, block = i % message.blocks;
      const int64_t count = message.size(block);
      const uint8_t* from = bytes + group * what.messages * message.bytes;
      read_block<Code>(from, message.numel, block, count, total);
      for (int64_t m = 1; m < what.messages; ++m) {
        read_block<Code>(from + m * message.bytes, message.numel, block, count, next);
        for (int64_t k = 0; k < count; ++k) total[k] += next[k];
      }
      T* to = sums + group * message.numel + block * kBlock;
      for (int64_t k = 0; k < count; ++k) to[k] = static_cast<T>(total[k] / what.divisor);
    }
  });
}

}  // namespace

void encode_wire(const at::Tensor& values, const at::Tensor& bytes, int64_t messages, Wire wire) {
  const Message message(values.numel() / messages, wire);
  auto* to = write<uint8_t>(bytes);
  with_dtype(values.scalar_type(), [&](auto type) {
    using T = decltype(type);
    wire == Wire::INT8 ? encode<wire::Int8>(read<T>(values), to, messages, message)
                       : encode<wire::Fp8>(read<T>(values), to, messages, message);
  });
}

void sum_wire(const at::Tensor& bytes, const at::Tensor& sums, const WireSum& what, Wire wire) {
  const Message message(sums.numel() / what.groups, wire);
  const auto* from = read<uint8_t>(bytes);
  with_dtype(sums.scalar_type(), [&](auto type) {
    using T = decltype(type);
    T* to = write<T>(sums);
    if (wire == Wire::BF16)
      sum<Halves>(from, to, what, message);
    else if (wire == Wire::INT8)
      sum<wire::Int8>(from, to, what, message);
    else
      sum<wire::Fp8>(from, to, what, message);
  });
}

}  // namespace fsdp::kernels::cpu
