// Calls of the user hold the model's lock (src/shard/model.h): while another thread has it, none of
// them gets through.
#include <ATen/ATen.h>

#include <chrono>
#include <functional>
#include <future>

#include "fsdp/grad_scaler.h"
#include "fsdp/optim.h"
#include "shard/model.h"
#include "shard/oracle.h"

namespace fsdp::testing {
namespace {

using namespace std::chrono_literals;

constexpr auto kBriefly = 20ms;  // long enough for a call that takes no lock to return
constexpr auto kLimit = 60s;

struct Call {
  const char* name;
  std::function<void()> make;
};

// Whether `call`, made by another thread, waits until this thread releases the lock.
bool waits_for_lock(const Call& call, shard::Model& model) {
  std::promise<void> started;
  shard::Locked lock = model.lock();
  auto made = std::async(std::launch::async, [&] {
    started.set_value();
    call.make();
  });
  started.get_future().wait();
  const bool waits = made.wait_for(kBriefly) == std::future_status::timeout;
  lock.unlock();
  EXPECT_EQ(made.wait_for(kLimit), std::future_status::ready) << call.name;
  made.get();
  return waits;
}

struct LockedModel {
  Mlp model = seeded();
  Sharded sharded =
      fully_shard(model, {.wrap = wrap::modules<nn::Linear>(), .device = test_device()});
  AdamW optimizer{sharded};

  static Mlp seeded() {
    torch::manual_seed(kSeed);
    return Mlp();
  }
  void backward() {
    model->forward(at::ones({2, model->width}, test_device())).square().mean().backward();
  }
  void expect_waits(const std::vector<Call>& calls) {
    for (const Call& call : calls)
      EXPECT_TRUE(waits_for_lock(call, *shard::model_of(sharded))) << call.name;
  }
};

TEST(Locks, CallsOnTheModelWait) {
  LockedModel subject;
  const Sharded& sharded = subject.sharded;
  std::optional<NoSync> no_sync;
  subject.expect_waits({
      {"no_sync", [&] { no_sync.emplace(sharded.no_sync()); }},
      {"~NoSync", [&] { no_sync.reset(); }},
      {"set_requires_gradient_sync", [&] { sharded.set_requires_gradient_sync(true); }},
      {"set_gradient_divide_factor", [&] { sharded.set_gradient_divide_factor(0); }},
      {"set_reduce_hook", [&] { sharded.set_reduce_hook({}); }},
      {"units", [&] { sharded.units(); }},
      {"unit", [&] { sharded.unit("root"); }},
      {"record_events", [&] { sharded.record_events(false); }},
      {"events", [&] { sharded.events(); }},
      {"traffic", [&] { sharded.traffic(); }},
      {"reset_traffic", [&] { sharded.reset_traffic(); }},
      {"measure_exposed", [&] { sharded.measure_exposed(false); }},
      {"memory", [&] { sharded.memory(); }},
      {"describe", [&] { sharded.describe(); }},
      {"shard_of", [&] { sharded.shard_of("layers.0.weight"); }},
      {"shards", [&] { sharded.shards(); }},
      {"is_sharded", [&] { is_sharded(subject.model); }},
      {"unit_of", [&] { unit_of(subject.model); }},
      {"zero_grad", [&] { sharded.zero_grad(); }},
      {"parameters", [&] { sharded.parameters(); }},
  });
}

TEST(Locks, CallsOnAUnitWait) {
  LockedModel subject;
  const Unit unit = unit_of(subject.model->layer(0)), next = unit_of(subject.model->layer(1));
  subject.expect_waits({
      {"is_unsharded", [&] { unit.is_unsharded(); }},
      {"unshard", [&] { unit.unshard(); }},
      {"reshard", [&] { unit.reshard(); }},
      {"set_reshard_after_forward", [&] { unit.set_reshard_after_forward(true); }},
      {"forward prefetch", [&] { unit.set_modules_to_forward_prefetch({next}); }},
      {"backward prefetch", [&] { unit.set_modules_to_backward_prefetch({next}); }},
  });
}

TEST(Locks, CallsOnOptimizersWait) {
  LockedModel subject;
  Optimizer& optimizer = subject.optimizer;
  GradScaler scaler;
  subject.backward();
  subject.expect_waits({
      {"unscale_", [&] { scaler.unscale_(optimizer); }},
      {"clip_grad_norm_", [&] { subject.sharded.clip_grad_norm_(1.0); }},
      {"step", [&] { optimizer.step(); }},
      {"step_in_backward", [&] { optimizer.step_in_backward(); }},
      {"zero_grad", [&] { optimizer.zero_grad(); }},
      {"lr", [&] { optimizer.lr(); }},
      {"set_lr", [&] { optimizer.set_lr(1e-4); }},
      {"set_weight_decay", [&] { optimizer.set_weight_decay(0.1, 0); }},
      {"set_capturable", [&] { optimizer.set_capturable(false); }},
      {"state_bytes", [&] { optimizer.state_bytes(); }},
      {"an optimizer's constructor", [&] { SGD another(subject.sharded); }},
  });
}

}  // namespace
}  // namespace fsdp::testing
