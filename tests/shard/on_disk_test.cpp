// Masters and states on disk: results have the same bits as in memory, and memory holds only a few
// units' worth of them. offload_test.cpp covers the uses common to all offload; this file covers
// the disk.
#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <cerrno>
#include <filesystem>
#include <optional>

#include "base/seams.h"
#include "disk/file.h"
#include "fsdp/optim.h"
#include "optim/states.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/oracle.h"
#include "shard/update.h"

namespace fsdp::testing::on_disk {
namespace {

constexpr int64_t kWidth = 48;
constexpr int kLayers = 12;

struct Training {
  torch::nn::Sequential model;
  Sharded sharded;
  std::unique_ptr<Optimizer> optimizer;

  void step(int index) {
    torch::manual_seed(100 + index);
    model->forward(at::randn({4, kWidth}, test_device())).square().mean().backward();
    sharded.clip_grad_norm_(1.0);
    optimizer->step();
    optimizer->zero_grad();
  }
};

Offload on_disk() {
  return {.optimizer = true, .directory = std::filesystem::temp_directory_path().string()};
}

// The reference for runs with the disk. On a GPU it is updated by the CPU too: the GPU's update
// rounds differently, and twenty steps amplify that.
Offload in_memory() {
  return {.optimizer = !test_device().is_cpu()};
}

MixedPrecision bf16() {
  return {.param_dtype = at::kBFloat16};
}

Training start(Offload offload, MixedPrecision precision = bf16()) {
  Training run;
  torch::manual_seed(3);
  for (int i = 0; i < kLayers; ++i) run.model->push_back(torch::nn::Linear(kWidth, kWidth));
  run.sharded = fully_shard(run.model, {.wrap = wrap::modules<torch::nn::LinearImpl>(),
                                        .mixed_precision = std::move(precision),
                                        .device = test_device(),
                                        .offload = std::move(offload)});
  run.optimizer =
      std::make_unique<AdamW>(run.sharded, AdamWOptions{.lr = 1e-2, .weight_decay = 0.1});
  return run;
}

// Masters and states of this rank, by unit.
std::vector<at::Tensor> everything(const Training& run) {
  std::vector<at::Tensor> all;
  for (const auto* flat : shard::trainable_flats(*shard::lock(run.sharded))) {
    all.push_back(flat->read_master().clone());
    for (const auto& state : optim::states_of(*run.optimizer).slots(*flat))
      all.push_back(state.clone());
  }
  return all;
}

void expect_same(const Training& seen, const Training& expected) {
  const auto a = everything(seen), b = everything(expected);
  ASSERT_EQ(a.size(), b.size());
  ASSERT_GE(a.size(), 3u * kLayers);
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i].cpu(), b[i].cpu())) << i;
}

TEST(OnDisk, TwentyStepsAreThoseInMemory) {
  for (const auto& precision :
       {bf16(), MixedPrecision{.param_dtype = at::kBFloat16, .split_master = false},
        MixedPrecision{}}) {
    Training plain = start(in_memory(), precision), disk = start(on_disk(), precision);
    for (int i = 0; i < 20; ++i) {
      plain.step(i);
      disk.step(i);
    }
    expect_same(disk, plain);
  }
}

TEST(OnDisk, MemoryHoldsAFewUnitsOfMastersAndStates) {
  Training host = start({.optimizer = true}), disk = start(on_disk());
  for (int i = 0; i < 2; ++i) {
    host.step(i);
    disk.step(i);
  }
  shard::await_updates(*shard::lock(disk.sharded));
  const auto in_host = host.sharded.memory(), with_disk = disk.sharded.memory();
  EXPECT_EQ(with_disk.parameters, 0);  // the half of the masters that bfloat16 lacks
  EXPECT_EQ(in_host.host - in_host.parameters - in_host.optimizer,
            with_disk.host - with_disk.optimizer);
  // Three buffers, each for one of the twelve units; tensors are whole numbers of blocks.
  EXPECT_GT(with_disk.optimizer, 0);
  EXPECT_LE(with_disk.optimizer,
            (in_host.parameters + in_host.optimizer) / 4 + 9 * disk::kAlignment);
}

TEST(OnDisk, LookingInBetweenChangesNothing) {
  Training plain = start(in_memory()), disk = start(on_disk());
  for (int i = 0; i < 6; ++i) {
    plain.step(i);
    disk.step(i);
    if (i % 2) expect_same(disk, plain);
    disk.sharded.full_tensor("0.weight");
  }
}

TEST(OnDisk, WhatIsWrittenBetweenStepsIsKept) {
  Training plain = start(in_memory()), disk = start(on_disk());
  for (int i = 0; i < 6; ++i)
    for (Training* run : {&plain, &disk}) {
      run->step(i);
      at::NoGradGuard no_grad;
      for (auto* flat : shard::trainable_flats(*shard::lock(run->sharded)))
        for (auto& state : optim::states_of(*run->optimizer).restore(*flat, i + 1)) state.mul_(0.5);
    }
  expect_same(disk, plain);
}

TEST(OnDisk, AnOptimizerMayFollowOneThatIsGone) {
  Training plain = start(in_memory()), disk = start(on_disk());
  for (Training* run : {&plain, &disk}) {
    run->step(0);
    run->optimizer.reset();
    run->optimizer = std::make_unique<AdamW>(run->sharded, AdamWOptions{.lr = 1e-3});
    run->step(1);
    run->step(2);
  }
  expect_same(disk, plain);
}

TEST(OnDisk, TwoOptimizersAtOnceAreRefused) {
  Training disk = start(on_disk());
  disk.step(0);
  SGD other(disk.sharded, {.lr = 0.1, .momentum = 0.9});
  disk.model->forward(at::randn({4, kWidth}, test_device())).sum().backward();
  expect_error([&] { other.step(); }, {"another optimizer"});
}

TEST(OnDisk, WhatCannotWorkIsRefusedWhenItIsAskedFor) {
  Offload alone = on_disk();
  alone.optimizer = false;
  expect_error([&] { start(alone); }, {"offload.directory", "offload.optimizer"});
  expect_error([] { start({.optimizer = true, .directory = "/no/such/place"}); },
               {"/no/such/place"});
  Training disk = start(on_disk());
  expect_error([&] { disk.sharded.parameters(); }, {"torch::optim", "disk"});
}

int full(const char* call, int64_t) {
  return std::string(call) == "allocate" ? ENOSPC : 0;
}

int broken(const char* call, int64_t) {
  return std::string(call) == "write" ? EIO : 0;
}

TEST(OnDisk, AFullDiskIsSaidByTheFirstStep) {
  Training disk = start(on_disk());
  std::optional<WithSeams> no_room(std::in_place, Seams{.disk = full});
  disk.model->forward(at::randn({4, kWidth}, test_device())).sum().backward();
  expect_error([&] { disk.optimizer->step(); }, {"no room", "free"});
  no_room.reset();
  disk.optimizer->zero_grad();
  // Nothing is lost: with space on the disk, training goes on as if nothing had happened.
  Training memory = start(in_memory());
  for (int i = 0; i < 3; ++i) {
    disk.step(i);
    memory.step(i);
  }
  for (const auto& item : disk.model->named_parameters())
    EXPECT_TRUE(
        at::equal(disk.sharded.full_tensor(item.key()), memory.sharded.full_tensor(item.key())))
        << item.key();
}

TEST(OnDisk, ADiskThatFailsIsSaidByALaterCallWithTheUnit) {
  Training disk = start(on_disk());
  disk.step(0);
  const WithSeams failing({.disk = broken});
  // With several ranks the first to fail leaves, and the others may see that before their own
  // error.
  std::vector<std::string> either = {"writing"};
  if (world_size() > 1) either.push_back("left");
  expect_error(
      [&] {
        for (int i = 1; i < 4; ++i) disk.step(i);
      },
      {"unit"}, either);
}

}  // namespace
}  // namespace fsdp::testing::on_disk
