#include "kernels/wire.h"

#include <string>

#include "base/format.h"
#include "fsdp/error.h"
#include "kernels/cuda_updates.h"
#include "kernels/wire_code.h"

namespace fsdp::kernels {
namespace {

static_assert(kWireBlock == wire::kBlock);

constexpr int64_t kWireAlign = 64;  // numbers of a message are a multiple of this

[[noreturn]] void refuse_wire(const std::string& what) {
  throw Error("a message between ranks: " + what + ".", "see kernels/wire.h.");
}

// The numbers of one message.
int64_t check_wire(const at::Tensor& values, int64_t parts, const at::Tensor& bytes,
                   int64_t messages, Wire wire) {
  const at::ScalarType type = values.scalar_type();
  if (type != at::ScalarType::Float && type != at::ScalarType::BFloat16 &&
      type != at::ScalarType::Half)
    refuse_wire(formatted("{} can't be sent in fewer bits", toString(type)));
  if (!values.is_contiguous() || !bytes.is_contiguous() ||
      bytes.scalar_type() != at::ScalarType::Byte || values.device() != bytes.device())
    refuse_wire("numbers and bytes must be contiguous and on one device");
  if (messages < 1 || values.numel() % (parts * kWireAlign) != 0)
    refuse_wire(formatted("{} numbers aren't {} messages of whole vectors", values.numel(), parts));
  const int64_t numel = values.numel() / parts;
  if (bytes.numel() != messages * wire_bytes(numel, wire))
    refuse_wire(
        formatted("{} bytes aren't {} messages of {} numbers", bytes.numel(), messages, numel));
  return numel;
}

const CudaUpdates& wire_kernels(const at::Tensor& tensor) {
  const CudaUpdates* table = cuda_updates(tensor.device());
  if (!table)
    throw Error(
        formatted("there are no kernels on {} for messages in fewer bits.", tensor.device().str()),
        "leave mixed_precision.gather and .reduce at Wire::PLAIN (shard.gather, "
        "shard.reduce).");
  return *table;
}

void sum_groups(const at::Tensor& bytes, const at::Tensor& sums, const WireSum& what, Wire wire) {
  check_wire(sums, what.groups, bytes, what.groups * what.messages, wire);
  if (sums.is_meta() || sums.numel() == 0) return;
  if (sums.is_cpu()) return cpu::sum_wire(bytes, sums, what, wire);
  wire_kernels(sums).sum_wire(bytes, sums, what, wire);
}

}  // namespace

int64_t wire_bytes(int64_t numel, Wire wire) {
  if (wire == Wire::BF16) return 2 * numel;
  const int64_t blocks = (numel + wire::kBlock - 1) / wire::kBlock;
  return (numel + 4 * blocks + 15) / 16 * 16;
}

void encode_wire(const at::Tensor& values, const at::Tensor& bytes, int64_t messages, Wire wire) {
  check_wire(values, messages, bytes, messages, wire);
  if (values.is_meta() || values.numel() == 0) return;
  if (wire == Wire::BF16) {
    bytes.view(at::ScalarType::BFloat16).copy_(values);
    return;
  }
  if (values.is_cpu()) return cpu::encode_wire(values, bytes, messages, wire);
  wire_kernels(values).encode_wire(values, bytes, messages, wire);
}

void decode_wire(const at::Tensor& bytes, const at::Tensor& values, int64_t messages, Wire wire) {
  sum_groups(bytes, values, {.groups = messages, .messages = 1, .divisor = 1}, wire);
}

void sum_wire(const at::Tensor& bytes, const at::Tensor& sum, int64_t messages, float divisor,
              Wire wire) {
  sum_groups(bytes, sum, {.groups = 1, .messages = messages, .divisor = divisor}, wire);
}

}  // namespace fsdp::kernels
