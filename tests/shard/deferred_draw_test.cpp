// Random initialisers under deferred_init: they aren't run while recording, the generator still
// ends where plain construction leaves it, and any part drawn later has the bits of the whole.
#include "shard/deferred_draw.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <random>

#include "fsdp/deferred_init.h"
#include "kernels/cpu/mersenne.h"
#include "shard/counting_allocator.h"
#include "shard/deferred_oracle.h"

namespace fsdp::shard {
namespace {

using deferred::Draw;

const at::ScalarType kDrawn[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};

std::vector<int64_t> draw_sizes() {
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size <= 40; ++size) sizes.push_back(size);
  for (int64_t size : {623, 624, 625, 1000, 1249, 4097}) sizes.push_back(size);
  return sizes;
}

// Runs `build` twice, and expects the same tensors and the same generator.
void expect_same_draws(const std::function<std::vector<Tensor>()>& build) {
  torch::manual_seed(7);
  const std::vector<Tensor> plain = build();
  const Tensor after = generator_state();
  torch::manual_seed(7);
  const std::vector<Tensor> lazy = deferred_init(build);
  EXPECT_TRUE(at::equal(generator_state(), after));
  for (size_t i = 0; i < plain.size(); ++i)
    expect_same_bits(plain[i], deferred::value(lazy[i]), "tensor " + std::to_string(i));
  EXPECT_TRUE(at::equal(generator_state(), after));
}

TEST(DeferredDraws, SkippingIsDrawingWithoutTheNumbers) {
  for (int64_t words : {0, 1, 2, 622, 623, 624, 625, 1247, 1248, 1249, 100'000})
    for (int64_t before : {0, 1, 5, 623, 624, 700}) {
      at::mt19937 drawn(31), skipped(31);
      for (int64_t i = 0; i < before; ++i) drawn(), skipped();
      at::mt19937_data_pod state = skipped.data();
      kernels::cpu::skip(state, words);
      skipped.set_data(state);
      for (int64_t i = 0; i < words; ++i) drawn();
      EXPECT_EQ(drawn.data().left_, state.left_) << before << " " << words;
      EXPECT_EQ(drawn.data().next_, state.next_) << before << " " << words;
      for (int i = 0; i < 700; ++i) ASSERT_EQ(drawn(), skipped()) << before << " " << words;
    }
}

TEST(DeferredDraws, EverySizeAndDtypeIsThatOfPlainConstruction) {
  for (auto type : kDrawn)
    for (int64_t size : draw_sizes())
      expect_same_draws([&] {
        return std::vector{torch::empty({size}, type).uniform_(-0.3, 0.7),
                           torch::empty({size}, type).normal_(0.5, 2),
                           torch::empty({size}, type).uniform_(),
                           torch::empty({size}, type).normal_()};
      });
}

// An odd normal number of a small tensor is kept for the next one, past draws of other tensors.
TEST(DeferredDraws, MixedSequencesAreThoseOfPlainConstruction) {
  std::minstd_rand choose(5);
  for (int round = 0; round < 60; ++round) {
    const auto seed = choose();
    expect_same_draws([&] {
      std::minstd_rand next(seed);
      std::vector<Tensor> made;
      for (int i = 0; i < 12; ++i) {
        const auto size = static_cast<int64_t>(1 + next() % 50);
        const auto type = kDrawn[next() % 4];
        switch (next() % 7) {
          case 0:
            made.push_back(torch::empty({size}, type).normal_());
            break;
          case 1:
            made.push_back(torch::empty({size}, type).uniform_());
            break;
          case 2:
            made.push_back(torch::randn({size, 3}, type));
            break;
          case 3:
            made.push_back(torch::rand({size, 3}, type));
            break;
          case 4:
            made.push_back(torch::empty({size, 5}).t().normal_());
            break;
          case 5:
            made.push_back(torch::empty({size}).exponential_());
            break;
          default:
            made.push_back(torch::randn_like(torch::rand({size, 4}, type)));
            break;
        }
      }
      return made;
    });
  }
}

TEST(DeferredDraws, ViewsAndLayoutsAreThoseOfPlainConstruction) {
  expect_same_draws([] {
    Tensor whole = torch::zeros({40, 30});
    whole.narrow(0, 3, 7).normal_();   // contiguous, a part of the storage
    whole.narrow(1, 3, 7).uniform_();  // has gaps
    whole.t().normal_(1, 2);           // another order
    Tensor last = torch::empty({4, 6, 5, 5}, at::MemoryFormat::ChannelsLast).uniform_();
    Tensor turned = torch::empty({30, 20}).normal_().t();
    return std::vector{whole, last, turned, torch::empty({0}).normal_(), torch::randn({})};
  });
}

TEST(DeferredDraws, LargeTensorsAreDrawnInParts) {
  constexpr int64_t kLarge = 3 * Draw::kApart + 12'345;
  for (int64_t size : {Draw::kApart - 1, Draw::kApart, Draw::kApart + 1, 2 * Draw::kApart - 1,
                       2 * Draw::kApart + 7, kLarge})
    expect_same_draws([&] {
      return std::vector{torch::empty({size}).uniform_(-1, 1), torch::empty({size}).normal_()};
    });
}

TEST(DeferredDraws, AnyPartHasTheBitsOfTheWhole) {
  for (auto type : {at::kFloat, at::kDouble, at::kBFloat16})
    for (bool normal : {false, true})
      for (int64_t size : {int64_t{17}, int64_t{32}, int64_t{100}, 2 * Draw::kApart + 5}) {
        auto make = [&] {
          Tensor made = torch::empty({size}, type);
          return normal ? made.normal_() : made.uniform_();
        };
        torch::manual_seed(3);
        const Tensor whole = make();
        torch::manual_seed(3);
        const Tensor lazy = deferred_init(make);
        const auto draw = deferred::draw_behind(lazy);
        ASSERT_TRUE(draw);
        for (int64_t first : {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{16}, size / 2, size - 17,
                              size - 16, size - 2, size - 1, size})
          for (int64_t count :
               {int64_t{0}, int64_t{1}, int64_t{15}, int64_t{16}, int64_t{33}, size}) {
            if (first < 0 || first > size) continue;
            const int64_t kept = std::min(count, size - first);
            Tensor part = torch::full({kept}, 9, type);
            draw->fill(part, first);
            EXPECT_TRUE(at::equal(part, whole.narrow(0, first, kept))) << first << " " << count;
          }
      }
}

TEST(DeferredDraws, OnlyAPureDrawIsKnownAsOne) {
  const auto made = deferred_init([] {
    Tensor plain = torch::empty({8, 8}).normal_();
    Tensor scaled = torch::empty({8, 8}).normal_().mul_(2);
    Tensor part = torch::empty({8, 8});
    part.narrow(0, 0, 4).normal_();
    Tensor turned = torch::empty({8, 8}).normal_().t();
    return std::vector{plain, scaled, part, turned, torch::zeros({8})};
  });
  EXPECT_TRUE(deferred::draw_behind(made[0]));
  for (size_t i = 1; i < made.size(); ++i) EXPECT_FALSE(deferred::draw_behind(made[i])) << i;
  EXPECT_FALSE(deferred::draw_behind(torch::randn({20})));
}

TEST(DeferredDraws, TakeNoMemoryWhileRecording) {
  constexpr int64_t kSize = 1 << 22;
  testing::CountingAllocator& memory = testing::counted();
  const size_t before = memory.peak = memory.live.load();
  const Tensor kept = deferred_init([] {
    torch::empty({kSize}).uniform_();
    return torch::randn({kSize}).uniform_(-1, 1);
  });
  EXPECT_LT(memory.peak - before, size_t{kSize}) << "a quarter of one tensor";
}

TEST(DeferredDraws, RefuseWhatPlainConstructionRefuses) {
  EXPECT_THROW(deferred_init([] { return torch::empty({20}).normal_(0, -1); }), c10::Error);
  EXPECT_THROW(deferred_init([] { return torch::empty({20}).uniform_(1, 0); }), c10::Error);
}

}  // namespace
}  // namespace fsdp::shard
