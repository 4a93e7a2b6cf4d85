#include "shard/registry.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <thread>

#include "shard/model.h"

namespace fsdp::shard::registry {
namespace {

struct Known {
  std::mutex mutex;
  std::vector<std::pair<const Model*, std::weak_ptr<Model>>> models;
  std::vector<std::shared_ptr<Model>> parked;
  std::atomic<int> count{0};
};

Known& known() {
  static Known* all = new Known;  // models may be destroyed after static destructors
  return *all;
}

// Whether anything but the model itself refers to its parameters.
bool in_use(const Model& model) {
  for (Flat* flat : model.flats())
    for (const Parameter& p : flat->parameters())
      if (p.handle.use_count() > 1) return true;
  return false;
}

// Removes and returns those that `done` selects. The caller destroys them, without the lock.
template <typename Done>
std::vector<std::shared_ptr<Model>> take_parked(Done done) {
  std::lock_guard lock(known().mutex);
  std::vector<std::shared_ptr<Model>> taken;
  std::erase_if(known().parked, [&](std::shared_ptr<Model>& model) {
    bool leaves = done(*model);
    if (leaves) taken.push_back(std::move(model));
    return leaves;
  });
  return taken;
}

// A world, and therefore its models, must be left before the process ends. This needs a new thread:
// the exiting thread has already destroyed its thread-locals, CUDA's current streams among them.
void leave_at_exit() {
  auto parked = take_parked([](const Model&) { return true; });
  if (parked.empty()) return;
  auto leave = [&] {
    for (auto& model : parked) {
      std::optional<c10::DeviceGuard> guard;
      try {
        guard.emplace(model->device);
      } catch (const std::exception&) {  // the device is lost
      }
      model.reset();
    }
  };
  try {
    std::thread(leave).join();
  } catch (const std::system_error&) {
    leave();
  }
}

// Runs before the exit handlers of the model's device and backend, which were registered earlier.
void leave_at_exit_with(const Model& model) {
  static auto* known_to = new std::set<std::string>;  // guarded by known().mutex
  if (known_to->insert(model.device.str() + " " + model.world.backend()).second)
    std::atexit(leave_at_exit);
}

}  // namespace

void park(std::shared_ptr<Model> model) {
  {
    std::unique_lock lock(model->mutex);
    auto background = std::move(model->background);
    lock.unlock();
    background.reset();  // waits for its work to end
    lock.lock();
    if (model->successor) return;
    // These would keep the module alive.
    model->tree.reset();
    for (const auto& unit : model->units) unit->modules.clear();
    if (!in_use(*model)) return;
  }
  std::lock_guard lock(known().mutex);
  leave_at_exit_with(*model);
  known().parked.push_back(std::move(model));
}

void unpark(const Model* model) {
  take_parked([&](const Model& other) { return &other == model; });
}

void add(const std::shared_ptr<Model>& model) {
  take_parked([](const Model& other) { return !in_use(other); });
  std::lock_guard lock(known().mutex);
  known().models.emplace_back(model.get(), model);
  ++known().count;
}

void remove(const Model* model) {
  std::lock_guard lock(known().mutex);
  known().count -= static_cast<int>(
      std::erase_if(known().models, [&](const auto& entry) { return entry.first == model; }));
}

bool empty() {
  return known().count.load(std::memory_order_relaxed) == 0;
}

std::vector<std::shared_ptr<Model>> models() {
  std::lock_guard lock(known().mutex);
  std::vector<std::shared_ptr<Model>> alive;
  for (const auto& [pointer, model] : known().models)
    if (auto held = model.lock()) alive.push_back(std::move(held));
  return alive;
}

std::vector<std::shared_ptr<Model>> models_with_modules() {
  auto found = models();
  std::lock_guard lock(known().mutex);
  std::erase_if(found, [](const std::shared_ptr<Model>& model) {
    const auto& parked = known().parked;
    return std::find(parked.begin(), parked.end(), model) != parked.end() && !in_use(*model);
  });
  return found;
}

}  // namespace fsdp::shard::registry
