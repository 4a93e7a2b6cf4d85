// Messages in fewer bits: every number within its bound, the codes of LibTorch's float8, sums in
// float32 in order, and what happens to zeros, tiny numbers and NaN.
#include "kernels/wire.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "fsdp/error.h"
#include "kernels/testing.h"

namespace fsdp::kernels {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

class WireMessages : public OnDevice {
 protected:
  at::Tensor bytes_for(int64_t messages, int64_t numel, Wire wire) const {
    return at::empty({messages * wire_bytes(numel, wire)},
                     at::TensorOptions(device()).dtype(at::kByte));
  }
  at::Tensor encoded(const at::Tensor& values, Wire wire, int64_t messages = 1) const {
    at::Tensor bytes = bytes_for(messages, values.numel() / messages, wire);
    encode_wire(here(values), bytes, messages, wire);
    return bytes;
  }
  at::Tensor decoded(const at::Tensor& bytes, int64_t numel, Wire wire, int64_t messages = 1,
                     at::ScalarType type = at::kFloat) const {
    at::Tensor values = zeros({numel}, type);
    decode_wire(bytes, values, messages, wire);
    return values.cpu();
  }
  at::Tensor round_trip(const at::Tensor& values, Wire wire) const {
    return decoded(encoded(values, wire), values.numel(), wire, 1, values.scalar_type());
  }
};

FSDP_ON_EVERY_DEVICE(WireMessages);

// The largest magnitude of each number's block, [n].
at::Tensor block_largest(const at::Tensor& values) {
  at::Tensor largest = at::empty_like(values);
  for (int64_t at = 0; at < values.numel(); at += kWireBlock) {
    const int64_t count = std::min(kWireBlock, values.numel() - at);
    largest.narrow(0, at, count).fill_(values.narrow(0, at, count).abs().max());
  }
  return largest;
}

TEST_P(WireMessages, EveryNumberIsWithinItsBound) {
  for (auto type : {at::kFloat, at::kBFloat16, at::kHalf})
    for (int64_t numel : {64, 256, 320, 256 * 17 + 192}) {
      SCOPED_TRACE(::testing::Message() << type << " " << numel);
      const at::Tensor values = torch::randn({numel}, at::kDouble).pow(3).to(type);
      const at::Tensor exact = values.to(at::kDouble), largest = block_largest(exact);
      const double half_ulp = type == at::kFloat ? 1e-7 : type == at::kHalf ? 5e-4 : 4e-3;
      const auto off = [&](Wire wire) {
        return (round_trip(values, wire).to(at::kDouble) - exact).abs();
      };
      const at::Tensor rounding = exact.abs() * half_ulp;
      EXPECT_TRUE(
          (off(Wire::INT8) <= largest / 254 * 1.001 + rounding * 1.01 + 1e-7).all().item<bool>());
      EXPECT_TRUE(
          (off(Wire::FP8) <= at::maximum(exact.abs() / 16, largest / 131072)).all().item<bool>());
    }
}

TEST_P(WireMessages, CodesAreThoseOfLibTorchsFloat8) {
  const at::Tensor values = torch::randn({8 * kWireBlock}).pow(5);
  const at::Tensor bytes = encoded(values, Wire::FP8).cpu();
  for (int64_t block = 0; block < 8; ++block) {
    const at::Tensor part = values.narrow(0, block * kWireBlock, kWireBlock);
    const double scale = std::exp2(std::ceil(std::log2(part.abs().max().item<double>() / 448)));
    const at::Tensor expected = (part / scale).to(at::kFloat8_e4m3fn).view(at::kByte);
    EXPECT_TRUE(at::equal(bytes.narrow(0, block * kWireBlock, kWireBlock), expected));
    EXPECT_EQ(bytes.narrow(0, values.numel() + 4 * block, 4).view(at::kFloat).item<double>(),
              scale);
  }
}

TEST_P(WireMessages, IntegersAreTheNearest) {
  const at::Tensor values = torch::randn({kWireBlock});
  const at::Tensor codes =
      encoded(values, Wire::INT8).cpu().narrow(0, 0, kWireBlock).view(at::kChar);
  const at::Tensor scaled = values.to(at::kDouble) * 127 / values.abs().max().item<double>();
  EXPECT_LE((codes.to(at::kDouble) - scaled).abs().max().item<double>(), 0.50001);
  EXPECT_EQ(codes.abs().max().item<int>(), 127);
}

TEST_P(WireMessages, Fp8IsRoundedOnlyOnce) {
  for (auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor once = round_trip(torch::randn({1024}).to(type), Wire::FP8);
    EXPECT_TRUE(same_bits(round_trip(once, Wire::FP8), once));
  }
}

TEST_P(WireMessages, CutsBetweenBlocksChangeNothing) {
  for (Wire wire : {Wire::FP8, Wire::INT8}) {
    const at::Tensor values = torch::randn({6 * kWireBlock}).to(at::kBFloat16);
    const at::Tensor whole = round_trip(values, wire);
    for (int64_t messages : {2, 3, 6})
      EXPECT_TRUE(same_bits(
          decoded(encoded(values, wire, messages), values.numel(), wire, messages, at::kBFloat16),
          whole));
  }
}

TEST_P(WireMessages, ABlockWithoutMagnitudeIsZero) {
  for (Wire wire : {Wire::FP8, Wire::INT8})
    for (double value : {0.0, 1e-44, 1e-31}) {
      const at::Tensor values = torch::full({kWireBlock}, value);
      EXPECT_TRUE(same_bits(round_trip(values, wire), torch::zeros({kWireBlock}))) << value;
    }
}

TEST_P(WireMessages, ConstantsAndExtremesComeBack) {
  for (Wire wire : {Wire::FP8, Wire::INT8})
    for (double value : {-3.0, 1e-29, 2.5e38, 448.0}) {
      const at::Tensor values = torch::full({kWireBlock}, value);
      const double bound = wire == Wire::INT8 ? 1e-6 : 1.0 / 16;
      const at::Tensor off = (round_trip(values, wire).to(at::kDouble) - value).abs();
      EXPECT_LE(off.max().item<double>(), std::abs(value) * bound) << value;
    }
}

TEST_P(WireMessages, ABlockThatIsNotFiniteIsNaNAndOthersAreNot) {
  for (Wire wire : {Wire::FP8, Wire::INT8})
    for (double value : {kInfinite, -kInfinite, std::nan("")}) {
      at::Tensor values = torch::randn({3 * kWireBlock});
      values[300] = value;
      const at::Tensor back = round_trip(values, wire).isnan();
      EXPECT_TRUE(back.narrow(0, kWireBlock, kWireBlock).all().item<bool>());
      EXPECT_EQ(back.sum().item<int64_t>(), kWireBlock);
    }
}

TEST_P(WireMessages, AreAddedInFloat32InOrder) {
  for (Wire wire : {Wire::BF16, Wire::FP8, Wire::INT8})
    for (auto type : {at::kFloat, at::kBFloat16}) {
      const int64_t numel = kWireBlock + 64, messages = 5;
      const at::Tensor values = torch::randn({messages * numel}).to(type);
      const at::Tensor bytes = encoded(values, wire, messages);
      const at::Tensor parts =
          decoded(bytes, messages * numel, wire, messages).view({messages, -1});
      at::Tensor expected = parts[0].clone();
      for (int64_t m = 1; m < messages; ++m) expected += parts[m];
      const at::Tensor sum = zeros({numel}, type);
      sum_wire(bytes, sum, messages, 5.0f, wire);
      EXPECT_TRUE(same_bits(sum.cpu(), (expected / 5.0).to(type))) << name(wire);
    }
}

TEST_P(WireMessages, Bf16IsACast) {
  const at::Tensor values = torch::randn({320});
  EXPECT_TRUE(same_bits(round_trip(values, Wire::BF16), values.to(at::kBFloat16).to(at::kFloat)));
}

TEST_P(WireMessages, TakeHalfOfBFloat16) {
  const int64_t numel = 1 << 20;
  for (Wire wire : {Wire::FP8, Wire::INT8}) {
    EXPECT_LE(static_cast<double>(wire_bytes(numel, wire)), 0.51 * 2 * numel);
    EXPECT_EQ(wire_bytes(64, wire), 80);  // whole vectors of 16 bytes
  }
  EXPECT_EQ(wire_bytes(numel, Wire::BF16), 2 * numel);
}

TEST_P(WireMessages, RefuseWhatTheyCantHold) {
  const at::Tensor bytes = bytes_for(1, 256, Wire::INT8);
  EXPECT_THROW(encode_wire(zeros({256}, at::kDouble), bytes, 1, Wire::INT8), Error);
  EXPECT_THROW(encode_wire(zeros({192}), bytes, 1, Wire::INT8), Error);
  EXPECT_THROW(encode_wire(zeros({250}), bytes, 1, Wire::INT8), Error);
  EXPECT_THROW(decode_wire(bytes, zeros({512}), 2, Wire::INT8), Error);
}

}  // namespace
}  // namespace fsdp::kernels
