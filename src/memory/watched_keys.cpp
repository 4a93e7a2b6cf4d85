// The key on watched parameters. Each operator that reads one with the key passes by the engine and
// the regions, which costs more than a small kernel's launch; and all that a region must see of its
// own module is that it begins anew. So while a module's region is open, only the parameter that it
// began with carries the key.
//
// Where regions begin is a matter of memory and not of right or wrong: another thread that runs the
// same module at the same time may miss one.
#include "memory/regions.h"
#include "shard/model.h"

namespace fsdp::memory {
namespace {

// Whether nobody else needs the key on it: it is whole, and no operator's inputs are cast.
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
