#include "shard/unit.h"

#include <algorithm>

#include "base/format.h"
#include "shard/model.h"
#include "shard/offload.h"

namespace fsdp::shard {

int64_t Unit::numel() const {
  int64_t total = 0;
  for (const auto& flat : flats) total += flat->layout().full_numel() - flat->layout().padding();
  return total;
}

int64_t Unit::full_bytes() const {
  int64_t total = 0;
  for (const auto& flat : flats) total += aligned_bytes(flat->full_bytes());
  return total;
}

bool Unit::needs_slot() const {
  if (flats.empty()) return false;
  if (flats.front()->host && flats.front()->host->parameters) return true;
  if (group->shard_size == 1) return coded_bytes() > 0;
  return !flats.front()->window.defined();
}

int64_t Unit::coded_bytes() const {
  int64_t total = 0;
  for (const auto& flat : flats)
    if (flat->gather_wire() != Wire::PLAIN)
      total += group->shard_size * flat->gather_message_bytes();
  return total;
}

at::Tensor Unit::full_view(const Flat& flat, const at::Tensor& bytes) const {
  int64_t at = 0;
  for (const auto& other : flats) {
    if (other.get() == &flat) break;
    at += aligned_bytes(other->full_bytes());
  }
  return bytes.narrow(0, at, flat.full_bytes()).view(flat.param_dtype());
}

bool Unit::viewed() const {
  return std::any_of(flats.begin(), flats.end(), [](const auto& flat) { return flat->viewed(); });
}

std::string Unit::label(const char* by) const {
  return by && *by ? formatted("unit \"{}\" ({})", name, by) : formatted("unit \"{}\"", name);
}

std::chrono::milliseconds Unit::timeout() const {
  const auto model = owner.lock();
  return model ? model->world().timeout() : std::chrono::minutes(5);
}

std::shared_ptr<Model> Unit::require_owner(const char* hint) const {
  auto model = owner.lock();
  if (!model) throw Error(label() + ": its sharded model is gone.", hint);
  return model;
}

std::vector<Flat*> flats_of(const std::vector<std::shared_ptr<Unit>>& units) {
  std::vector<Flat*> all;
  for (const auto& unit : units)
    for (const auto& flat : unit->flats) all.push_back(flat.get());
  return all;
}

void Unit::apply_reshard_after_forward() {
  keep_parts = parts_kept(reshard_after_forward);
  // A rank can keep a part only of what it has used, and all ranks must keep the same.
  if (uneven && keep_parts > 1) keep_parts = 0;
  if (keep_parts > 1 && needs_slot()) group->neighbours(keep_parts);
  if (!root && keep_parts != 1 && !pinned) own.reset();
  for (const auto& flat : flats) {  // kept for another number of parts
    flat->secondary.reset();
    flat->secondary_valid = false;
  }
}

}  // namespace fsdp::shard
