// Activation offload: what is copied, when, and how much stays on the device. The other files check
// gradients: each of their cases also runs offloaded.
#include <ATen/ATen.h>
#include <torch/autograd.h>

#include <optional>

#include "base/seams.h"
#include "fsdp/nn/functional.h"
#include "memory/activation_offload.h"
#include "memory/host_pool.h"
#include "memory/side_by_side.h"
#include "shard/models.h"
#include "shard/saved_activations.h"
#include "shard/tape_hook.h"

namespace fsdp::testing {
namespace {

namespace offload = memory::offload;
namespace saved = shard::saved_activations;

at::Tensor offloaded(const std::function<at::Tensor()>& code) {
  return recompute(Recompute::OFFLOAD, code);
}

class Offload : public ::testing::Test {
 protected:
  void SetUp() override {
    everything_.emplace(Seams{.smallest_offloaded = 1});
    before_ = offload::copies();
  }
  void TearDown() override { EXPECT_EQ(offload::use_of(at::kCPU).now, 0); }

  int64_t out() const { return offload::copies().out - before_.out; }
  int64_t in() const { return offload::copies().in - before_.in; }

 private:
  std::optional<WithSeams> everything_;
  offload::Copies before_;
};

Make transformer(int64_t depth) {
  return [=](Recompute mode) {
    Transformer model(32, 4, depth);
    at::Tensor ids =
        random_integers(0, 0, 0, TransformerImpl::kVocabulary, {32, TransformerImpl::kTokens});
    auto loss = [model, ids]() mutable { return model->loss(ids, ids.roll(1, 1)); };
    return Subject{model.ptr(), loss, RecomputePolicy(wrap::modules<Block>(), {.mode = mode})};
  };
}

TEST_F(Offload, DeviceMemoryDoesNotGrowWithTheNumberOfBlocks) {
  auto per_block = [](RunOptions options) {
    return static_cast<double>(run(transformer(12), options).kept -
                               run(transformer(6), options).kept) /
           6 / 4;  // elements
  };
  double d = 32, rows = 32 * TransformerImpl::kTokens, weights = 12 * d * d + 4 * d;
  double plain = per_block({.recompute = false}), less = per_block({.mode = Recompute::OFFLOAD});
  EXPECT_GT((plain - weights) / (rows * d), 14);
  // The unsharded weights and norms aren't offloaded: the module keeps them anyway.
  EXPECT_NEAR((less - weights) / (rows * d), 0, 1e-6);
}

TEST_F(Offload, ViewsOfAStorageAreCopiedOnce) {
  at::Tensor x = at::randn({64, 64}).requires_grad_(true);
  at::Tensor loss = offloaded([&] {
    at::Tensor y = x.tanh();                  // saves y
    return (y.t() * y.view({64, 64})).sum();  // and two views of it
  });
  EXPECT_EQ(out(), 1);
  loss.backward();
  at::Tensor gradient = x.grad().clone();
  x.mutable_grad().reset();
  at::Tensor y = x.tanh();
  (y.t() * y).sum().backward();
  EXPECT_TRUE(at::equal(gradient, x.grad()));
}

TEST_F(Offload, QueriesKeysAndValuesAreCopiedOnce) {
  at::Tensor qkv = at::randn({2, 16, 4 * 8}).requires_grad_(true);
  at::Tensor cos = at::rand({16, 8}), sin = at::rand({16, 8});
  at::Tensor loss = offloaded([&] {
    return fsdp::nn::rope_attention(qkv * 2, cos, sin, /*heads=*/2, /*kv_heads=*/1).square().sum();
  });
  // Both tables, attention's input, its result, and the log-sum-exps.
  EXPECT_EQ(out(), 5);
  loss.backward();
}

TEST_F(Offload, EachPartOfAStorageIsRestoredAsItWasSaved) {
  at::Tensor x = at::randn({64, 8}).requires_grad_(true);
  auto code = [&] {
    auto parts = (x * 1).unsafe_chunk(2, 1);
    parts[0].sigmoid_();  // saved before the other half is written
    parts[1].tanh_();
    return (parts[0].exp() * parts[1].exp()).sum();
  };
  code().backward();
  at::Tensor gradient = x.grad().clone();
  x.mutable_grad().reset();
  // A second region, so that the first one leaves the device.
  at::Tensor loss = offloaded(code);
  offloaded([&] { return x.exp(); });
  loss.backward();
  EXPECT_GT(in(), 0);
  EXPECT_TRUE(at::equal(gradient, x.grad()));
}

TEST_F(Offload, SmallTensorsStay) {
  const WithSeams as_usual({});
  at::Tensor small = at::randn({64, 64}).requires_grad_(true);
  at::Tensor large = at::randn({1 << 18}).requires_grad_(true);  // exactly 1 MiB
  at::Tensor loss = offloaded([&] { return small.tanh().exp().sum() * large.tanh().sum(); });
  EXPECT_EQ(out(), 1);
  loss.backward();
}

TEST_F(Offload, HostMemoryDoesNotGrowFromStepToStep) {
  memory::HostPool pool(at::kCPU);
  auto step = [&](std::vector<int64_t> sizes) {
    std::vector<at::Tensor> blocks;
    for (int64_t size : sizes) blocks.push_back(pool.take(size));
    for (size_t i = 0; i < blocks.size(); ++i) {
      EXPECT_EQ(blocks[i].numel(), sizes[i]);
      for (size_t k = 0; k < i; ++k)  // they don't overlap
        EXPECT_TRUE(
            blocks[k].const_data_ptr<uint8_t>() + sizes[k] <= blocks[i].const_data_ptr<uint8_t>() ||
            blocks[i].const_data_ptr<uint8_t>() + sizes[i] <= blocks[k].const_data_ptr<uint8_t>());
    }
    pool.give(blocks[1]);
    blocks[1] = pool.take(sizes[1]);  // the same again
    for (const at::Tensor& block : blocks) pool.give(block);
    EXPECT_EQ(pool.used(), 0);
  };
  int64_t large = 100 << 20;
  step({large, 1, large, 5000});
  int64_t first = pool.size();
  for (int64_t i = 0; i < 20; ++i) step({large - i * 4096, 4096 * i + 1, large - i, 5000 + i});
  EXPECT_EQ(pool.size(), first);
}

TEST_F(Offload, ATensorThatStaysAliveIsCopiedInTheFirstStepOnly) {
  at::Tensor mask = at::rand({64, 64}), x = at::randn({64, 64}).requires_grad_(true);
  for (int step = 0; step < 3; ++step) {
    int64_t copied = out();
    at::Tensor loss = offloaded([&] { return (x.tanh() * mask).sum(); });
    offloaded([&] { return x.exp(); });            // the first region leaves the device
    EXPECT_EQ(out() - copied, step == 0 ? 3 : 2);  // tanh, exp, and the mask
    int64_t brought = in();
    loss.backward();
    EXPECT_EQ(in() - brought, 1);  // tanh
  }
}

TEST_F(Offload, BackwardBringsBackTheRegionBeforeAheadOfTime) {
  at::Tensor x = at::randn({64, 64}).requires_grad_(true);
  at::Tensor h = x;
  std::vector<int64_t> brought;  // copies in when backward reaches the end of region i
  for (int i = 0; i < 4; ++i) {
    h = offloaded([&] { return h.tanh().exp(); });  // 2 storages
    h.register_hook([&](const at::Tensor&) { brought.push_back(in()); });
  }
  at::Tensor loss = h.sum();
  h.reset();
  EXPECT_EQ(out(), 8);
  loss.backward();
  // The last region hasn't left; its first use starts the copies of the third, and so on.
  EXPECT_EQ(brought, (std::vector<int64_t>{0, 2, 4, 6}));
  EXPECT_EQ(in(), 6);
}

TEST_F(Offload, ASavedTensorThatIsChangedInPlaceIsAnErrorAsInAPlainRun) {
  for (bool later : {false, true}) {
    at::Tensor x = at::randn({64, 64}).requires_grad_(true), y;
    at::Tensor loss = offloaded([&] {
      y = x.exp();
      if (!later) y.add_(1);
      return y.sum();
    });
    if (later) {
      torch::NoGradGuard no_grad;
      y.add_(1);
    }
    try {
      loss.backward();
      FAIL() << "no error";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("changed in place"), std::string::npos);
    }
  }
}

TEST_F(Offload, ScopesOfAllModesNest) {
  at::Tensor x = at::randn({64, 64}), w = at::randn({64, 64});
  auto gradients = [&](std::optional<Recompute> outer, std::optional<Recompute> inner) {
    at::Tensor a = x.clone().requires_grad_(true), b = w.clone().requires_grad_(true);
    auto in_scope = [](std::optional<Recompute> mode, const std::function<at::Tensor()>& code) {
      return mode ? recompute(*mode, code) : code();
    };
    at::Tensor y = in_scope(outer, [&] {
      at::Tensor h = a.mm(b).tanh().exp();
      h = in_scope(inner, [&] { return h.sin().mm(b).sigmoid(); });
      return h.cos().mm(b).tanh();
    });
    offloaded([&] { return y.exp(); });
    y.square().sum().backward();
    return std::pair(a.grad(), b.grad());
  };
  auto plain = gradients({}, {});
  const auto modes = {Recompute::FULL, Recompute::SELECTIVE, Recompute::OFFLOAD,
                      Recompute::FULL_OFFLOAD};
  for (Recompute outer : modes)
    for (Recompute inner : modes) {
      auto both = gradients(outer, inner);
      EXPECT_TRUE(at::equal(both.first, plain.first)) << int(outer) << " " << int(inner);
      EXPECT_TRUE(at::equal(both.second, plain.second)) << int(outer) << " " << int(inner);
    }
}

TEST_F(Offload, AnExceptionAndADroppedGraphLeaveNothing) {
  at::Tensor x = at::randn({64, 64}).requires_grad_(true);
  EXPECT_THROW(offloaded([&]() -> at::Tensor {
                 at::Tensor y = x.exp().tanh();
                 EXPECT_TRUE(shard::packing());
                 EXPECT_FALSE(shard::taping());
                 throw std::runtime_error("");
               }),
               std::runtime_error);
  EXPECT_FALSE(shard::packing());
  EXPECT_EQ(offload::use_of(at::kCPU).now, 0);
  {
    at::Tensor y = offloaded([&] { return x.exp().tanh(); });
    EXPECT_GT(offload::use_of(at::kCPU).now, 0);
  }
  EXPECT_EQ(offload::use_of(at::kCPU).now, 0);
}

TEST_F(Offload, MetaTensorsAreOffloadedToo) {  // for a plan
  at::Tensor x = at::empty({1024, 1024}, at::device(at::kMeta)).requires_grad_(true);
  saved::count(true);
  at::Tensor h = x;
  for (int i = 0; i < 8; ++i) h = offloaded([&] { return h.tanh().exp(); });
  at::Tensor loss = h.sum();
  h.reset();
  EXPECT_EQ(saved::held(), 2 * (4 << 20));  // the last region's
  EXPECT_LE(saved::peak(), 4 * (4 << 20));  // two regions'
  loss.backward();
  EXPECT_LE(saved::peak(), 4 * (4 << 20));
  EXPECT_EQ(saved::held(), 0);
  saved::count(false);
}

}  // namespace
}  // namespace fsdp::testing
