#include "shard/registry.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>

#include "base/mutex.h"
#include "shard/background.h"
#include "shard/engine.h"
#include "shard/interrupted.h"
#include "shard/model.h"
#include "shard/runtime.h"

namespace fsdp::shard::registry {
namespace {

auto& known() {
  return runtime().models;
}

// Whether anything but the model itself refers to its parameters.
bool in_use(Model& model) {
  for (Flat* flat : model.lock()->flats())
    for (const Parameter& p : flat->parameters())
      if (p.handle.use_count() > 1) return true;
  return false;
}

std::vector<std::shared_ptr<Model>> parked_models() {
  Lock lock(known().mutex);
  return known().parked;
}

// Destroys those that `done` selects. Neither runs under the registry's lock: both take the
// model's.
template <typename Done>
void end_parked(Done done) {
  std::vector<std::shared_ptr<Model>> ended = parked_models();
  std::erase_if(ended, [&](const auto& model) { return !done(*model); });
  Lock lock(known().mutex);
  std::erase_if(known().parked, [&](const auto& model) {
    return std::find(ended.begin(), ended.end(), model) != ended.end();
  });
}

// Those whose module has gone meanwhile.
void end_unused() {
  end_parked([](Model& model) { return !in_use(model); });
}

// A world, and therefore its models, must be left before the process ends. This needs a new thread:
// the exiting thread has already destroyed its thread-locals, CUDA's current streams among them.
void leave_at_exit() {
  auto parked = parked_models();
  end_parked([](Model&) { return true; });
  if (parked.empty()) return;
  auto leave = [&] {
    for (auto& model : parked) {
      std::optional<c10::DeviceGuard> guard;
      try {
        guard.emplace(model->device());
      } catch (const std::exception&) {  // the device is lost
      }
      model.reset();
    }
  };
  try {
    std::thread(leave).join();  // Ends: as the destructors do
  } catch (const std::system_error&) {
    leave();
  }
}

// Runs before the exit handlers of the model's device and backend, which were registered earlier.
void leave_at_exit_with(const Model& model) FSDP_REQUIRES(known().mutex) {
  if (known().leave_at_exit.insert(model.device().str() + " " + model.world().backend()).second)
    std::atexit(leave_at_exit);
}

}  // namespace

void park(std::shared_ptr<Model> model) {
  {
    Locked engine = model->lock();
    auto background = std::move(engine->background);
    engine.unlock();
    background.reset();  // waits for its work to end
    engine.lock();
    if (model->successor()) return;
    // These would keep the module alive.
    engine->tree.reset();
    for (const auto& unit : engine->units) unit->modules.clear();
    if (!in_use(*model)) return;
  }
  Lock lock(known().mutex);
  leave_at_exit_with(*model);
  known().parked.push_back(std::move(model));
}

void unpark(const Model* model) {
  end_parked([&](Model& other) { return &other == model; });
}

void add(const std::shared_ptr<Model>& model) {
  end_unused();
  Lock lock(known().mutex);
  known().all.emplace_back(model.get(), model);
  ++known().count;
}

void remove(const Model* model) {
  Lock lock(known().mutex);
  known().count -= static_cast<int>(
      std::erase_if(known().all, [&](const auto& entry) { return entry.first == model; }));
}

bool empty() {
  return known().count.load(std::memory_order_relaxed) == 0;
}

std::vector<std::shared_ptr<Model>> models() {
  Lock lock(known().mutex);
  std::vector<std::shared_ptr<Model>> alive;
  for (const auto& [pointer, model] : known().all)
    if (auto held = model.lock()) alive.push_back(std::move(held));
  return alive;
}

std::vector<std::shared_ptr<Model>> models_with_modules() {
  auto found = models();
  const auto parked = parked_models();
  std::erase_if(found, [&](const std::shared_ptr<Model>& model) {
    return std::find(parked.begin(), parked.end(), model) != parked.end() && !in_use(*model);
  });
  return found;
}

}  // namespace fsdp::shard::registry

// The next backward on this thread finds the rest of the one before and drops it. Models that were
// parked because of what that held can go then.
void fsdp::shard::drop_interrupted_backward() {
  struct Nothing : torch::autograd::Node {
    torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
  };
  at::Tensor none = at::zeros({});
  torch::autograd::create_gradient_edge(none, std::make_shared<Nothing>());
  none.backward();
  registry::end_unused();
}
