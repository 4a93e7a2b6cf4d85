#include "shard/unit.h"

#include <algorithm>

#include "shard/model.h"
#include "shard/offload.h"

namespace fsdp {
namespace {

[[noreturn]] void refuse_parts(int parts) {
  throw Error("reshard_after_forward = " + std::to_string(parts) + " isn't a number of parts.",
              "pass true to reshard after forward, false to keep the parameters until backward, or "
              "n >= 2 to keep 1/n of a unit on each rank.");
}

}  // namespace

ReshardAfterForward::ReshardAfterForward(int parts) : keep_parts(parts) {
  if (parts < 1) refuse_parts(parts);
}

namespace shard {

const Communicator& Group::neighbours(int parts) {
  for (const auto& [known, comm] : neighbours_)
    if (known == parts) return comm;
  std::vector<int> row = mesh.ranks("shard"), ranks;
  int first = shard_rank / parts * parts;
  for (int i = 0; i < parts; ++i) ranks.push_back(row[first + i]);
  std::string name = "group" + std::to_string(number) + ".neighbours." + std::to_string(parts) +
                     "@" + std::to_string(ranks[0]);
  neighbours_.emplace_back(parts, mesh.world().communicator(ranks, name));
  return neighbours_.back().second;
}

int parts_kept(const ReshardAfterForward& choice, bool keeps, const Group& group) {
  int parts = choice.keep_parts.value_or(keeps ? 1 : 0);
  if (parts < 0) refuse_parts(parts);
  if (parts <= 1) return parts;
  if (group.shard_size % parts != 0)
    throw Error("reshard_after_forward = " + std::to_string(parts) + " on a mesh with " +
                    group.text + ": it must divide the number of ranks that share a unit.",
                "choose a divisor of " + std::to_string(group.shard_size) + ", or true or false.");
  return parts == group.shard_size ? 0 : parts;
}

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
  if (group->shard_size == 1) return false;
  return !flats.front()->window.defined();
}

bool Unit::viewed() const {
  return std::any_of(flats.begin(), flats.end(), [](const auto& flat) { return flat->viewed(); });
}

std::string Unit::label(const char* by) const {
  std::string text = "unit \"" + name + "\"";
  return by && *by ? text + " (" + by + ")" : text;
}

std::chrono::milliseconds Unit::timeout() const {
  const auto model = owner.lock();
  return model ? model->world().timeout() : std::chrono::minutes(5);
}

std::shared_ptr<Model> Unit::require_owner(const char* hint) const {
  auto model = owner.lock();
  if (!model) throw Error("unit \"" + name + "\": its sharded model is gone.", hint);
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

}  // namespace shard
}  // namespace fsdp
