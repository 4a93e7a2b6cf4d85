// Where full gradients wait for their reduction.
#include <ATen/ops/empty.h>

#include <algorithm>

#include "fsdp/shard_info.h"
#include "shard/comm_context.h"
#include "shard/dry_run.h"
#include "shard/gradient_reducer.h"
#include "shard/offload.h"
#include "shard/profile.h"
#include "shard/unit.h"

namespace fsdp::shard {
namespace {

const Communicator& reducer(const Group& group) {
  return group.shard_size > 1 ? group.reduce : group.replicate;
}

int64_t slot_bytes(const Flat& flat) {
  return flat.layout().full_numel() * element_bytes(flat.slot_dtype());
}

// Whether a ring slot suits a flat. The few parameters of a unit that travel as they are have slots
// of their own, which are small.
bool suits(const GradientSlot& slot, const Flat& flat) {
  return slot.ring && slot.group == flat.unit().group.get() && slot.coded == flat.coded() &&
         slot.bytes.numel() >= slot_bytes(flat);
}

// Whether the ranks read each other's gradients in place. Allocating such memory is collective, so
// it happens only where all ranks pass: at the beginning of a backward, and in a reduction.
bool reads_in_place(const Flat& flat) {
  const Communicator& comm = reducer(*flat.unit().group);
  const bool coded = flat.reduce_wire() != Wire::PLAIN && flat.unit().group->shard_size > 1;
  return comm && !coded && comm.size() > 1 && !has_streams(flat.device()) &&
         comm.backend_name() == "shm";
}

}  // namespace

GradientSlot* GradientReducer::make_slot(const Flat& flat, bool ring, bool shared) {
  const Group& group = *flat.unit().group;
  const at::Device device = comm_.device();
  int64_t bytes = slot_bytes(flat);
  if (ring)
    for (const Flat* other : flats_of(units_))
      if (!other->unit().root && other->unit().group.get() == &group && other->trainable() &&
          other->coded() == flat.coded())
        bytes = std::max(bytes, slot_bytes(*other));
  auto slot = std::make_unique<GradientSlot>();
  slot->bytes =
      shared ? comm_.run([&] { return reducer(group).reduce_buffer(bytes, at::kByte, device); })
             : at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  slot->ring = ring;
  slot->coded = flat.coded();
  slot->shared = shared;
  slot->group = &group;
  slots_.push_back(std::move(slot));
  return slots_.back().get();
}

// Shared memory for as many flats as fill at the same time: those of one unit, and the root's.
void GradientReducer::prepare_slots() {
  const bool any =
      std::any_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->takes_part; });
  if (!sync_ || !any) return;
  make_messages();
  for (const auto& unit : units_) {
    size_t wanted = 0;
    for (const auto& flat : unit->flats) {
      if (!flat->trainable() || !reads_in_place(*flat) || stays(*flat)) continue;
      if (unit->root) {
        if (!own_slots_.contains(flat.get()))
          own_slots_[flat.get()] = make_slot(*flat, false, true);
        continue;
      }
      ++wanted;
      size_t have = std::count_if(slots_.begin(), slots_.end(), [&](const auto& slot) {
        return slot->shared && suits(*slot, *flat);
      });
      if (have < wanted) make_slot(*flat, true, true);
    }
  }
}

GradientSlot* GradientReducer::find_ring_slot(const Flat& flat, bool shared_only) {
  GradientSlot* found = nullptr;
  for (const auto& slot : slots_) {
    if (slot->taken || !suits(*slot, flat) || (shared_only && !slot->shared)) continue;
    if (slot->shared && !reads_in_place(flat)) continue;
    const bool better = !found || (slot->shared && !found->shared) ||
                        (slot->shared == found->shared && slot->last_use < found->last_use);
    if (better) found = slot.get();
  }
  return found;
}

void GradientReducer::take_slot(Flat& flat) {
  // Without a reduction, gradients are written directly to their final place.
  if (stays(flat)) {
    flat.take(flat.own_slot());
    return comm_.show_memory();
  }
  GradientSlot* slot = nullptr;
  // The root's gradients arrive throughout backward; accumulated ones outlive it.
  if (flat.unit().root || !sync_) {
    GradientSlot*& own = own_slots_[&flat];
    if (!own) own = make_slot(flat, false, false);
    slot = own;
  } else if (auto known = own_slots_.find(&flat); known != own_slots_.end()) {
    slot = known->second;
  } else {
    slot = find_ring_slot(flat, /*shared_only=*/false);
    const auto count = std::count_if(slots_.begin(), slots_.end(), [&](const auto& s) {
      return s->ring && s->coded == flat.coded();
    });
    bool in_use = slot && (slot->free_after.recorded() || dry_run::as_gpu());
    if (!slot || (static_cast<size_t>(count) < kGradientSlots && in_use))
      slot = make_slot(flat, true, false);
  }
  exposed_wait(comm_, slot->free_after, /*backward=*/true);
  slot->taken = true;
  slot->last_use = ++slot_uses_;
  flat.take(slot);
  const bool adds_directly = flat.alone() && !hook_ && divide_factor_ <= 0;
  if (adds_directly && gradient_on_host(flat) && flat.grad.defined()) offload_.bring_gradient(flat);
  comm_.show_memory();
}

// Moves a gradient to shared memory for its reduction. Flats whose turn comes later make room.
void GradientReducer::share_slot(Flat& flat) {
  if (flat.slot->shared || !reads_in_place(flat)) return;
  auto move = [](Flat& moved, GradientSlot* to) {
    moved.slot->taken = false;
    to->taken = true;
    moved.move(to);
  };
  GradientSlot* slot = find_ring_slot(flat, /*shared_only=*/true);
  for (Flat* other : flats_of(units_)) {
    if (slot) break;
    GradientSlot* theirs = other == &flat ? nullptr : other->slot;
    if (!theirs || !theirs->shared || !suits(*theirs, flat)) continue;
    move(*other, make_slot(*other, true, false));
    slot = theirs;
  }
  // The first of this group on every rank: none of its units' uses was seen.
  if (!slot) slot = make_slot(flat, true, true);
  move(flat, slot);
}

void GradientReducer::release_slot(Flat& flat) {
  flat.slot->taken = false;
  flat.slot = nullptr;
  std::fill(flat.filled.begin(), flat.filled.end(), 0);
}

void GradientReducer::add_memory(MemoryReport& report) const {
  auto bytes = [](const GradientSlot& slot) {
    return static_cast<int64_t>(slot.bytes.nbytes() +
                                (slot.part.defined() ? slot.part.nbytes() : 0));
  };
  for (const at::Tensor* messages : {&sent_, &received_})
    if (messages->defined()) report.reduce_buffers += static_cast<int64_t>(messages->nbytes());
  for (const auto& slot : slots_)
    if (slot->ring) report.reduce_buffers += bytes(*slot);
  for (const auto& [flat, slot] : own_slots_) {
    if (!slot) continue;  // being created
    (flat->unit().root ? report.reduce_buffers : report.accumulated) += bytes(*slot);
  }
}

}  // namespace fsdp::shard
