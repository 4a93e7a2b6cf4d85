// The CUDA kernel of fill_random_, simulated on the CPU, against the CPU's: the same bits for any
// size, alignment and part of a sequence.
#include "kernels/simulated/testing.h"

namespace fsdp::kernels {
namespace {

constexpr uint64_t kKey = 0xfedcba9876543210;

TEST(SimulatedRandom, HasTheBitsOfTheCpu) {
  for (auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble})
    for (const Distribution& distribution :
         {Distribution::normal(-0.5, 0.02), Distribution::uniform(-2, 3)})
      for (int64_t count : {1, 3, 4, 8, 77, 2049})
        for (int64_t first : {int64_t{0}, int64_t{1}, int64_t{6}, (int64_t{1} << 34) - 3})
          for (bool apart : {false, true}) {
            SCOPED_TRACE(::testing::Message() << type << " " << count << " from " << first);
            const auto zeros = at::zeros({count}, type);
            const auto run = [&] {
              auto out = apart ? unaligned(zeros) : zeros.clone();
              fill_random_(out, distribution, kKey, first);
              return std::vector{out};
            };
            EXPECT_TRUE(same_bits(simulated(run)[0], run()[0]));
          }
}

}  // namespace
}  // namespace fsdp::kernels
