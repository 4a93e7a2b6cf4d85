// The CUDA kernels of messages in fewer bits, simulated on the CPU, against the CPU's: the same
// bits for every dtype, size and number of messages.
#include <limits>

#include "kernels/simulated/testing.h"
#include "kernels/wire.h"

namespace fsdp::kernels {
namespace {

at::Tensor some_values(int64_t numel, at::ScalarType type) {
  at::Tensor values = torch::randn({numel}).pow(5);
  if (numel >= 1024) {
    values.narrow(0, 0, 256).zero_();
    values[256] = std::numeric_limits<float>::infinity();
    values[513] = std::numeric_limits<float>::quiet_NaN();
    values.narrow(0, 768, 256).mul_(1e-35);
  }
  return values.to(type);
}

at::Tensor messages_for(int64_t messages, int64_t numel, Wire wire) {
  return torch::zeros({messages * wire_bytes(numel, wire)}, at::kByte);
}

TEST(SimulatedWire, EncodesTheBitsOfTheCpu) {
  for (Wire wire : {Wire::FP8, Wire::INT8})
    for (auto type : {at::kFloat, at::kBFloat16, at::kHalf})
      for (int64_t numel : {64, 256, 320, 1024, 4096 + 192})
        for (int64_t messages : {1, 3}) {
          SCOPED_TRACE(::testing::Message() << name(wire) << " " << type << " " << numel);
          const at::Tensor values = some_values(messages * numel, type);
          at::Tensor expected = messages_for(messages, numel, wire);
          encode_wire(values, expected, messages, wire);
          const auto made = simulated([&] {
            at::Tensor bytes = messages_for(messages, numel, wire);
            simulated_updates().encode_wire(values, bytes, messages, wire);
            return std::vector{bytes};
          });
          EXPECT_TRUE(same_bits(made[0], expected));
        }
}

TEST(SimulatedWire, SumsToTheBitsOfTheCpu) {
  for (Wire wire : {Wire::BF16, Wire::FP8, Wire::INT8})
    for (auto type : {at::kFloat, at::kBFloat16, at::kHalf})
      for (int64_t numel : {64, 320, 4096 + 192})
        for (const WireSum& what : {WireSum{1, 1, 1}, WireSum{3, 1, 1}, WireSum{1, 7, 7}}) {
          SCOPED_TRACE(::testing::Message() << name(wire) << " " << type << " " << numel);
          const int64_t messages = what.groups * what.messages;
          at::Tensor bytes = messages_for(messages, numel, wire);
          encode_wire(some_values(messages * numel, at::kFloat), bytes, messages, wire);
          const auto sums = [&] { return torch::zeros({what.groups * numel}, type); };
          at::Tensor expected = sums();
          cpu::sum_wire(bytes, expected, what, wire);
          const auto made = simulated([&] {
            at::Tensor values = sums();
            simulated_updates().sum_wire(bytes, values, what, wire);
            return std::vector{values};
          });
          // NaNs have one bit pattern on a GPU and another on the CPU.
          EXPECT_TRUE(same_bits(made[0].nan_to_num(), expected.nan_to_num()));
          EXPECT_TRUE(at::equal(made[0].isnan(), expected.isnan()));
        }
}

}  // namespace
}  // namespace fsdp::kernels
