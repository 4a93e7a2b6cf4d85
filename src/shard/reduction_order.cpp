// The order of reductions.
//
// Reductions are collective, so all ranks issue them in one order: units by their first use in
// forward, reversed; uneven units before the even unit around them. A flat is reduced when its turn
// has come and every gradient that this backward will bring is here. Those it won't bring (an
// expert got no token) count as zero.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "shard/comm_context.h"
#include "shard/gradient_reducer.h"
#include "shard/unit.h"

namespace fsdp::shard {
namespace {

// Whether every gradient that this backward brings is here.
bool is_complete(const Flat& flat) {
  for (size_t i = 0; i < flat.parameters().size(); ++i)
    if (flat.coming[i] && !flat.arrived[i]) return false;
  return true;
}

// An uneven unit that others use waits until this rank has gathered its family: they do that first.
bool is_done(const Flat& flat) {
  const Unit& unit = flat.unit();
  if (!is_complete(flat)) return false;
  if (unit.reached || !unit.takes_part) return true;
  const auto& around = unit.parent->flats;
  return unit.parent->family_used ||
         (unit.parent->reached && std::all_of(around.begin(), around.end(), [](const auto& other) {
            return is_complete(*other);
          }));
}

}  // namespace

void GradientReducer::note_use(Unit& unit) {
  if (std::exchange(pass_over_, false)) {
    used_.clear();
    ++pass_;
  }
  if (std::exchange(unit.last_pass, pass_) != pass_) used_.push_back(&unit);
}

void GradientReducer::expect(const GradientsToCome& coming) {
  for (const auto& unit : units_) {
    unit->reached = unit->family_used = false;
    for (const auto& flat : unit->flats) {
      unit->reached |= flat->slot != nullptr;  // by an earlier backward under no_sync()
      for (size_t i = 0; i < flat->parameters().size(); ++i) {
        flat->coming[i] = coming.contains(flat->parameters()[i].handle.unsafeGetTensorImpl());
        unit->reached |= flat->coming[i] != 0;
      }
      std::fill(flat->arrived.begin(), flat->arrived.end(), 0);
    }
  }
}

// Units that this backward reaches on some rank take part on every rank. Only uneven ones differ.
void GradientReducer::agree_on_use() {
  const bool any_uneven =
      std::any_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->uneven; });
  const bool any_even = std::any_of(units_.begin(), units_.end(), [](const auto& unit) {
    return !unit->uneven && unit->reached;
  });
  for (const auto& unit : units_) unit->takes_part = unit->reached;
  // Every rank's training reaches some even unit. A backward that doesn't isn't the model's.
  if (!sync_ || !any_uneven || !any_even) return;
  if (comm_.device().is_meta()) {
    for (const auto& unit : units_) unit->takes_part = true;
    return;
  }
  Unseen unseen;
  at::Tensor mine = at::zeros({static_cast<int64_t>(units_.size())}, at::kByte);
  uint8_t* used = mine.mutable_data_ptr<uint8_t>();
  for (const auto& unit : units_) used[unit->id] = unit->reached;
  at::Tensor all = mine.to(comm_.device());
  comm_.run([&] {
    return comm_.world().comm().all_reduce(all, ReduceOp::MAX,
                                           {.label = "units in use (uneven_use)"});
  });
  mine = all.cpu();
  used = mine.mutable_data_ptr<uint8_t>();
  for (const auto& unit : units_) unit->takes_part = used[unit->id] != 0;
}

void GradientReducer::order_reductions() {
  // A unit whose use wasn't seen (it is pinned) keeps its place of an earlier pass.
  auto place = sequence_.begin();
  for (Unit* unit : used_)
    if (!unit->uneven && place != sequence_.end()) place = std::find(place, sequence_.end(), unit);
  if (place == sequence_.end()) {
    std::vector<Unit*> now;
    auto add = [&](Unit* unit) {
      if (!unit->uneven && std::find(now.begin(), now.end(), unit) == now.end())
        now.push_back(unit);
    };
    for (Unit* unit : used_) add(unit);
    for (Unit* unit : sequence_) add(unit);
    for (const auto& unit : units_) add(unit.get());
    sequence_ = std::move(now);
  }
  turns_.clear();
  next_turn_ = 0;
  auto add = [&](const Unit& unit) {
    for (const auto& flat : unit.flats) {
      flat->turn = turns_.size();
      turns_.push_back(flat.get());
    }
  };
  for (auto unit = sequence_.rbegin(); unit != sequence_.rend(); ++unit) {
    for (auto inner = (*unit)->uneven_units.rbegin(); inner != (*unit)->uneven_units.rend();
         ++inner)
      add(**inner);
    add(**unit);
  }
}

void GradientReducer::take_turn(Flat& flat) {
  if (!flat.slot && flat.unit().takes_part && flat.trainable()) take_slot(flat);
  if (flat.slot) reduce(flat);
}

void GradientReducer::reduce_what_is_done() {
  if (!sync_) return;
  for (; next_turn_ < turns_.size() && is_done(*turns_[next_turn_]); ++next_turn_)
    take_turn(*turns_[next_turn_]);
}

void GradientReducer::repeat(Flat& flat) {
  take_slot(flat);
  reduce(flat);
}

// All gradients of the parameter have arrived.
void GradientReducer::complete(Flat& flat, size_t parameter) {
  flat.arrived[parameter] = 1;
  if (!sync_ || !is_complete(flat)) return;
  reduce_what_is_done();
  if (flat.slot && flat.turn < next_turn_) reduce(flat);  // after its turn
}

}  // namespace fsdp::shard
