// Memory under deferred_init: none until a value is needed, then at most one parameter's. A tensor
// that has its memory is like any other.
#include <algorithm>
#include <atomic>
#include <thread>

#include "fsdp/deferred_init.h"
#include "shard/counting_allocator.h"
#include "shard/deferred_oracle.h"

namespace fsdp::shard {
namespace {

using testing::counted;
using testing::CountingAllocator;

TEST(DeferredMemory, AtMostOneParameterHasMemory) {
  constexpr size_t kWeight = 512 * 512 * 4;
  CountingAllocator& memory = counted();
  size_t before = memory.peak = memory.live.load();
  nn::Sequential model = deferred_init([] {
    nn::Sequential layers;
    for (int i = 0; i < 8; ++i) layers->push_back(nn::Linear(512, 512));
    torch::NoGradGuard no_grad;
    for (Tensor& p : layers->parameters()) p.normal_(0, 0.02);
    return layers;
  });
  EXPECT_LT(memory.peak - before, 3 * kWeight / 2) << "while recording";
  EXPECT_LT(memory.live - before, kWeight / 4) << "after";  // states of the generator

  memory.peak = memory.live.load();
  for (const Tensor& p : model->parameters()) deferred::value(p);
  EXPECT_LT(memory.peak - before, 3 * kWeight / 2) << "while asking";
  EXPECT_LT(memory.live - before, kWeight / 4);

  for (const Tensor& p : model->parameters()) deferred::materialize(p);
  EXPECT_GT(memory.live - before, 8 * kWeight) << "given for good";
  model = nullptr;
  EXPECT_LT(memory.live - before, kWeight / 4) << "and freed with the model";
}

TEST(DeferredMemory, WhatNoTensorNeedsIsForgotten) {
  Tensor outside = torch::rand({1 << 16});
  Tensor kept = deferred_init([&] {
    Tensor t = torch::ones({1 << 16}).mul_(outside);
    Tensor dependent = t * 2;
    t.normal_();  // overwrites everything before
    EXPECT_GT(outside.storage().use_count(), 1u);
    dependent = Tensor();
    EXPECT_EQ(outside.storage().use_count(), 1u);
    t.mul_(outside);
    return t;
  });
  EXPECT_GT(outside.storage().use_count(), 1u);
  deferred::materialize(kept);
  EXPECT_EQ(outside.storage().use_count(), 1u);
  Tensor dropped = deferred_init([&] { return torch::ones({1 << 16}).requires_grad_() * outside; });
  EXPECT_GT(outside.storage().use_count(), 1u);
  dropped = Tensor();
  EXPECT_EQ(outside.storage().use_count(), 1u);
}

TEST(DeferredMemory, AnOverwrittenValueIsNotComputed) {
  CountingAllocator& memory = counted();
  Tensor t = deferred_init([] {
    return torch::rand({1000, 1000}).matmul(torch::rand({1000, 10}));
  });
  Tensor zeroed = deferred_init([&] { return t.zero_(); });
  size_t before = memory.peak = memory.live.load();
  EXPECT_EQ(deferred::value(zeroed).sum().item<float>(), 0);
  EXPECT_LT(memory.peak - before, 1000u * 1000);
}

TEST(DeferredMemory, LongHistoriesNeitherOverflowTheStackNorTakeForEver) {
  constexpr int kSteps = 100'000;
  Tensor sum = deferred_init([] {
    Tensor t = torch::zeros({2});
    for (int i = 0; i < kSteps; ++i) t.add_(1);
    return t;
  });
  EXPECT_EQ(deferred::value(sum)[1].item<float>(), kSteps);
  sum = Tensor();
}

// --- tensors that have their memory ---

TEST(DeferredMemory, ARawReadSaysWhatToDo) {
  Tensor t = deferred_init([] { return torch::rand({4}); });
  for (auto read :
       {+[](const Tensor& t) { t.data_ptr(); }, +[](const Tensor& t) { t.const_data_ptr(); },
        +[](const Tensor& t) { t.accessor<float, 1>(); }}) {
    try {
      read(t);
      FAIL() << "read memory that is not there";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("HINT"), std::string::npos) << error.what();
    }
  }
  deferred::materialize(t);
  EXPECT_EQ(t.data_ptr<float>()[2], t[2].item<float>());
}

TEST(DeferredMemory, EveryHandleOfAStorageGetsItsMemory) {
  Tensor t = deferred_init([] { return torch::rand({4, 4}); });
  Tensor data = t.data(), view = t[1];  // the second is an operator
  EXPECT_FALSE(deferred::is_deferred(t));
  EXPECT_FALSE(deferred::is_deferred(data));
  EXPECT_TRUE(has_key(data));
  data.add_(1);
  EXPECT_FALSE(has_key(data));
  EXPECT_TRUE(torch::equal(view, t[1]));
  EXPECT_TRUE(torch::equal(data, t));
  EXPECT_EQ(t.storage().nbytes(), 64u);
  EXPECT_TRUE(torch::equal(deferred::value(t), t));
}

TEST(DeferredMemory, AModelBuiltSoTrainsLikeAPlainOne) {
  auto train = [](nn::Sequential model) {
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model->forward(torch::linspace(-1, 1, 40).view({5, 8})).square().mean().backward();
      optimizer.step();
    }
    return tensors_of(*model);
  };
  auto build = [] {
    return nn::Sequential(nn::Linear(8, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Linear(16, 2));
  };
  torch::manual_seed(7);
  Tensors expected = train(build());
  torch::manual_seed(7);
  Tensors actual = train(deferred_init(build));
  for (size_t i = 0; i < actual.size(); ++i)
    expect_same_bits(expected[i].second, actual[i].second, actual[i].first);
}

TEST(DeferredMemory, AGraphFromTheConstructorIsTheSame) {
  auto gradient = [](bool lazy) {
    torch::manual_seed(7);
    auto build = [] {
      Tensor v = torch::rand({4, 3}).requires_grad_();
      Tensor g = torch::rand({4, 1}).requires_grad_();
      return std::pair{v, v * (g / v.norm(2, 1, true))};
    };
    auto [v, weight] = lazy ? deferred_init(build) : build();
    EXPECT_FALSE(weight.is_leaf());
    EXPECT_EQ(lazy, deferred::is_deferred(weight));
    weight.square().sum().backward();
    return v.grad();
  };
  EXPECT_TRUE(torch::equal(gradient(true), gradient(false)));
}

TEST(DeferredMemory, ThreadsMayAskAtOnce) {
  auto build = [] { return nn::Linear(64, 64); };
  torch::manual_seed(7);
  nn::Linear plain = build();
  torch::manual_seed(7);
  nn::Linear lazy = deferred_init(build);
  Tensor state = generator_state();
  std::vector<std::thread> threads;
  std::atomic<int> same = 0;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      if (i % 2) deferred::materialize(lazy->weight);
      same += torch::equal(deferred::value(lazy->weight), plain->weight);
      same += torch::equal(deferred::value(lazy->bias), plain->bias);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(same, 8);
  EXPECT_TRUE(torch::equal(state, generator_state()));
}

TEST(DeferredMemory, OtherThreadsAreNotRecorded) {
  fsdp::DeferredScope scope;
  bool deferred_there = true;
  std::thread([&] { deferred_there = deferred::is_deferred(torch::ones({2})); }).join();
  EXPECT_FALSE(deferred_there);
}

TEST(DeferredMemory, ACloneAndACopyToAnotherDtypeWorkAfterwards) {
  torch::manual_seed(7);
  auto lazy = deferred_init([] { return std::make_shared<nn::LinearImpl>(5, 4); });
  torch::manual_seed(7);
  nn::LinearImpl plain(5, 4);
  auto copy = std::dynamic_pointer_cast<nn::LinearImpl>(lazy->clone());
  EXPECT_TRUE(torch::equal(copy->weight, plain.weight));
  lazy->to(torch::kDouble);
  EXPECT_TRUE(torch::equal(lazy->weight, plain.weight.to(torch::kDouble)));
}

}  // namespace
}  // namespace fsdp::shard
