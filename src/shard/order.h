// Order: which unit comes next. Learned from the touches themselves: for two units touched in a
// row, in forward or in backward, what came after them the last time. A change of order is learned
// by the next step and costs a useless gather at most.
#pragma once

#include <map>
#include <utility>
#include <vector>

namespace fsdp::shard {

class Unit;

class Order {
 public:
  void note(Unit* unit, bool backward);
  Unit* last() const { return place_.unit; }
  // The next `depth` units, as far as they are known; the caller's unit was noted last.
  std::vector<Unit*> next(int depth) const;
  // What follows next has nothing to do with what came before (a step has ended).
  void cut();

 private:
  struct Place {
    Unit* before = nullptr;
    Unit* unit = nullptr;
    bool backward = false;
    auto operator<=>(const Place&) const = default;
  };
  std::map<Place, std::pair<Unit*, bool>> next_;  // and whether that one is in backward
  Place place_;
};

}  // namespace fsdp::shard
