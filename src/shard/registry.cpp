#include "shard/registry.h"

#include <atomic>
#include <mutex>

#include "shard/model.h"

namespace fsdp::shard::registry {
namespace {

struct Known {
  std::mutex mutex;
  std::vector<std::pair<const Model*, std::weak_ptr<Model>>> models;
  std::atomic<int> count{0};
};

Known& known() {
  static Known* all = new Known;  // models may die after static destructors
  return *all;
}

}  // namespace

void add(const std::shared_ptr<Model>& model) {
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

}  // namespace fsdp::shard::registry
