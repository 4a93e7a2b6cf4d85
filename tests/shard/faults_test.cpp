// Ranks that diverge: an error within the timeout says which rank, where and what; never a hang and
// never wrong numbers. A failure breaks the ranks' communicators, so every test here runs in a
// world of its own.
#include <ATen/ATen.h>

#include <chrono>

#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

using Seconds = std::chrono::duration<double>;

// `act` fails on this rank soon after the timeout at the latest.
std::string error_in_time(const std::function<void()>& act) {
  auto start = std::chrono::steady_clock::now();
  std::string error = error_of(act);
  double took = Seconds(std::chrono::steady_clock::now() - start).count();
  EXPECT_LE(took, Seconds(test_world().timeout()).count() + 5) << error;
  return error;
}

void expect_word(const std::string& error, const std::vector<std::string>& one_of) {
  bool found = std::any_of(one_of.begin(), one_of.end(),
                           [&](const auto& word) { return contains(error, word); });
  EXPECT_TRUE(found) << "nothing of \"" << one_of.front() << "\" in: " << error;
}

void branch_differently(bool share) {
  SideBySide both(model_case("branches"), {.share_host_memory = share});
  both.train(2);
  std::string error = error_in_time([&] {
    for (int i = 0; i < 3; ++i) {
      auto batch = both.batch(0, rank());
      batch.step = rank() == 0 ? 0 : 1;  // rank 0 goes left, the others right
      both.mine().loss(batch).backward();
      both.sharded().zero_grad();
    }
  });
  expect_word(error, {"rank"});
  expect_word(error, {"unit \"left\"", "unit \"right\""});
  expect_word(error, {"aten::", "linear", "addmm", "gradients", "backward"});
}

TEST(FaultsShared, RanksThatTakeDifferentBranches) {
  branch_differently(true);
}

TEST(FaultsGathered, RanksThatTakeDifferentBranches) {
  branch_differently(false);
}

// Units of the same size: the message sizes match, so only the unit's number differs.
void change_order(bool share) {
  SideBySide both(model_case("mlp"), {.share_host_memory = share});
  both.train(2);
  std::string error = error_in_time([&] {
    auto model = std::dynamic_pointer_cast<MlpImpl>(both.mine().module);
    for (int i = 0; i < 3; ++i) {
      auto h = both.batch(i, rank()).x;
      for (int layer : rank() == 0 ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0, 2, 1, 3})
        h = model->layer(layer)->forward(h).tanh();
      h.sum().backward();
      both.sharded().zero_grad();
    }
  });
  expect_word(error, {"rank"});
  expect_word(error, {"unit \"layers."});
}

TEST(FaultsShared, RanksThatUseUnitsInAnotherOrder) {
  change_order(true);
}

TEST(FaultsGathered, RanksThatUseUnitsInAnotherOrder) {
  change_order(false);
}

// Works with right numbers, or is an error with a hint.
void touch_on_one_rank(bool share) {
  SideBySide both(model_case("mlp"), {.share_host_memory = share});
  both.train(2);
  std::string error;
  auto start = std::chrono::steady_clock::now();
  try {
    if (rank() == 0) both.mine().parameter("layers.5.weight").norm().item<float>();
    both.train(2, 2);
  } catch (const std::exception& failure) {
    error = failure.what();
  }
  double took = Seconds(std::chrono::steady_clock::now() - start).count();
  EXPECT_LE(took, Seconds(test_world().timeout()).count() + 5);
  if (!error.empty()) expect_word(error, {"HINT"});
}

TEST(FaultsShared, AWeightTouchedOnOneRankOnly) {
  touch_on_one_rank(true);
}

TEST(FaultsGathered, AWeightTouchedOnOneRankOnly) {
  touch_on_one_rank(false);
}

void stop_coming(bool share) {
  SideBySide both(model_case("mlp"), {.share_host_memory = share});
  both.train(2);
  int missing = world_size() - 1;
  if (rank() == missing) return;  // and its process ends
  std::string error = error_in_time([&] {
    for (int i = 0; i < 3; ++i) {
      both.run_mine(both.work(i));
      both.sharded().zero_grad();
    }
  });
  expect_word(error, {"rank " + std::to_string(missing)});
}

TEST(FaultsShared, ARankThatStopsComing) {
  stop_coming(true);
}

TEST(FaultsGathered, ARankThatStopsComing) {
  stop_coming(false);
}

TEST(FaultsShared, RanksThatShardDifferentModels) {
  std::string error = error_in_time([&] {
    torch::nn::Linear model(rank() == 0 ? 8 : 12, 16);
    auto sharded = fully_shard(model, {.device = test_device()});
    model(at::ones({2, model->weight.size(1)}, test_device())).sum().backward();
  });
  expect_word(error, {"rank"});
}

}  // namespace
}  // namespace fsdp::testing
