// Matrices in few bits against the definition, by hand in float64: the nearest of NF4's levels, a
// scale per block, and what happens to zeros and NaN.
#include "kernels/quantised.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "fsdp/error.h"
#include "kernels/testing.h"

namespace fsdp::kernels {
namespace {

using nn::Quant;

constexpr int64_t kBlockOf = 64;

class QuantisedMatrices : public OnDevice {
 protected:
  at::Tensor restored(const at::Tensor& bytes, Quant quant, at::ScalarType type = at::kFloat) {
    return dequantise(here(bytes), quant, type).cpu();
  }
};

FSDP_ON_EVERY_DEVICE(QuantisedMatrices);

// The sixteen levels of "QLoRA: Efficient Finetuning of Quantized LLMs", appendix E.
at::Tensor levels() {
  return torch::tensor(
      {-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0},
      at::kDouble);
}

at::Tensor in_blocks(const at::Tensor& matrix) {
  return matrix.view({matrix.size(0), -1, kBlockOf});
}

// The float32 scales of kNf4 and kInt8, [rows, blocks].
at::Tensor scales_of(const at::Tensor& bytes, int64_t code_bytes) {
  const int64_t blocks = bytes.size(1) / (code_bytes + 4);
  return bytes.slice(1, blocks * code_bytes).contiguous().view(at::kFloat);
}

TEST_P(QuantisedMatrices, EveryNumberBecomesTheNearestLevel) {
  for (auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const at::Tensor matrix = torch::randn({37, 5 * kBlockOf}).pow(3).to(type);
    const at::Tensor bytes = quantise(matrix, Quant::kNf4);
    const at::Tensor largest = in_blocks(matrix.to(at::kFloat)).abs().amax(-1);
    EXPECT_TRUE(at::equal(scales_of(bytes, 32), largest));

    const at::Tensor pairs = bytes.slice(1, 0, 5 * 32);
    const at::Tensor codes = at::stack({pairs.bitwise_right_shift(4), pairs.bitwise_and(15)}, -1)
                                 .view({37, 5 * kBlockOf})
                                 .to(at::kLong);
    const at::Tensor shares = in_blocks(matrix.to(at::kDouble)) / largest.unsqueeze(-1);
    const at::Tensor apart = (shares.unsqueeze(-1) - levels()).abs();
    const at::Tensor own = apart.gather(-1, in_blocks(codes).unsqueeze(-1)).squeeze(-1);
    EXPECT_LT((own - apart.amin(-1)).max().item<double>(), 1e-6);  // float32's rounding at a bound

    const at::Tensor numbers = levels().to(at::kFloat).index({in_blocks(codes)});
    const at::Tensor expected = (numbers * largest.unsqueeze(-1)).view_as(matrix);
    for (auto out : {at::kFloat, at::kBFloat16, at::kHalf})
      EXPECT_TRUE(at::equal(restored(bytes, Quant::kNf4, out), expected.to(out)));
  }
}

TEST_P(QuantisedMatrices, ScalesOf8BitsAreWithinHalfAStep) {
  const at::Tensor matrix = torch::randn({11, 7 * kBlockOf});
  const at::Tensor exact = restored(quantise(matrix, Quant::kNf4), Quant::kNf4);
  const at::Tensor bytes = quantise(matrix, Quant::kNf4Double);
  EXPECT_EQ(bytes.size(1), 7 * 32 + 8 + 8);
  const at::Tensor found = in_blocks(restored(bytes, Quant::kNf4Double)).abs().amax(-1);
  const at::Tensor largest = in_blocks(exact).abs().amax(-1);
  const at::Tensor half_step = (largest.amax(-1) - largest.amin(-1)) / 510;
  EXPECT_TRUE(((found - largest).abs() <= half_step.unsqueeze(-1) * 1.0001).all().item<bool>());
  // The codes are the same.
  EXPECT_TRUE(
      at::equal(bytes.slice(1, 0, 7 * 32), quantise(matrix, Quant::kNf4).slice(1, 0, 7 * 32)));
}

TEST_P(QuantisedMatrices, Int8IsWithinHalfACode) {
  const at::Tensor matrix = torch::randn({9, 4 * kBlockOf}).pow(3);
  const at::Tensor bytes = quantise(matrix, Quant::kInt8);
  EXPECT_EQ(bytes.size(1), 4 * (64 + 4));
  const at::Tensor off = in_blocks(restored(bytes, Quant::kInt8) - matrix).abs();
  const at::Tensor half = in_blocks(matrix).abs().amax(-1, /*keepdim=*/true) / 254;
  EXPECT_TRUE((off <= half * 1.0001).all().item<bool>());
}

TEST_P(QuantisedMatrices, ZerosStayAndNaNIsSeen) {
  for (Quant quant : {Quant::kNf4, Quant::kNf4Double, Quant::kInt8}) {
    at::Tensor matrix = torch::randn({3, 3 * kBlockOf});
    matrix[0].zero_();
    matrix[1][5] = std::numeric_limits<float>::quiet_NaN();
    matrix[2][70] = std::numeric_limits<float>::infinity();
    const at::Tensor numbers = restored(quantise(matrix, quant), quant);
    EXPECT_TRUE(at::equal(numbers[0], matrix[0]));
    EXPECT_TRUE(numbers[1].narrow(0, 0, 64).isnan().all().item<bool>());
    EXPECT_TRUE(numbers[2].narrow(0, 64, 64).isnan().all().item<bool>());
  }
}

TEST(Quantised, APartOfTheRowsIsQuantisedAlone) {
  const at::Tensor matrix = torch::randn({23, 3 * kBlockOf});
  for (Quant quant : {Quant::kNf4, Quant::kNf4Double, Quant::kInt8}) {
    const at::Tensor whole = quantise(matrix, quant);
    EXPECT_TRUE(at::equal(quantise(matrix.narrow(0, 7, 9), quant), whole.narrow(0, 7, 9)));
    EXPECT_EQ(quantised_columns(whole.size(1), quant), 3 * kBlockOf);
  }
}

TEST(Quantised, BytesPerNumber) {
  for (const int64_t columns : {int64_t{64}, int64_t{320}, int64_t{4096}, int64_t{28672}})
    for (Quant quant : {Quant::kNf4, Quant::kNf4Double, Quant::kInt8})
      EXPECT_EQ(quantised_columns(quantised_bytes(columns, quant), quant), columns);
  EXPECT_EQ(quantised_bytes(4096, Quant::kNf4), 2304);
  EXPECT_EQ(quantised_bytes(4096, Quant::kNf4Double), 2120);
  EXPECT_EQ(quantised_bytes(4096, Quant::kInt8), 4352);
}

TEST(Quantised, RefusesWhatIsNoMatrixOfBlocks) {
  EXPECT_THROW(quantise(torch::randn({4, 65}), Quant::kNf4), Error);
  EXPECT_THROW(quantise(torch::randn({64}), Quant::kNf4), Error);
  EXPECT_THROW(quantise(torch::randn({4, 64}), Quant::kNone), Error);
  const at::Tensor bytes = quantise(torch::randn({4, 64}), Quant::kNf4);
  EXPECT_THROW(dequantise(bytes, Quant::kInt8, at::kFloat), Error);
  EXPECT_THROW(dequantise(bytes, Quant::kNf4, at::kLong), Error);
  EXPECT_THROW(dequantise(bytes.to(at::kFloat), Quant::kNf4, at::kFloat), Error);
}

}  // namespace
}  // namespace fsdp::kernels
