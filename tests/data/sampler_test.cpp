// DistributedSampler in torch's own data loader, at several world sizes.
#include <gtest/gtest.h>
#include <torch/data.h>

#include <map>
#include <set>
#include <sstream>

#include "data/folders.h"
#include "fsdp/data.h"

namespace fsdp::data {
namespace {

// Sample i is the number i.
struct Numbers : torch::data::Dataset<Numbers, size_t> {
  explicit Numbers(size_t size) : size_(size) {}
  size_t get(size_t index) override { return index; }
  torch::optional<size_t> size() const override { return size_; }
  size_t size_;
};

using Steps = std::vector<std::vector<size_t>>;

// The samples of one rank in an epoch, step by step.
Steps epoch_of(DistributedSampler sampler, size_t size, size_t batch, size_t workers) {
  auto loader = torch::data::make_data_loader(
      Numbers(size), sampler,
      torch::data::DataLoaderOptions().batch_size(batch).workers(workers).enforce_ordering(true));
  Steps steps;
  for (auto& part : *loader) steps.push_back(part);
  return steps;
}

SamplerOptions options(int64_t size, int world, int rank) {
  SamplerOptions result;
  result.size = size;
  result.world = world;
  result.rank = rank;
  result.seed = 3;
  return result;
}

TEST(DistributedSampler, StepsAreTheSameSetsAtEveryWorldSize) {
  const int64_t size = 60;
  for (bool shuffle : {true, false}) {
    std::vector<std::set<size_t>> reference;
    for (int world : {1, 2, 3, 4}) {
      std::vector<std::set<size_t>> steps(5);
      for (int rank = 0; rank < world; ++rank) {
        auto chosen = options(size, world, rank);
        chosen.shuffle = shuffle;
        auto mine = epoch_of(DistributedSampler(chosen), size, 12 / world, rank % 3);
        ASSERT_EQ(mine.size(), 5u);
        for (size_t step = 0; step < mine.size(); ++step) {
          EXPECT_EQ(mine[step].size(), 12u / world);
          steps[step].insert(mine[step].begin(), mine[step].end());
        }
      }
      std::set<size_t> all;
      for (const auto& step : steps) {
        EXPECT_EQ(step.size(), 12u);
        all.insert(step.begin(), step.end());
      }
      EXPECT_EQ(all.size(), 60u);
      if (reference.empty()) reference = steps;
      EXPECT_EQ(steps, reference) << world;
    }
  }
}

TEST(DistributedSampler, ALastStepThatIsNotFullIsSharedOrDropped) {
  for (int world : {1, 2, 3, 4}) {
    std::map<size_t, int> padded, dropped;
    size_t steps = 0;
    for (int rank = 0; rank < world; ++rank) {
      auto chosen = options(53, world, rank);
      auto mine = epoch_of(DistributedSampler(chosen), 53, 4, 0);
      if (rank == 0) steps = mine.size();
      EXPECT_EQ(mine.size(), steps);  // a rank with fewer steps would hang the others
      size_t count = 0;
      for (const auto& step : mine) {
        count += step.size();
        for (size_t sample : step) ++padded[sample];
      }
      EXPECT_EQ(count, static_cast<size_t>((53 + world - 1) / world));
      chosen.drop_last = true;
      for (const auto& step : epoch_of(DistributedSampler(chosen), 53, 4, 0)) {
        EXPECT_EQ(step.size(), 4u);
        for (size_t sample : step) ++dropped[sample];
      }
    }
    EXPECT_EQ(padded.size(), 53u);
    EXPECT_EQ(dropped.size(), static_cast<size_t>(53 / (4 * world) * 4 * world));
    for (auto [sample, times] : dropped) EXPECT_EQ(times, 1);
  }
}

TEST(DistributedSampler, EpochsDifferAndCanBeSetFromOutsideTheLoader) {
  DistributedSampler sampler(options(100, 1, 0));
  auto loader = torch::data::make_data_loader(Numbers(100), sampler, 10);
  auto epoch = [&] {
    Steps steps;
    for (auto& part : *loader) steps.push_back(part);
    return steps;
  };
  auto first = epoch(), second = epoch();  // the next epoch follows by itself
  EXPECT_NE(first, second);
  EXPECT_EQ(sampler.epoch(), 1);
  sampler.set_epoch(0);
  EXPECT_EQ(epoch(), first);
  sampler.set_epoch(1);
  EXPECT_EQ(epoch(), second);
}

TEST(DistributedSampler, ARunGoesOnWhereItWasAtAnotherWorldSize) {
  DistributedSampler whole(options(100, 1, 0));
  whole.set_epoch(4);
  auto reference = epoch_of(whole, 100, 12, 0);
  for (int world : {1, 2, 3}) {
    std::set<size_t> step;
    for (int rank = 0; rank < world; ++rank) {
      DistributedSampler resumed(options(100, world, rank));
      resumed.set_epoch(4);
      resumed.set_position(36);
      auto mine = epoch_of(resumed, 100, 12 / world, 2);
      step.insert(mine[0].begin(), mine[0].end());
    }
    EXPECT_EQ(step, std::set<size_t>(reference[3].begin(), reference[3].end())) << world;
  }
}

TEST(DistributedSampler, IsSavedAndLoaded) {
  DistributedSampler sampler(options(100, 2, 1));
  sampler.set_epoch(2);
  sampler.reset();
  sampler.next(5);
  std::stringstream stream;
  torch::serialize::OutputArchive out;
  sampler.save(out);
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  DistributedSampler loaded(options(100, 2, 1));
  loaded.load(in);
  EXPECT_EQ(loaded.epoch(), 2);
  EXPECT_EQ(loaded.position(), 10);
  loaded.reset();
  EXPECT_EQ(loaded.next(5), sampler.next(5));
}

TEST(DistributedSampler, ImpossibleOnesAreRefused) {
  EXPECT_THROW(DistributedSampler(options(0, 1, 0)), Error);
  EXPECT_THROW(DistributedSampler(options(5, 0, 0)), Error);
  EXPECT_THROW(DistributedSampler(options(5, 2, 2)), Error);
  EXPECT_THROW(DistributedSampler(options(5, 2, -1)), Error);
  EXPECT_THROW(DistributedSampler(options(5, 1, 0)).set_position(-1), Error);
  EXPECT_THROW(DistributedSampler(options(5, 1, 0)).next(0), Error);
}

}  // namespace
}  // namespace fsdp::data
