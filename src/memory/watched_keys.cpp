// The dispatch key on watched parameters. An operator that reads a parameter with the key goes
// through the engine and the regions, which costs more than launching a small kernel. A region only
// has to see when its module runs again, so while the region is open, only the parameter that
// opened it carries the key.
//
// Where regions start affects memory, not correctness: another thread that runs the same module at
// the same time may miss one.
#include "memory/regions.h"
#include "shard/model.h"
#include "shard/unit.h"

namespace fsdp::memory {
namespace {

// Sets the key of a parameter, if nothing else needs it: it isn't sharded, or it is gathered and no
// operator's inputs are cast.
void set_free_key(const at::Tensor& parameter, bool on) {
  shard::StorageTag* tag = shard::tag_of(parameter);
  if (!tag) return shard::set_key(parameter, on);
  if (tag->kind != shard::StorageTag::kParameters) return;
  shard::Unit& unit = static_cast<shard::Flat*>(tag->owner)->unit();
  const auto model = unit.owner.lock();
  if (!model) return;
  const auto locked = model->lock();
  if (unit.state == shard::Unit::State::kReady && !unit.cast_inputs) shard::set_key(parameter, on);
}

}  // namespace

void see_only(const Chosen& module, const c10::TensorImpl* first) {
  for (const auto& weak : module.parameters) {
    at::Tensor parameter(weak.lock());
    if (!parameter.defined() || parameter.unsafeGetTensorImpl() == first) continue;
    set_free_key(parameter, false);
  }
}

void see_all(const Chosen& module) {
  for (const auto& weak : module.parameters) {
    at::Tensor parameter(weak.lock());
    if (parameter.defined() && is_watched(parameter)) set_free_key(parameter, true);
  }
}

}  // namespace fsdp::memory
