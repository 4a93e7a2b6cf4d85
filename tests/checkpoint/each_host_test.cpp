// Checkpoints on each host. Hosts are the nodes of the launch environment, each with a folder of its
// own; that all of them are on one machine makes no difference here.
#include "checkpoint/each_host.h"

#include <ATen/ATen.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "base/seams.h"
#include "checkpoint/buddy.h"
#include "checkpoint/trained.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

namespace fs = std::filesystem;

bool eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return condition();
}

class EachHost : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_GT(world_size(), test_world().local_size()) << "one host"; }

  static int host() { return rank() / test_world().local_size(); }
  fs::path of_host(int number) const { return folder_ / ("host-" + std::to_string(number)); }
  fs::path here() const { return of_host(host()); }

  void save(const Trained& trained, int step, int64_t rank_value = 0) {
    auto saving = checkpoint::save_async(
        here() / ("step-" + std::to_string(step)), trained.sharded, trained.optimizer.get(),
        {.extra = {{"step", int64_t{step}}}, .per_rank = {{"own", rank_value}},
         .on_each_host = true});
    saving.wait();
  }
  // One rank changes the folders, while the others wait.
  static void on_rank_0(const std::function<void()>& act) {
    test_world().comm().barrier();
    if (rank() == 0) act();
    test_world().comm().barrier();
  }
  // Saves a checkpoint, with copies on the other host.
  void save_with_copies(const Trained& trained, int step) {
    save(trained, step, 100 + rank());
    checkpoint::Buddy buddy(test_world(), here());
    buddy.copy("step-" + std::to_string(step));
    ASSERT_TRUE(eventually([&] { return buddy.state() != checkpoint::Buddy::State::kCopying; }));
    EXPECT_EQ(buddy.problem(), "");
    test_world().comm().barrier();
  }
  std::string newest() { return checkpoint::newest_of_hosts(test_world(), here()); }

  SharedFolder folder_;
};

TEST_F(EachHost, HasTheFilesOfItsRanksAndTheMetadata) {
  auto trained = make_trained("transformer", {});
  trained.train(1);
  save(trained, 1);
  const fs::path dir = here() / "step-1";
  for (int r = 0; r < world_size(); ++r)
    EXPECT_EQ(fs::exists(dir / ("__" + std::to_string(r) + "_0.distcp")),
              r / test_world().local_size() == host());
  EXPECT_TRUE(fs::exists(dir / ".metadata"));
  EXPECT_TRUE(fs::exists(dir / ".manifest.json"));
  EXPECT_EQ(newest(), "step-1");
}

TEST_F(EachHost, WhatOtherHostsHaveIsBroughtForLoading) {
  for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::NO_SHARD}) {
    auto saved = make_trained("transformer", {});
    saved.train(2);
    save(saved, 2, 100 + rank());
    const auto expected = snapshot(saved);
    auto loaded = make_trained("transformer", {.strategy = strategy}, Rule::kAdamW, 8);
    const fs::path dir = here() / newest();
    checkpoint::bring_to_hosts(test_world(), dir, loaded.sharded, loaded.optimizer.get());
    const auto result = checkpoint::load(dir, loaded.sharded, loaded.optimizer.get());
    expect_equal(snapshot(loaded), expected);
    EXPECT_EQ(std::get<int64_t>(result.extra.at("step")), 2);
    EXPECT_EQ(std::get<int64_t>(result.per_rank.at("own")), 100 + rank());
  }
}

TEST_F(EachHost, WithWholeCopiesOfTheModelAnyHostMayBeLost) {
  for (const auto strategy : {ShardingStrategy::HYBRID_SHARD, ShardingStrategy::NO_SHARD})
    for (int lost : {0, 1}) {
      ShardOptions options{.strategy = strategy};
      if (strategy == ShardingStrategy::HYBRID_SHARD) options.mesh = hybrid_mesh();
      auto saved = make_trained("transformer", options);
      saved.train(1);
      save(saved, 1);
      on_rank_0([&] { fs::remove_all(of_host(lost)); });
      EXPECT_EQ(newest(), "step-1") << name(strategy) << ", host " << lost;
      auto loaded = make_trained("transformer", options, Rule::kAdamW, 8);
      checkpoint::bring_to_hosts(test_world(), here() / "step-1", loaded.sharded,
                                 loaded.optimizer.get());
      const auto result =
          checkpoint::load(here() / "step-1", loaded.sharded, loaded.optimizer.get());
      expect_equal(snapshot(loaded), snapshot(saved));
      EXPECT_EQ(std::get<int64_t>(result.extra.at("step")), 1);
    }
}

TEST_F(EachHost, WithCopiesAnyHostMayBeLost) {
  for (int lost : {0, 1}) {
    auto saved = make_trained("transformer", {});
    saved.train(2);
    save_with_copies(saved, 1 + lost);
    const std::string name = "step-" + std::to_string(1 + lost);
    for (int r = 0; r < world_size(); ++r)
      EXPECT_TRUE(fs::exists(here() / name / ("__" + std::to_string(r) + "_0.distcp"))) << r;
    on_rank_0([&] { fs::remove_all(of_host(lost)); });
    EXPECT_EQ(newest(), name);
    auto loaded = make_trained("transformer", {}, Rule::kAdamW, 8);
    const fs::path dir = here() / name;
    checkpoint::bring_to_hosts(test_world(), dir, loaded.sharded, loaded.optimizer.get());
    const auto result = checkpoint::load(dir, loaded.sharded, loaded.optimizer.get());
    expect_equal(snapshot(loaded), snapshot(saved));
    EXPECT_EQ(std::get<int64_t>(result.per_rank.at("own")), 100 + rank());
  }
}

TEST_F(EachHost, ACopyThatIsDamagedOnItsWayIsNotKept) {
  auto trained = make_trained("transformer", {});
  trained.train(1);
  save(trained, 1);
  on_rank_0([&] {  // after it was saved: what arrives isn't what the manifest says
    const fs::path file = of_host(0) / "step-1/__1_0.distcp";
    std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(64).put('!');
  });
  checkpoint::Buddy buddy(test_world(), here());
  buddy.copy("step-1");
  const bool leads = test_world().local_rank() == 0;
  if (leads) {
    ASSERT_TRUE(
        eventually([&] { return buddy.state() == checkpoint::Buddy::State::kFailed; }));
    EXPECT_NE(buddy.problem().find(host() == 1 ? "isn't what was saved" : "can't keep copies"),
              std::string::npos)
        << buddy.problem();
  }
  test_world().comm().barrier();
  EXPECT_EQ(fs::exists(of_host(1) / "step-1/__1_0.distcp"), false);
}

TEST_F(EachHost, ABuddyThatIsNotNeededAnymoreEndsAtOnce) {
  checkpoint::Buddy buddy(test_world(), here());
  buddy.copy("step-1");  // which nobody has
}

TEST_F(EachHost, OnlyCheckpointsThatAreWholeCount) {
  auto trained = make_trained("transformer", {});
  trained.train(1);
  for (int step : {1, 2, 13}) save(trained, step);
  EXPECT_EQ(newest(), "step-13");
  on_rank_0([&] { fs::remove(of_host(1) / "step-13/__2_0.distcp"); });
  EXPECT_EQ(newest(), "step-2");
  on_rank_0([&] { fs::resize_file(of_host(0) / "step-2/__0_0.distcp", 10); });
  EXPECT_EQ(newest(), "step-1");
  on_rank_0([&] { fs::remove_all(of_host(1)); });
  EXPECT_EQ(newest(), "");
}

TEST_F(EachHost, AFailureOnOneHostIsAnErrorOnAll) {
  auto trained = make_trained("transformer", {});
  trained.train(1);
  save(trained, 1);
  const auto fails = [](const char* call, const fs::path& path) {
    const bool last = rank() == world_size() - 1 && path.filename() == "__3_0.distcp";
    return std::string(call) == "create" && last ? ENOSPC : 0;
  };
  const WithSeams failing{{.files = fails}};
  // The rank that fails throws its own error, the others name it.
  expect_error([&] { save(trained, 2); }, {rank() == 3 ? "__3_0.distcp" : "rank 3", "No space left"});
  EXPECT_EQ(newest(), "step-1");
}

}  // namespace
}  // namespace fsdp::testing
