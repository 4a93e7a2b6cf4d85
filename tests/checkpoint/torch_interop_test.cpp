// The C++ side of torch_interop.py, which runs these tests and has the same model in Python.
#include <ATen/ATen.h>
#include <torch/nn/modules/conv.h>
#include <torch/utils.h>

#include "checkpoint/trained.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/world.h"

namespace fsdp::testing {
namespace {

namespace fs = std::filesystem;

struct Net : nn::Module {
  Net() {
    at::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    head = register_module("head", TiedHead(embedding->weight));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor sum = at::zeros({}, x.options());
    for (const auto& p :
         {scale, empty, embedding->weight, first->weight, first->bias, conv->weight, conv->bias})
      sum = sum + (p - x).square().sum();
    return sum;
  }

  at::Tensor scale = register_parameter("scale", at::full({}, 1.5f));
  at::Tensor empty = register_parameter("empty", at::zeros({0, 4}));
  at::Tensor frozen = register_parameter("frozen", at::arange(7, at::kFloat), false);
  nn::Embedding embedding = register_module("embedding", nn::Embedding(29, 16));
  nn::Linear first = register_module("first", nn::Linear(16, 33));
  nn::Conv2d conv = register_module("conv", nn::Conv2d(3, 5, 3));
  TiedHead head{nullptr};
  at::Tensor seen = register_buffer("seen", at::arange(3, at::kFloat));
  at::Tensor count = register_buffer("count", at::full({}, 4, at::kLong));
};

Trained make_net(uint64_t seed) {
  torch::manual_seed(seed);
  auto net = std::make_shared<Net>();
  Trained trained{};
  trained.built = built(net, [net](const Batch& batch) { return net->forward(batch.x); });
  trained.sharded = fully_shard({ModuleRef(trained.built.module)},
                                {.wrap = wrap::names({"first"}), .device = test_device()});
  trained.optimizer = std::make_unique<AdamW>(
      trained.sharded,
      AdamWOptions{
          .lr = 0.02,
          .betas = {0.8, 0.95},
          .eps = 1e-6,
          .weight_decay = 0.1,
          .groups = {{.where = [](const std::string&, const at::Tensor& p) { return p.dim() <= 1; },
                      .weight_decay = 0.0}}});
  return trained;
}

fs::path folder() {
  const char* folder = std::getenv("FSDP_TEST_FOLDER");
  return folder ? folder : "";
}

TEST(Torch, Write) {
  if (folder().empty()) GTEST_SKIP() << "torch_interop.py sets FSDP_TEST_FOLDER";
  auto trained = make_net(7);
  for (int step = 0; step < 3; ++step) {
    trained.built.loss({step, at::full({}, 0.1f * step + rank(), test_device())}).backward();
    trained.optimizer->step();
    trained.optimizer->zero_grad();
  }
  checkpoint::save(folder() / "ours", trained.sharded, trained.optimizer.get(),
                   {.extra = {{"step", int64_t{1} << 40},
                              {"loss", 0.1},
                              {"name", std::string("grüße")},
                              {"done", true},
                              {"order", at::tensor({3, 1, 2}, at::kLong)}},
                    .per_rank = {{"seed", int64_t{100 + rank()}}}});
  const auto whole = snapshot(trained);
  if (rank() == 0) write_snapshot(folder() / "ours.whole", whole);
}

TEST(Torch, Read) {
  if (folder().empty()) GTEST_SKIP() << "torch_interop.py sets FSDP_TEST_FOLDER";
  for (const std::string type : {"float32", "bfloat16"}) {
    SCOPED_TRACE(type);
    auto expected = read_snapshot(folder() / (type + ".whole"));
    auto trained = make_net(8);
    const auto loaded = checkpoint::load(folder() / type, trained.sharded, trained.optimizer.get());
    EXPECT_EQ(loaded.skipped, std::vector<std::string>{"extra.odd"});
    EXPECT_EQ(std::get<int64_t>(loaded.extra.at("step")), 3);
    EXPECT_EQ(std::get<std::string>(loaded.extra.at("text")), "x");
    // Our model is float32; converting from bfloat16 is exact.
    for (auto& [name, tensor] : expected)
      if (tensor.is_floating_point()) tensor = tensor.to(at::kFloat);
    expect_equal(snapshot(trained), expected);
  }
}

}  // namespace
}  // namespace fsdp::testing
