// Order: predicts the next units. For every pair of units used in a row, in forward or in backward,
// it remembers the unit that followed the last time. A change of order costs at most a useless
// gather and is learned by the next step.
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
  // The next `depth` units after the one noted last, as far as they are known.
  std::vector<Unit*> next(int depth) const;
  // Ends a step: the next unit doesn't follow from the last.
  void cut();

 private:
  struct Position {
    Unit* before = nullptr;
    Unit* unit = nullptr;
    bool backward = false;
    auto operator<=>(const Position&) const = default;
  };
  std::map<Position, std::pair<Unit*, bool>> next_;  // the unit, and whether it is used in backward
  Position place_;
};

}  // namespace fsdp::shard
