// The CUDA kernel that restores quantised matrices, simulated on the CPU, against the CPU's: the
// same bits for every format, dtype and size.
#include "kernels/quantised.h"
#include "kernels/simulated/testing.h"

namespace fsdp::kernels {
namespace {

TEST(SimulatedQuantised, RestoresTheBitsOfTheCpu) {
  for (nn::Quant quant : {nn::Quant::kNf4, nn::Quant::kNf4Double, nn::Quant::kInt8})
    for (auto type : {at::kFloat, at::kBFloat16, at::kHalf})
      for (int64_t columns : {64, 320, 2048})
        for (int64_t rows : {1, 3, 33}) {
          SCOPED_TRACE(::testing::Message() << static_cast<int>(quant) << " " << type << " " << rows
                                            << " x " << columns);
          const at::Tensor bytes = quantise(torch::randn({rows, columns}).pow(3), quant);
          const at::Tensor expected = dequantise(bytes, quant, type);
          const auto made =
              simulated([&] { return std::vector{dequantise(bytes.clone(), quant, type)}; });
          EXPECT_TRUE(same_bits(made[0], expected));
        }
}

}  // namespace
}  // namespace fsdp::kernels
