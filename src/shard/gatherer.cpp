#include "shard/gatherer.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <set>
#include <utility>

#include "base/format.h"
#include "base/log.h"
#include "base/rank_status.h"
#include "base/table.h"
#include "fsdp/fully_shard.h"
#include "kernels/wire.h"
#include "shard/comm_context.h"
#include "shard/masters.h"
#include "shard/offload.h"
#include "shard/profile.h"
#include "shard/tensor_access.h"

namespace fsdp::shard {
namespace {

struct Busy {  // keeps the unit from being resharded, which its own prefetches could cause
  explicit Busy(Unit& used) : unit(used) { ++unit.busy; }
  ~Busy() { --unit.busy; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;
  Unit& unit;
};

// Whether a unit that needs no slot has an out-of-date copy on the device.
bool waits_for_copy(const Unit& unit) {
  return std::any_of(unit.flats.begin(), unit.flats.end(), [](const auto& flat) {
    return flat->host && flat->host->resident.defined() && flat->host->stale;
  });
}

std::unique_ptr<Slot> make_slot(at::Device device, int64_t bytes, bool ring) {
  auto slot = std::make_unique<Slot>();
  slot->bytes = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  slot->ring = ring;
  // Unfinished work on the current stream may still read or write this memory.
  slot->free_after.record(device);
  return slot;
}

void require_values(const Unit& unit, const char* by) {
  if (unit.meta)
    throw Error(formatted("unit \"{}\" has no values yet ({} reads it).", unit.name, by),
                "call sharded.materialize(device), or load a checkpoint or state dict, first.");
}

}  // namespace

Gatherer::Gatherer(CommContext& comm, HostOffload& offload, Masters& masters,
                   const ShardOptions& options, const std::vector<std::shared_ptr<Unit>>& units)
    : comm_(comm), offload_(offload), masters_(masters), options_(options), units_(units) {}

// --- gathering ---

void Gatherer::ensure(Unit& unit, const char* by, bool backward) {
  rank_status::set_unit(unit.name, by);
  unit.last_use = ++uses_;
  if (!backward) unit.touched_by = by;
  // Every rank pins a pinned unit, so it needs no family.
  if (!unit.pinned && (unit.uneven || !unit.uneven_units.empty()))
    return ensure_family(unit, by, backward);
  if (unit.state == Unit::State::kReady) {
    if (order_.last() == &unit) return;
    // It was gathered already, but the next units may still have to be prefetched.
    Unseen unseen;
    Busy busy(unit);
    order_.note(&unit, backward);
    return prefetch(unit, backward);
  }
  require_values(unit, by);
  Unseen unseen;
  check_handles(unit, by);
  Busy busy(unit);
  meet_stale_readers(by);
  issue(unit, by);
  finish(unit);
  comm_.log(Event::kReady, unit, backward);
  order_.note(&unit, backward);
  prefetch(unit, backward);
}

// An even unit and the uneven units inside it are gathered together by every rank, whichever of
// them it uses, until another family is used. Order sees only the even unit, because each rank's
// uses would teach it something different.
void Gatherer::ensure_family(Unit& unit, const char* by, bool backward) {
  Unit& head = unit.uneven ? *unit.parent : unit;
  std::vector<Unit*> members = {&head};
  members.insert(members.end(), head.uneven_units.begin(), head.uneven_units.end());
  for (const Unit* member : members) require_values(*member, by);
  Unseen unseen;
  std::deque<Busy> busy;
  for (Unit* member : members) busy.emplace_back(*member);
  if (family_ && family_ != &head)
    for (Unit* other : family_->uneven_units)
      if (!other->pinned) reshard(*other);
  family_ = &head;
  meet_stale_readers(by);
  for (Unit* member : members) {
    if (member->state == Unit::State::kReady) continue;
    check_handles(*member, by);
    issue(*member, by);
  }
  for (Unit* member : {&head, &unit}) {
    if (member->state == Unit::State::kReady) continue;
    finish(*member);
    comm_.log(Event::kReady, *member, backward);
  }
  if (order_.last() != &head) {
    order_.note(&head, backward);
    prefetch(head, backward);
  }
}

void Gatherer::issue(Unit& unit, const char* by) {
  if (unit.state != Unit::State::kSharded) return;
  if (in_backward_ && stepped_early(unit)) {
    if (!by) return;
    throw Error(formatted("unit \"{}\" is used by {} in a backward that has already updated it.",
                          unit.name, by),
                "don't call step_in_backward(): this unit is used again after its gradients have "
                "arrived.");
  }
  for (const auto& flat : unit.flats) flat->await_update();
  if (masters_.watched()) masters_.follow(unit, by ? by : "prefetch");
  if (unit.needs_slot()) {
    Slot* slot = find_slot(unit, by != nullptr);
    if (!slot) return;  // no room for this prefetch
    start(unit, *slot, by);
  } else if (masters_.watched() && unit.group->shares_memory && unit.group->shard_size > 1) {
    comm_.note_gather(unit);  // the ranks met in Masters::follow
  } else if (waits_for_copy(unit)) {
    OnStream on(comm_.gather_stream());
    comm_.await_shards();
    for (const auto& flat : unit.flats)
      if (shard_on_host(*flat)) offload_.bring_shard(*flat, {});
    unit.gathered.record(comm_.device());
  }
  unit.state = Unit::State::kGathering;
  comm_.log(Event::kGatherIssued, unit, in_backward_, /*ahead=*/by == nullptr);
}

// Starts the gather of a unit into the slot.
void Gatherer::start(Unit& unit, Slot& slot, const char* by) {
  const at::Device device = comm_.device();
  const std::string label = unit.label(by ? by : "prefetch");
  const bool async = !has_streams(device) && !device.is_meta();
  const CallOptions call{.async = async, .label = label, .identity = unit.id + 1};
  OnStream on(comm_.gather_stream());
  slot.free_after.wait(device);
  comm_.await_shards();
  Profiled profiled(comm_, Profiler::kGather, unit, in_backward_);
  const bool from_neighbours = unit.keep_parts > 1 && !unit.writable &&
                               std::all_of(unit.flats.begin(), unit.flats.end(),
                                           [](const auto& flat) { return flat->secondary_valid; });
  const Communicator& comm =
      from_neighbours ? unit.group->neighbours(unit.keep_parts) : unit.group->gather;
  for (const auto& flat : unit.flats) {
    at::Tensor full = unit.full_view(*flat, slot.bytes);
    at::Tensor part = from_neighbours        ? flat->secondary
                      : shard_on_host(*flat) ? offload_.bring_shard(*flat, full)
                                             : flat->shard;
    const bool coded = unit.sends_codes(*flat);
    at::Tensor whole = coded ? codes_of(unit, *flat, slot) : full;
    if (coded && !from_neighbours) {
      const int64_t bytes = flat->gather_message_bytes();
      at::Tensor own = whole.narrow(0, unit.group->shard_rank * bytes, bytes);
      kernels::encode_wire(part, own, /*messages=*/1, flat->gather_wire());
      part = own;
    }
    if (unit.group->shard_size > 1) {
      unit.works.push_back(comm_.run([&] { return comm.all_gather(whole, part, call); }));
      comm_.traffic().all_gather += part.nbytes() * (comm.size() - 1);
    } else if (!coded && !part.is_alias_of(full)) {
      full.copy_(part);
    }
    if (coded && !async) decode(unit, *flat, full, slot);
  }
  unit.gathered.record(device);
  profiled.done({&unit.gathered});
  slot.tenant = &unit;
  unit.slot = &slot;
  comm_.note_gather(unit);
}

void Gatherer::issue_ahead(Unit& unit) {
  if (unit.meta) return;
  Unseen unseen;
  meet_stale_readers("unshard");
  issue(unit, "unshard");
}

void Gatherer::finish(Unit& unit) {
  try {
    std::optional<HostWait> wait;
    if (!unit.works.empty()) wait.emplace(comm_, unit, in_backward_);
    for (Work& work : unit.works) comm_.run([&] { work.wait(); });
  } catch (...) {
    unit.works.clear();
    unit.state = Unit::State::kSharded;
    if (unit.slot) unit.slot->tenant = nullptr;
    unit.slot = nullptr;
    throw;
  }
  unit.works.clear();
  exposed_wait(comm_, unit.gathered, in_backward_);
  for (const auto& flat : unit.flats) {
    if (unit.sends_codes(*flat) && comm_.device().is_cpu())
      decode(unit, *flat, unit.full_view(*flat, unit.slot->bytes), *unit.slot);
    at::Tensor full = unit.slot                ? unit.full_view(*flat, unit.slot->bytes)
                      : flat->window.defined() ? flat->window
                      : shard_on_host(*flat)   ? flat->host->resident
                                               : flat->shard;
    flat->point_at(full);
    flat->remember_versions();
    flat->set_keys(unit.keyed_when_ready());
  }
  unit.state = Unit::State::kReady;
}

void Gatherer::prefetch(Unit& unit, bool backward) {
  const auto& by_hand = backward ? unit.backward_next : unit.forward_next;
  int depth = backward ? options_.backward_prefetch : options_.forward_prefetch;
  std::vector<Unit*> next = by_hand.empty() ? order_.next(depth) : by_hand;
  if (!by_hand.empty() && !unit.next_checked) {
    std::vector<Unit*> known = order_.next(static_cast<int>(by_hand.size()));
    if (!known.empty()) {
      unit.next_checked = true;
      if (known.front() != by_hand.front())
        log::warn(
            formatted("unit \"{}\": its prefetch list begins with \"{}\", but \"{}\" was "
                      "used next.",
                      unit.name, by_hand.front()->name, known.front()->name));
    }
  }
  for (Unit* other : next)
    if ((other->needs_slot() || waits_for_copy(*other)) && !other->meta) issue(*other, nullptr);
}

bool Gatherer::may_leave(const Unit& unit) const {
  return unit.busy == 0 && !unit.pinned && unit.state != Unit::State::kSharded && !unit.viewed();
}

// One in use, the prefetched ones, and one the device still computes with while the host is ahead.
// Without prefetch a single slot, for the least memory.
size_t Gatherer::ring_capacity() const {
  size_t ahead = std::max({0, options_.forward_prefetch, options_.backward_prefetch});
  for (const auto& other : units_)
    ahead = std::max({ahead, other->forward_next.size(), other->backward_next.size()});
  return ahead > 0 ? 2 + ahead : 1;
}

Slot* Gatherer::find_slot(Unit& unit, bool may_grow) {
  const int64_t bytes = unit.full_bytes();
  if (unit.root || unit.keep_parts == 1 || unit.pinned || unit.uneven) {
    if (!unit.own) unit.own = make_slot(comm_.device(), bytes, /*ring=*/false);
    return unit.own.get();
  }
  for (const auto& slot : ring_)
    if (!slot->tenant && slot->bytes.numel() >= bytes) return slot.get();
  if (ring_.size() < ring_capacity() || !options_.limit_all_gathers) return add_ring_slot(bytes);
  Slot* oldest = nullptr;
  for (const auto& slot : ring_)
    if (slot->bytes.numel() >= bytes && slot->tenant && may_leave(*slot->tenant) &&
        (!oldest || slot->tenant->last_use < oldest->tenant->last_use))
      oldest = slot.get();
  if (oldest) {
    reshard(*oldest->tenant);
    return oldest;
  }
  if (!may_grow) return nullptr;
  if (!std::exchange(grown_, true))
    log::info(
        formatted("unit \"{}\": all {} buffers for gathered units are in use at once; "
                  "allocating one more of {}.",
                  unit.name, ring_.size(), human_bytes(static_cast<double>(bytes))));
  return add_ring_slot(bytes);
}

// Large enough for every unit that uses the ring.
Slot* Gatherer::add_ring_slot(int64_t bytes) {
  for (const auto& other : units_)
    if (!other->root && other->keep_parts != 1 && other->needs_slot())
      bytes = std::max(bytes, other->full_bytes());
  ring_.push_back(make_slot(comm_.device(), bytes, /*ring=*/true));
  return ring_.back().get();
}

void Gatherer::reshard(Unit& unit) {
  if (unit.state == Unit::State::kSharded) return;
  Unseen unseen;
  Profiled profiled(comm_, Profiler::kReshard, unit, in_backward_);
  bool was_ready = unit.state == Unit::State::kReady;
  for (Work& work : unit.works) work.wait();
  unit.works.clear();
  const bool keeps = was_ready && unit.slot && !in_backward_ && unit.keep_parts > 1;
  if (keeps && !unit.writable) keep_secondary(unit);  // what a user writes isn't gathered
  std::string written;
  bool had_slot = unit.slot != nullptr;
  for (const auto& flat : unit.flats) {
    if (was_ready && !unit.writable && written.empty()) written = flat->written();
    flat->take_away();
    flat->set_keys(true);
  }
  if (unit.slot) {
    unit.gathered.wait(comm_.device());
    unit.slot->free_after.record(comm_.device());
    unit.slot->tenant = nullptr;
    unit.slot = nullptr;
    if (unit.uneven && unit.keep_parts != 1 && !unit.pinned) unit.own.reset();
  }
  unit.state = Unit::State::kSharded;
  profiled.done();
  comm_.log(Event::kResharded, unit, in_backward_);
  if (!written.empty())
    throw Error(formatted("rank {}: unit \"{}\": parameter \"{}\" was written in place while it "
                          "was gathered; the write {}.",
                          comm_.world().rank(), unit.name, written,
                          had_slot ? "is lost" : "is not undone, and no other rank has seen it"),
                "write parameters inside sharded.summon_full_params().");
  check_handles(unit, "reshard");
}

void Gatherer::reshard_all() {
  masters_.refuse_while_summoned("this call, which reshards every unit,");
  for (const auto& unit : units_) reshard(*unit);
}

// set_data can't be noticed when it happens. A parameter it took out of its unit would silently
// train on its own.
void Gatherer::check_handles(const Unit& unit, const char* when) const {
  for (const auto& flat : unit.flats) {
    std::string moved = flat->moved();
    if (moved.empty()) continue;
    throw Error(formatted("rank {}: unit \"{}\": parameter \"{}\" no longer belongs to it (found "
                          "at {}): module->to(), torch::load or set_data replaced its memory.",
                          comm_.world().rank(), unit.name, moved, when),
                "convert and load the module before fully_shard, or use .device, .mixed_precision "
                "and sharded.load_full_state_dict().");
  }
}

at::Tensor Gatherer::gather_shard(Flat& flat, const at::Tensor& given, const char* what) {
  const Group& group = *flat.unit().group;
  at::Tensor shard = given.to(comm_.device());
  if (group.shard_size == 1) return shard;
  std::string label = flat.unit().label(what);
  at::Tensor full;
  before_.record(comm_.device());
  {
    OnStream on(comm_.gather_stream());
    before_.wait(comm_.device());
    full = at::empty({flat.layout().full_numel()}, shard.options());
    group.gather.all_gather(full, shard, {.label = label, .identity = flat.unit().id + 1});
    before_.record(comm_.device());
  }
  before_.wait(comm_.device());
  if (has_streams(comm_.device())) full.record_stream(current_stream(comm_.device()));
  return full;
}

void Gatherer::synchronize_readers(const char* why) {
  std::set<Group*> met;
  std::chrono::nanoseconds before = comm_.traffic().host_time;
  for (const auto& unit : units_)
    if (unit->group->shares_memory && unit->group->shard_size > 1 &&
        met.insert(unit->group.get()).second)
      comm_.run([&] { unit->group->gather.barrier({.label = why}); });
  stale_readers_ = false;
  if (comm_.profiler()) comm_.profiler()->met(comm_.traffic().host_time - before);
}

void Gatherer::changed(Unit& unit) {
  Unseen unseen;
  for (const auto& flat : unit.flats) {
    flat->settle_master();
    flat->bump_versions();
    flat->shard_changed();
  }
  stale_readers_ = true;
  comm_.shards_written();
}

void Gatherer::shards_written() {
  for (Flat* flat : flats_of(units_)) {
    flat->bump_versions();
    flat->shard_changed();
  }
  stale_readers_ = true;
  comm_.shards_written();
  comm_.forget_calls();  // of evaluation since the last backward
}

void Gatherer::pin(Unit& unit, bool writable) {
  if (unit.pinned && (unit.writable || !writable)) return ensure(unit, "unshard", in_backward_);
  if (writable) reshard(unit);  // to gather it again in memory of its own
  unit.pinned = true;
  unit.writable = writable;
  if (writable && !unit.needs_slot() && !unit.flats.empty()) return pin_writable(unit);
  ensure(unit, "unshard", in_backward_);
}

// In private memory: other ranks read the shared memory, and the shard must not lose the master's
// precision.
void Gatherer::pin_writable(Unit& unit) {
  Unseen unseen;
  require_values(unit, "summon_full_params");
  meet_stale_readers("summon_full_params");
  if (masters_.watched()) masters_.follow(unit, "summon_full_params");
  unit.own = make_slot(comm_.device(), unit.full_bytes(), /*ring=*/false);
  unit.own->tenant = &unit;
  unit.slot = unit.own.get();
  for (const auto& flat : unit.flats) {
    flat->settle();
    unit.full_view(*flat, unit.slot->bytes)
        .copy_(flat->window.defined() ? flat->window : flat->shard);
  }
  unit.state = Unit::State::kGathering;
  finish(unit);
}

void Gatherer::unpin(Unit& unit) {
  if (!unit.pinned) return;
  bool temporary = unit.own && !(unit.root || unit.keep_parts == 1);
  unit.pinned = false;
  reshard(unit);
  unit.writable = false;
  if (temporary || !unit.needs_slot()) unit.own.reset();
}

// --- the beginning and end of a backward ---

void Gatherer::begin_backward() {
  for (const auto& unit : units_) check_handles(*unit, "backward");
  in_backward_ = true;
}

void Gatherer::end_backward(bool failed) {
  Unseen unseen;
  std::exception_ptr written;  // must not hide the failure that ended the backward
  for (const auto& unit : units_) {
    // All ranks must agree on whether an uneven unit is gathered, so views don't keep it.
    if (!may_leave(*unit) && (!unit->uneven || unit->pinned)) continue;
    try {
      reshard(*unit);
    } catch (const Error&) {
      if (!written) written = std::current_exception();
    }
  }
  order_.cut();
  family_ = nullptr;
  in_backward_ = false;
  if (written && !failed) std::rethrow_exception(written);
}

// --- reports and captures ---

void Gatherer::add_memory(MemoryReport& report) const {
  const auto bytes_of = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : int64_t{0};
  };
  report.ring = bytes_of(codes_);
  for (const auto& slot : ring_) report.ring += bytes_of(slot->bytes) + bytes_of(slot->codes);
  report.unsharded = report.ring;
  for (const auto& unit : units_)
    if (unit->own) report.unsharded += bytes_of(unit->own->bytes) + bytes_of(unit->own->codes);
}

void Gatherer::forget_events() {
  for (const auto& unit : units_) {
    unit->gathered.forget();
    if (unit->own) unit->own->free_after.forget();
  }
  for (const auto& slot : ring_) slot->free_after.forget();
  before_.forget();
}

void Gatherer::forget_units() {
  order_ = {};
  family_ = nullptr;
}

}  // namespace fsdp::shard
