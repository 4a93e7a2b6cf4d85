// Where full gradients wait for their reduction.
#include <ATen/ops/empty.h>

#include <algorithm>

#include "shard/dry_run.h"
#include "shard/model.h"
#include "shard/profile.h"

namespace fsdp::shard {
namespace {

const Communicator& reducer(const Group& group) {
  return group.shard_size > 1 ? group.reduce : group.replicate;
}

// Whether the ranks read each other's gradients in place. Allocating such memory is collective, so
// it happens only where all ranks pass: at the beginning of a backward, and in a reduction.
bool reads_in_place(const Flat& flat) {
  const Communicator& comm = reducer(*flat.unit().group);
  return comm && comm.size() > 1 && !has_streams(flat.device()) && comm.backend_name() == "shm";
}

int64_t slot_bytes(const Flat& flat) {
  return flat.layout().full_numel() * element_bytes(flat.slot_dtype());
}

}  // namespace

GradientSlot* Model::make_gradient_slot(const Flat& flat, bool ring, bool shared) {
  const Group& group = *flat.unit().group;
  int64_t bytes = slot_bytes(flat);
  if (ring)
    for (const Flat* other : flats())
      if (!other->unit().root && other->unit().group.get() == &group && other->trainable())
        bytes = std::max(bytes, slot_bytes(*other));
  auto slot = std::make_unique<GradientSlot>();
  slot->bytes =
      shared ? communicate([&] { return reducer(group).reduce_buffer(bytes, at::kByte, device); })
             : at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  slot->ring = ring;
  slot->shared = shared;
  slot->group = &group;
  gradient_slots_.push_back(std::move(slot));
  return gradient_slots_.back().get();
}

// Shared memory for as many flats as fill at the same time: those of one unit, and the root's.
void Model::prepare_gradient_slots() {
  const bool any = std::any_of(units.begin(), units.end(),
                               [](const auto& unit) { return unit->takes_part; });
  if (!sync_gradients || !any) return;
  for (const auto& unit : units) {
    size_t wanted = 0;
    for (const auto& flat : unit->flats) {
      if (!flat->trainable() || !reads_in_place(*flat) || stays(*flat)) continue;
      if (unit->root) {
        if (!own_gradient_slots_.contains(flat.get()))
          own_gradient_slots_[flat.get()] = make_gradient_slot(*flat, false, true);
        continue;
      }
      ++wanted;
      size_t have = std::count_if(
          gradient_slots_.begin(), gradient_slots_.end(), [&](const auto& slot) {
            return slot->ring && slot->shared && slot->group == unit->group.get() &&
                   slot->bytes.numel() >= slot_bytes(*flat);
          });
      if (have < wanted) make_gradient_slot(*flat, true, true);
    }
  }
}

GradientSlot* Model::find_ring_slot(const Flat& flat, bool shared_only) {
  GradientSlot* found = nullptr;
  for (const auto& slot : gradient_slots_) {
    if (!slot->ring || slot->taken || slot->group != flat.unit().group.get() ||
        slot->bytes.numel() < slot_bytes(flat) || (shared_only && !slot->shared))
      continue;
    const bool better = !found || (slot->shared && !found->shared) ||
                        (slot->shared == found->shared && slot->last_use < found->last_use);
    if (better) found = slot.get();
  }
  return found;
}

void Model::take_gradient_slot(Flat& flat) {
  // Without a reduction, gradients are written directly to their final place.
  if (stays(flat)) {
    flat.take(flat.own_slot());
    return show_memory();
  }
  GradientSlot* slot = nullptr;
  // The root's gradients arrive throughout backward; accumulated ones outlive it.
  if (flat.unit().root || !sync_gradients) {
    GradientSlot*& own = own_gradient_slots_[&flat];
    if (!own) own = make_gradient_slot(flat, false, false);
    slot = own;
  } else if (auto known = own_gradient_slots_.find(&flat); known != own_gradient_slots_.end()) {
    slot = known->second;
  } else {
    slot = find_ring_slot(flat, /*shared_only=*/false);
    const auto count = std::count_if(gradient_slots_.begin(), gradient_slots_.end(),
                                     [](const auto& s) { return s->ring; });
    bool in_use = slot && (slot->free_after.recorded() || dry_run::as_gpu());
    if (!slot || (static_cast<size_t>(count) < kGradientSlots && in_use))
      slot = make_gradient_slot(flat, true, false);
  }
  exposed_wait(*this, slot->free_after, /*backward=*/true);
  slot->taken = true;
  slot->last_use = ++uses_;
  flat.take(slot);
  bring_gradient(flat);
  show_memory();
}

// Moves a gradient to shared memory for its reduction. Flats whose turn comes later make room.
void Model::share_gradient(Flat& flat) {
  if (flat.slot->shared || !reads_in_place(flat)) return;
  auto move = [](Flat& moved, GradientSlot* to) {
    moved.slot->taken = false;
    to->taken = true;
    moved.move(to);
  };
  GradientSlot* slot = find_ring_slot(flat, /*shared_only=*/true);
  for (Flat* other : flats()) {
    if (slot) break;
    GradientSlot* theirs = other == &flat ? nullptr : other->slot;
    if (!theirs || !theirs->ring || !theirs->shared || theirs->group != flat.unit().group.get() ||
        theirs->bytes.numel() < slot_bytes(flat))
      continue;
    move(*other, make_gradient_slot(*other, true, false));
    slot = theirs;
  }
  // The first of this group on every rank: none of its units' uses was seen.
  if (!slot) slot = make_gradient_slot(flat, true, true);
  move(flat, slot);
}

}  // namespace fsdp::shard
