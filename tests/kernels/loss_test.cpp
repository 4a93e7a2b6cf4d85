// Cross-entropy against log_softmax in float64 and autograd's gradient; and scale_into.
#include <torch/autograd.h>

#include <cmath>
#include <limits>

#include "kernels/testing.h"

namespace fsdp::kernels {
namespace {

class Losses : public OnDevice {
 protected:
  at::Tensor number(double value) const { return here(at::full({}, value, at::kFloat)); }
};
FSDP_ON_EVERY_DEVICE(Losses);

const int64_t kIgnored = -100;
const std::pair<int64_t, int64_t> kLossSizes[] = {{0, 5},    {1, 1},   {3, 2},    {7, 33},
                                              {40, 257}, {5, 999}, {64, 512}, {3, 32003}};

// Each row's loss, 0 where it is ignored, in float64.
at::Tensor plain(const at::Tensor& logits, const at::Tensor& targets, int64_t ignore_index) {
  const auto ids = targets.cpu();
  const auto counts = ids != ignore_index;
  const auto chosen = at::where(counts, ids, 0).unsqueeze(-1);
  const auto loss = -logits.log_softmax(-1).gather(-1, chosen).squeeze(-1);
  return at::where(counts, loss, 0.0);
}

TEST_P(Losses, AreRightForwardAndBackward) {
  for (auto type : kDtypes)
    for (const auto& [rows, vocab] : kLossSizes) {
      const auto logits = random({rows, vocab}, at::kDouble).mul(3).to(type);
      SCOPED_TRACE(describe(logits));
      const auto targets = integers(vocab, {rows});
      if (rows > 2) targets[1] = kIgnored;
      const auto grad = random({rows});
      const auto x = exact(logits), expected = plain(x, targets, kIgnored);
      const auto expected_grad = torch::autograd::grad({(expected * exact(grad)).sum()}, {x})[0];

      const auto [losses, log_sum] = cross_entropy(logits, targets, kIgnored);
      EXPECT_TRUE(near(losses, expected));
      EXPECT_TRUE(near(log_sum, x.logsumexp(-1)));
      EXPECT_TRUE(
          near(cross_entropy_backward(grad, logits, targets, log_sum, kIgnored), expected_grad));
    }
}

TEST_P(Losses, InPlaceLeaveTheirGradientTimesAScale) {
  for (auto type : kDtypes)
    for (const auto& [rows, vocab] : kLossSizes) {
      const auto logits = random({rows, vocab}, at::kDouble).mul(3).to(type);
      SCOPED_TRACE(describe(logits));
      const auto targets = integers(vocab, {rows});
      if (rows > 2) targets[1] = kIgnored;
      const auto x = exact(logits), expected = plain(x, targets, kIgnored);
      const auto expected_grad = torch::autograd::grad({expected.sum() * 0.75}, {x})[0];

      const auto losses = cross_entropy_(logits, targets, number(0.75), kIgnored);
      EXPECT_TRUE(near(losses, expected));
      EXPECT_TRUE(near(logits, expected_grad));
    }
}

TEST_P(Losses, TakeASliceOfWiderRows) {
  for (auto type : kDtypes) {
    const auto rows = random({9, 130}, type);
    const auto before = rows.clone();
    const auto slice = rows.narrow(1, 3, 101), alone = slice.contiguous();
    const auto targets = integers(101, {9});
    const auto [losses, log_sum] = cross_entropy(slice, targets, kIgnored);
    const auto expected = plain(exact(alone), targets, kIgnored);
    EXPECT_TRUE(near(losses, expected));
    const auto grad = random({9});
    const auto made = cross_entropy_backward(grad, slice, targets, log_sum, kIgnored);
    EXPECT_TRUE(made.is_contiguous());
    const auto x = exact(alone);
    EXPECT_TRUE(near(
        made, torch::autograd::grad({(plain(x, targets, kIgnored) * exact(grad)).sum()}, {x})[0]));

    EXPECT_TRUE(near(cross_entropy_(slice, targets, number(1), kIgnored), expected));
    EXPECT_TRUE(near(slice, torch::autograd::grad({plain(x, targets, kIgnored).sum()}, {x})[0]));
    EXPECT_TRUE(same_bits(rows.narrow(1, 0, 3), before.narrow(1, 0, 3)));
    EXPECT_TRUE(same_bits(rows.narrow(1, 104, 26), before.narrow(1, 104, 26)));
  }
}

TEST_P(Losses, TakeRowsOfAnyLeadingDimensions) {
  const auto logits = random({2, 3, 17});
  const auto targets = integers(17, {2, 3});
  const auto losses = std::get<0>(cross_entropy(logits, targets, kIgnored));
  EXPECT_TRUE(near(losses.flatten(), plain(exact(logits), targets, kIgnored).flatten()));
}

TEST_P(Losses, AreZeroWhereIgnoredWhateverTheLogits) {
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto logits = random({3, 11});
  logits[1].fill_(nan);
  const auto targets = here(at::tensor({4, 2, 10}, at::kLong));
  const auto losses = cross_entropy_(logits, targets, number(1), /*ignore_index=*/2);
  EXPECT_EQ(losses[1].item<float>(), 0);
  EXPECT_TRUE((logits[1] == 0).all().item<bool>());
  EXPECT_TRUE(losses.isfinite().all().item<bool>());
}

TEST_P(Losses, AreNanForATargetOutsideOfTheVocabulary) {
  for (int64_t target : {-1, 11, 1 << 30}) {
    const auto logits = random({3, 11});
    const auto targets = here(at::tensor({int64_t{4}, target, int64_t{10}}, at::kLong));
    for (const auto& losses : {std::get<0>(cross_entropy(logits, targets, kIgnored)),
                               cross_entropy_(logits.clone(), targets, number(1), kIgnored)}) {
      EXPECT_TRUE(losses[1].isnan().item<bool>());
      EXPECT_FALSE(losses[0].isnan().item<bool>());
      EXPECT_FALSE(losses[2].isnan().item<bool>());
    }
  }
}

TEST_P(Losses, HoldForLogitsThatAreLargeOrForbidden) {
  const auto logits = random({4, 300}) * 1000;
  logits.narrow(1, 0, 100).fill_(-std::numeric_limits<double>::infinity());
  const auto targets = integers(200, {4}) + 100;
  const auto x = exact(logits), expected = plain(x, targets, kIgnored);
  const auto [losses, log_sum] = cross_entropy(logits, targets, kIgnored);
  EXPECT_TRUE(near(losses, expected));
  const auto made = cross_entropy_backward(here(at::ones({4})), logits, targets, log_sum, kIgnored);
  EXPECT_TRUE((made.narrow(1, 0, 100) == 0).all().item<bool>());
  // The log of the sum has an error of 1e-4 in float32, and so do the probabilities.
  EXPECT_TRUE(near(made, x.softmax(-1) - at::one_hot(targets.cpu(), 300), 100));
}

TEST_P(Losses, GiveTheSameBitsAlways) {
  for (auto type : kDtypes) {
    const auto logits = random({401, 999}, type);
    const auto targets = integers(999, {401});
    const auto grad = random({401});
    expect_same_bits_always([&]() -> std::vector<at::Tensor> {
      const auto [losses, log_sum] = cross_entropy(logits, targets, kIgnored);
      auto copy = logits.clone();
      return {losses, log_sum, cross_entropy_backward(grad, logits, targets, log_sum, kIgnored),
              cross_entropy_(copy, targets, number(0.5), kIgnored), copy};
    });
  }
}

class ScaleInto : public Losses {};
FSDP_ON_EVERY_DEVICE(ScaleInto);

TEST_P(ScaleInto, WritesOrAddsBetweenAnyTwoDtypes) {
  for (auto to : kDtypes)
    for (auto from : kDtypes)
      for (int64_t count : {0, 1, 7, 4099})
        for (bool accumulate : {false, true})
          for (bool scaled : {false, true}) {
            SCOPED_TRACE(::testing::Message() << from << " into " << to << ", " << count);
            const auto target = unaligned(random({count}, to)), source = random({count}, from);
            const auto before = exact(target).detach();
            scale_into(target, source, scaled ? number(0.375) : at::Tensor(), accumulate);
            const auto expected = exact(source).detach() * (scaled ? 0.375 : 1.0) +
                                  (accumulate ? before : at::zeros_like(before));
            EXPECT_TRUE(near(target, expected));
          }
}

TEST_P(ScaleInto, DoesNotReadWhatItOverwrites) {
  const auto target = here(at::full({9}, std::nan("")));
  scale_into(target, random({9}), {}, false);
  EXPECT_FALSE(target.isnan().any().item<bool>());
}

}  // namespace
}  // namespace fsdp::kernels
