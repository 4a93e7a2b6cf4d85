#include "shard/order.h"

#include <algorithm>

#include "shard/unit.h"

namespace fsdp::shard {

void Order::note(Unit* unit, bool backward) {
  if (place_.unit) next_[place_] = {unit, backward};
  place_ = {place_.unit, unit, backward};
}

std::vector<Unit*> Order::next(int depth) const {
  std::vector<Unit*> units;
  Position at = place_;
  // Repeated units count once, so look a few places further.
  for (int i = 0; i < depth + 2 && static_cast<int>(units.size()) < depth; ++i) {
    auto known = next_.find(at);
    if (known == next_.end()) break;
    auto [unit, backward] = known->second;
    if (unit != place_.unit && std::find(units.begin(), units.end(), unit) == units.end())
      units.push_back(unit);
    at = {at.unit, unit, backward};
  }
  return units;
}

void Order::cut() {
  place_ = {};
}

}  // namespace fsdp::shard
