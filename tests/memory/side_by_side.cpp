#include "memory/side_by_side.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include "base/seams.h"
#include "memory/activation_offload.h"
#include "shard/saved_activations.h"

namespace fsdp::testing {
namespace {

// Shards something, which installs autograd's hooks, so that plain runs are counted too.
void count_everything() {
  static torch::nn::Linear* small = new torch::nn::Linear(1, 1);
  static Sharded* sharded = new Sharded(fully_shard(*small));
  static_cast<void>(sharded);
}

}  // namespace

Outcome run(const Make& make, const RunOptions& options) {
  count_everything();
  const WithSeams everything({.smallest_offloaded = 1});  // nothing here is large
  torch::manual_seed(1);
  Outcome outcome;
  {
    Subject subject = make(options.mode);
    if (options.prepare) options.prepare(subject);
    if (options.recompute) apply_activation_checkpointing(subject.module, subject.policy);
    torch::manual_seed(7);
    try {
      for (int step = 0; step < options.steps; ++step) {
        shard::saved_activations::count(true);
        at::Tensor loss;
        for (int i = 0; i < options.forwards; ++i) {
          at::Tensor one = subject.loss();
          loss = loss.defined() ? loss + one : one;
        }
        outcome.kept = shard::saved_activations::peak();
        loss.backward({}, /*retain_graph=*/options.retain);
        if (options.retain) loss.backward();
        outcome.losses.push_back(loss.detach().clone());
      }
    } catch (const std::exception& error) {
      outcome.error = error.what();
    }
    for (const auto& parameter : subject.module->parameters())
      outcome.gradients.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                                             : at::Tensor());
    for (const auto& buffer : subject.module->buffers()) outcome.buffers.push_back(buffer.clone());
    outcome.random = at::detail::getDefaultCPUGenerator().get_state();
  }
  outcome.left = shard::saved_activations::held();
  shard::saved_activations::count(false);
  return outcome;
}

void expect_equal(const Outcome& plain, const Outcome& other) {
  ASSERT_EQ(plain.error, "");
  ASSERT_EQ(other.error, "");
  auto same = [](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                 const char* what) {
    ASSERT_EQ(a.size(), b.size()) << what;
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(a[i].defined(), b[i].defined()) << what << " " << i;
      if (a[i].defined()) {
        EXPECT_TRUE(at::equal(a[i], b[i])) << what << " " << i;
      }
    }
  };
  same(plain.losses, other.losses, "loss");
  same(plain.gradients, other.gradients, "gradient");
  same(plain.buffers, other.buffers, "buffer");
  EXPECT_TRUE(at::equal(plain.random, other.random)) << "random numbers";
  EXPECT_EQ(other.left, plain.left) << "bytes are still kept after everything is freed";
}

void expect_same(const Make& make, RunOptions options) {
  options.recompute = false;
  Outcome plain = run(make, options);
  EXPECT_EQ(plain.left, 0);
  options.recompute = true;
  for (Recompute mode :
       {Recompute::FULL, Recompute::SELECTIVE, Recompute::OFFLOAD, Recompute::FULL_OFFLOAD}) {
    SCOPED_TRACE(mode == Recompute::FULL        ? "full"
                 : mode == Recompute::SELECTIVE ? "selective"
                 : mode == Recompute::OFFLOAD   ? "offload"
                                                : "full, offload");
    options.mode = mode;
    Outcome again = run(make, options);
    expect_equal(plain, again);
    if (options.less) {
      EXPECT_LE(again.kept, plain.kept + 64);  // a number or two
    }
    EXPECT_EQ(memory::offload::use_of(at::kCPU).now, 0) << "bytes are still in host memory";
    ::testing::Test::RecordProperty("kept", std::to_string(again.kept));
  }
}

}  // namespace fsdp::testing
