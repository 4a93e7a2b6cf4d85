// The CUDA passes of fp8.h, simulated on the CPU: the bits of the CPU's emulation, whose rounding
// isn't NVIDIA's code.
#include "kernels/fp8.h"

#include <cmath>

#include "kernels/simulated/testing.h"

namespace fsdp::kernels {
namespace {

std::vector<at::Tensor> made_of(const fp8::Source& x, fp8::Scaling scaling, fp8::Wanted wanted,
                                bool e5m2) {
  const auto made = fp8::quantise(x, scaling, wanted, e5m2);
  std::vector<at::Tensor> all;
  for (const auto& copy : {made.rows, made.columns}) {
    if (!copy.data.defined()) continue;
    all.push_back(copy.data.view(at::kByte));
    all.push_back(copy.factors);
  }
  return all;
}

// Magnitudes from the least subnormal byte to beyond the range, with both signs.
at::Tensor of_every_size(at::IntArrayRef sizes, at::ScalarType type) {
  return (torch::randn(sizes) * at::pow(2.0, torch::randn(sizes) * 5)).to(type);
}

TEST(SimulatedFp8, GivesTheBitsOfTheCpu) {
  Options options;
  for (auto type : kDtypes)
    for (auto scaling : {fp8::Scaling::kTensorwise, fp8::Scaling::kRowwise})
      for (auto [rows, columns] :
           {std::pair<int64_t, int64_t>{16, 16}, {128, 128}, {144, 272}, {400, 16}, {16, 400}})
        for (auto wanted : {fp8::Wanted{true, true}, {true, false}, {false, true}}) {
          const bool e5m2 = options.flip();
          const at::Tensor x = of_every_size({rows, columns}, type);
          const auto made = simulated([&] { return made_of(x, scaling, wanted, e5m2); });
          const auto expected = made_of(x, scaling, wanted, e5m2);
          ASSERT_EQ(made.size(), expected.size());
          for (size_t i = 0; i < made.size(); ++i)
            EXPECT_TRUE(same_bits(made[i], expected[i]))
                << type << " " << rows << " x " << columns << ", result " << i;
        }
}

// Rows of a warp, of a block, and longer.
TEST(SimulatedFp8, QuantisesWhatOtherKernelsWouldWrite) {
  Options options;
  for (auto type : kDtypes)
    for (auto scaling : {fp8::Scaling::kTensorwise, fp8::Scaling::kRowwise})
      for (int64_t width : {64, 2048, 32784}) {
        const int64_t rows = width > 2048 ? 16 : 32;
        const at::Tensor x = torch::randn({rows, width}).to(type);
        const at::Tensor residual =
            options.flip() ? torch::randn({rows, width}).to(type) : at::Tensor();
        const at::Tensor weight = torch::randn({width}).to(type);
        const at::Tensor gate_up = torch::randn({rows, 2 * 144}).to(type);
        simulated([&]() -> std::vector<at::Tensor> {
          const auto normed = rms_norm(x, residual, weight, 1e-5);
          const auto made = fp8::rms_norm(x, residual, weight, 1e-5, scaling);
          EXPECT_TRUE(same_bits(made.rstd, normed.rstd));
          EXPECT_TRUE(same_bits(made.sum, normed.sum));
          EXPECT_TRUE(same_bits(made.amax, fp8::amax_of(normed.out, scaling, {true, false}).rows));
          if (width > 2048) return {made.amax};
          const at::Tensor of = residual.defined() ? made.sum : x;
          const auto direct = made_of(normed.out, scaling, {true, true}, false);
          const auto fused =
              made_of(fp8::Source::normed(of, made.rstd, weight), scaling, {true, true}, false);
          for (size_t i = 0; i < fused.size(); ++i) EXPECT_TRUE(same_bits(fused[i], direct[i]));
          const auto active = made_of(swiglu(gate_up), scaling, {true, true}, false);
          const auto activated =
              made_of(fp8::Source::activated(gate_up), scaling, {true, true}, false);
          for (size_t i = 0; i < active.size(); ++i)
            EXPECT_TRUE(same_bits(activated[i], active[i]));
          return fused;
        });
      }
}

at::Tensor amax_of_whole(const at::Tensor& x) {
  return x.abs().max().to(at::kFloat).view({1});
}

TEST(SimulatedFp8, KernelsOfGradientsFindTheirMagnitudes) {
  for (auto type : kDtypes)
    for (auto [rows, width] : {std::pair<int64_t, int64_t>{37, 64}, {3, 2056}, {5, 7}}) {
      const at::Tensor grad = torch::randn({rows, width}).to(type);
      const at::Tensor gate_up = torch::randn({rows, 2 * width}).to(type);
      const at::Tensor weight = torch::randn({width}).to(type), rstd = torch::rand({rows});
      const at::Tensor q = torch::randn({2, 4, 5, 16}).to(type),
                       k = torch::randn({2, 2, 5, 16}).to(type);
      const at::Tensor cos = torch::randn({5, 8}).repeat({1, 2}), sin = cos * 0.5;
      simulated([&]() -> std::vector<at::Tensor> {
        const auto active = fp8::swiglu_backward(grad, gate_up);
        EXPECT_TRUE(same_bits(active.result, std::get<0>(swiglu_backward(grad, gate_up, false))));
        EXPECT_TRUE(same_bits(active.amax, amax_of_whole(active.result)));
        const auto packed = fp8::rope_pack(q, k, k, cos, sin);
        EXPECT_TRUE(same_bits(packed.result, rope_pack(q, k, k, cos, sin)));
        EXPECT_TRUE(same_bits(packed.amax, amax_of_whole(packed.result)));
        const auto norm = fp8::rms_norm_backward(grad, grad, grad, rstd, weight, {}, false, false);
        EXPECT_TRUE(same_bits(
            norm.x, rms_norm_backward(grad, grad, grad, rstd, weight, {}, false, false).x));
        EXPECT_EQ(norm.amax.numel(), width % 8 == 0 ? 1 : 0);
        EXPECT_TRUE(width % 8 != 0 || same_bits(norm.amax, amax_of_whole(norm.x)));
        return {active.amax, packed.amax, norm.amax};
      });
    }
}

TEST(SimulatedFp8, PassesOnWhatIsNotFinite) {
  for (auto scaling : {fp8::Scaling::kTensorwise, fp8::Scaling::kRowwise})
    for (double bad : {HUGE_VAL, std::nan("")}) {
      at::Tensor x = torch::randn({48, 32});
      x[20][9] = bad;
      const auto made = simulated([&] { return made_of(x, scaling, {true, true}, false); });
      const int64_t row = scaling == fp8::Scaling::kRowwise ? 20 : 0;
      const int64_t column = scaling == fp8::Scaling::kRowwise ? 9 : 0;
      EXPECT_TRUE(made[1][row].isnan().item<bool>());
      EXPECT_TRUE(made[3][column].isnan().item<bool>());
      EXPECT_EQ(made[1].isnan().sum().item<int64_t>(), 1);
    }
}

}  // namespace
}  // namespace fsdp::kernels
