#include "shard/unit.h"

#include <algorithm>

#include "shard/offload.h"

namespace fsdp::shard {
namespace {

constexpr int64_t kFlatAlign = 256;

}  // namespace

const Communicator& Group::neighbours(int parts) {
  for (const auto& [known, comm] : neighbours_)
    if (known == parts) return comm;
  if (parts < 2 || shard_size % parts != 0)
    throw Error("reshard_after_forward = " + std::to_string(parts) + " on a mesh with " + text +
                    ": it must divide the number of ranks that share a unit.",
                "choose a divisor of " + std::to_string(shard_size) + ", or true or false.");
  std::vector<int> row = mesh.ranks("shard"), ranks;
  int first = shard_rank / parts * parts;
  for (int i = 0; i < parts; ++i) ranks.push_back(row[first + i]);
  std::string name = "group" + std::to_string(number) + ".neighbours." + std::to_string(parts) +
                     "@" + std::to_string(ranks[0]);
  neighbours_.emplace_back(parts, mesh.world().communicator(ranks, name));
  return neighbours_.back().second;
}

int64_t Unit::numel() const {
  int64_t total = 0;
  for (const auto& flat : flats) total += flat->layout().full_numel() - flat->layout().padding();
  return total;
}

int64_t Unit::full_bytes() const {
  int64_t total = 0;
  for (const auto& flat : flats)
    total += (flat->full_bytes() + kFlatAlign - 1) / kFlatAlign * kFlatAlign;
  return total;
}

bool Unit::needs_slot() const {
  if (flats.empty()) return false;
  if (flats.front()->home && flats.front()->home->parameters) return true;
  if (group->shard_size == 1) return false;
  return !flats.front()->window.defined();
}

bool Unit::pinned() const {
  return std::any_of(flats.begin(), flats.end(), [](const auto& flat) { return flat->pinned(); });
}

std::string Unit::label(const char* by) const {
  std::string text = "unit \"" + name + "\"";
  return by && *by ? text + " (" + by + ")" : text;
}

}  // namespace fsdp::shard
