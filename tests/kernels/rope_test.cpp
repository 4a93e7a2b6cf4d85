// Rotary positions against the formula in float64, used as in a model's layer: on slices of packed
// rows, and back from attention's layout.
#include <torch/autograd.h>

#include "kernels/testing.h"

namespace fsdp::kernels {
namespace {

class Rope : public OnDevice {
 protected:
  struct Angles {
    at::Tensor cos, sin;
  };
  // [tokens, head_dim], or [batch, tokens, head_dim].
  Angles angles(std::vector<int64_t> sizes, at::ScalarType type) {
    sizes.back() /= 2;
    const auto half = torch::randn(sizes, at::kDouble) * 4;
    const auto both = at::cat({half, half}, -1);
    return {here(both.cos().to(type)), here(both.sin().to(type))};
  }
};
FSDP_ON_EVERY_DEVICE(Rope);

// x [batch, tokens, heads, head_dim]; cos and sin in either of their shapes. All float64.
at::Tensor turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  const auto other = at::cat({-halves[1], halves[0]}, -1);
  return x * cos.unsqueeze(-2) + other * sin.unsqueeze(-2);
}

struct Sizes {
  int64_t batch, tokens, heads, head_dim;
};
const Sizes kRopeSizes[] = {{1, 1, 1, 2},  {2, 3, 1, 6},    {1, 5, 3, 10}, {2, 17, 4, 64},
                        {3, 9, 2, 96}, {1, 33, 5, 128}, {0, 4, 2, 8},  {2, 4, 2, 512}};

TEST_P(Rope, TurnsHeadsInPlaceAndBack) {
  for (auto type : kDtypes)
    for (auto angle_type : {type, at::kFloat})
      for (bool shared : {true, false})
        for (const auto& s : kRopeSizes) {
          SCOPED_TRACE(::testing::Message() << type << " by " << angle_type << " " << s.batch << " "
                                            << s.tokens << " " << s.heads << " " << s.head_dim);
          const auto [cos, sin] = angles(shared ? std::vector{s.tokens, s.head_dim}
                                                : std::vector{s.batch, s.tokens, s.head_dim},
                                         angle_type);
          const auto x = random({s.batch, s.tokens, s.heads * s.head_dim}, type);
          const auto as_heads = [&](const at::Tensor& t) {
            return exact(t).view({s.batch, s.tokens, s.heads, s.head_dim});
          };
          auto y = x.clone();
          rope_(y, cos, sin, s.heads, false);
          const auto expected = turned(as_heads(x), exact(cos), exact(sin)).view(x.sizes());
          EXPECT_TRUE(near(y, expected));

          auto z = x.clone();
          rope_(z, cos, sin, s.heads, true);
          const auto back = turned(as_heads(x), exact(cos), -exact(sin)).view(x.sizes());
          EXPECT_TRUE(near(z, back));
        }
}

TEST_P(Rope, LeavesTheRestOfARowAlone) {
  for (auto type : kDtypes) {
    const auto [cos, sin] = angles({7, 16}, at::kFloat);
    const auto rows = random({2, 7, 100}, type);
    const auto before = rows.clone();
    rope_(rows.narrow(2, 3, 80), cos, sin, 4, false);  // an odd offset, 4 heads of 5
    EXPECT_TRUE(same_bits(rows.narrow(2, 0, 3), before.narrow(2, 0, 3)));
    EXPECT_TRUE(same_bits(rows.narrow(2, 67, 33), before.narrow(2, 67, 33)));
    auto alone = before.narrow(2, 3, 64).contiguous();
    rope_(alone, cos, sin, 4, false);
    EXPECT_TRUE(same_bits(rows.narrow(2, 3, 64), alone));
    rope_(rows, cos, sin, 0, false);  // no heads, no change
    EXPECT_TRUE(same_bits(rows.narrow(2, 3, 64), alone));
  }
}

TEST_P(Rope, TakesTokensInAnyOrderInMemory) {
  const auto [cos, sin] = angles({2, 5, 8}, at::kFloat);
  const auto x = random({5, 2, 24});
  auto expected = x.transpose(0, 1).contiguous();
  rope_(expected, cos, sin, 3, false);
  rope_(x.transpose(0, 1), cos, sin, 3, false);
  EXPECT_TRUE(same_bits(x.transpose(0, 1), expected));
}

// q, k and v in the layout of attention's gradients: [batch, heads, tokens, head_dim].
TEST_P(Rope, PackIsTheGradientOfTurningAndUnpacking) {
  const int64_t batch = 2, tokens = 11, heads = 6, kv_heads = 2;
  for (auto type : kDtypes)
    for (int64_t head_dim : {2, 6, 64, 72})
      for (bool transposed : {false, true}) {
        SCOPED_TRACE(::testing::Message() << type << " head_dim " << head_dim);
        const auto [cos, sin] = angles({tokens, head_dim}, at::kFloat);
        const auto gradient = [&](int64_t count) {
          return transposed ? random({batch, tokens, count, head_dim}, type).transpose(1, 2)
                            : random({batch, count, tokens, head_dim}, type);
        };
        const auto q = gradient(heads), k = gradient(kv_heads), v = gradient(kv_heads);

        const auto packed = exact(random({batch, tokens, (heads + 2 * kv_heads) * head_dim}));
        const auto parts = packed.view({batch, tokens, -1, head_dim})
                               .split_with_sizes({heads, kv_heads, kv_heads}, 2);
        const auto by_head = [](const at::Tensor& t) { return t.transpose(1, 2); };
        const auto total = (by_head(turned(parts[0], exact(cos), exact(sin))) * exact(q)).sum() +
                           (by_head(turned(parts[1], exact(cos), exact(sin))) * exact(k)).sum() +
                           (by_head(parts[2]) * exact(v)).sum();
        const auto expected = torch::autograd::grad({total}, {packed})[0];

        const auto made = rope_pack(q, k, v, cos, sin);
        EXPECT_TRUE(made.is_contiguous());
        EXPECT_TRUE(near(made, expected));
        EXPECT_TRUE(same_bits(made.narrow(2, (heads + kv_heads) * head_dim, kv_heads * head_dim),
                              v.transpose(1, 2).reshape({batch, tokens, -1})));
      }
}

TEST_P(Rope, PackTakesAnglesOfEachSequence) {
  const auto [cos, sin] = angles({3, 5, 8}, at::kFloat);
  const auto q = random({3, 4, 5, 8}), k = random({3, 2, 5, 8}), v = random({3, 2, 5, 8});
  auto expected =
      at::cat({q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)}, 2).reshape({3, 5, 64});
  rope_(expected, cos, sin, 6, true);
  EXPECT_TRUE(near(rope_pack(q, k, v, cos, sin), expected.to(at::kDouble)));
}

TEST_P(Rope, GivesTheSameBitsAlways) {
  const auto [cos, sin] = angles({301, 64}, at::kFloat);
  const auto x = random({2, 301, 512}, at::kBFloat16);
  const auto q = x.view({2, 301, 8, 64}).transpose(1, 2);
  expect_same_bits_always([&, cos = cos, sin = sin]() -> std::vector<at::Tensor> {
    auto y = x.clone();
    rope_(y, cos, sin, 8, false);
    return {y, rope_pack(q, q, q, cos, sin)};
  });
}

}  // namespace
}  // namespace fsdp::kernels
