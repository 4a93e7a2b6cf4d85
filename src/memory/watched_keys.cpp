// The dispatch key on watched parameters. An operator that reads a parameter with the key goes
// through the engine and the regions, which costs more than launching a small kernel. A region only
// has to see when its module runs again, so while the region is open, only the parameter that
// opened it carries the key.
//
// Where regions start affects memory, not correctness: another thread that runs the same module at
// the same time may miss one.
#include "memory/regions.h"
#include "shard/model.h"

namespace fsdp::memory {
namespace {

// Whether nothing else needs the key on it: it is gathered, and no operator's inputs are cast.
bool may_go(const at::Tensor& parameter, std::unique_lock<std::recursive_mutex>& lock) {
  shard::StorageTag* tag = shard::tag_of(parameter);
  if (!tag) return true;
  if (tag->kind != shard::StorageTag::kParameters) return false;
  shard::Unit& unit = static_cast<shard::Flat*>(tag->owner)->unit();
  if (!unit.model) return false;
  lock = std::unique_lock(unit.model->mutex);
  return unit.state == shard::Unit::State::kReady && !unit.cast_inputs;
}

}  // namespace

void see_only(const Chosen& module, const c10::TensorImpl* first) {
  for (const auto& weak : module.parameters) {
    at::Tensor parameter(weak.lock());
    if (!parameter.defined() || parameter.unsafeGetTensorImpl() == first) continue;
    std::unique_lock<std::recursive_mutex> lock;
    if (may_go(parameter, lock)) shard::set_key(parameter, false);
  }
}

void see_all(const Chosen& module) {
  for (const auto& weak : module.parameters) {
    at::Tensor parameter(weak.lock());
    if (!parameter.defined()) continue;
    std::unique_lock<std::recursive_mutex> lock;
    if (may_go(parameter, lock) && is_watched(parameter)) shard::set_key(parameter, true);
  }
}

}  // namespace fsdp::memory
