#include "shard/model.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <optional>
#include <set>

#include "base/log.h"
#include "base/rank_status.h"
#include "base/table.h"
#include "shard/offload.h"
#include "shard/profile.h"
#include "shard/registry.h"

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

}  // namespace

Model::Model(World joined, at::Device on)
    : world(std::move(joined)),
      device(on),
      gather_stream_(on),
      reduce_stream_(on),
      replicate_stream_(on) {}

Model::~Model() {
  try {  // memory returns to the compute stream, which must first wait for the side streams
    for (const SideStream* side :
         {&gather_stream_, &reduce_stream_, &replicate_stream_, &leave_stream_}) {
      StreamEvent done;
      {
        OnStream on(*side);
        done.record(device);
      }
      done.wait(device);
    }
  } catch (const std::exception&) {  // the device is lost
  }
  for (auto& unit : units)
    if (unit->model == this) unit->model = nullptr;
  registry::remove(this);
}

std::shared_ptr<Model> live(const std::shared_ptr<Model>& model) {
  if (!model)
    throw Error("this handle holds no sharded model.", "use the handle fully_shard returned.");
  std::shared_ptr<Model> last = model;
  while (last->successor) last = last->successor;
  return last;
}

void Model::add(std::shared_ptr<Unit> unit) {
  unit->model = this;
  units.push_back(std::move(unit));
}

void Model::take_over(const std::shared_ptr<Model>& other) {
  std::lock_guard lock(other->mutex);
  other->reshard_all();
  other->finish_reductions();
  for (Flat* flat : other->flats()) {
    flat->settle();
    flat->await_gradient();
  }
  if (offloads(*other)) begin_offload(*this);
  for (auto& unit : other->units) {
    unit->root = false;
    unit->uneven = unit->wants_uneven;
    unit->slot = nullptr;
    unit->apply_reshard_after_forward();  // only a root keeps its parameters by default
    add(unit);
  }
  other->units.clear();
  other->used_.clear();
  other->sequence_.clear();
  other->turns_.clear();
  other->calls_.clear();
  other->last_calls_.clear();
  other->order_ = {};
  other->family_ = nullptr;
  other->successor = shared_from_this();
}

std::vector<Flat*> Model::flats() const {
  std::vector<Flat*> all;
  for (const auto& unit : units)
    for (const auto& flat : unit->flats) all.push_back(flat.get());
  return all;
}

void Model::explain(const Error& error) const {
  const auto says = [&](const char* words) {
    return error.message().find(words) != std::string::npos;
  };
  const bool disagree = says("different calls") || says("no answer in") || says(" left (");
  if (!disagree || options.uneven_use) throw;
  throw Error(error.message(), error.hint() +
                                   " If ranks use different units in a step (experts, stochastic "
                                   "depth), set ShardOptions::uneven_use.");
}

void Model::log_event(Event::Kind kind, const Unit& unit, bool backward, bool ahead) {
  if (recording_events)
    events.push_back({kind, unit.name, backward, ahead, std::chrono::steady_clock::now()});
}

// --- gathering ---

void Model::ensure(Unit& unit, const char* by, bool backward) {
  std::lock_guard lock(mutex);
  rank_status::set_unit(unit.name, by);
  unit.last_use = ++uses_;
  if (!backward) {
    unit.touched_by = by;
    note_use(unit);
  }
  // Every rank pins a pinned unit, so it needs no family.
  if (!unit.pinned && (unit.uneven || !unit.brood.empty()))
    return ensure_family(unit, by, backward);
  if (unit.state == Unit::State::kReady) {
    if (order_.last() == &unit) return;
    // It was gathered already, but the next units may still have to be prefetched.
    Unseen unseen;
    Busy busy(unit);
    order_.note(&unit, backward);
    return prefetch(unit, backward);
  }
  if (unit.meta)
    throw Error("unit \"" + unit.name + "\" has no values yet (" + by + " reads it).",
                "call sharded.materialize(device), or load a checkpoint or state dict, first.");
  Unseen unseen;
  check_handles(unit, by);
  Busy busy(unit);
  if (stale_readers_) synchronize_readers(by);
  issue(unit, by);
  finish(unit);
  log_event(Event::kReady, unit, backward);
  order_.note(&unit, backward);
  prefetch(unit, backward);
}

// An even unit and the uneven units inside it are gathered together by every rank, whichever of them
// it uses, until another family is used. Order, which the ranks' uses would teach differently, sees
// the even unit only.
void Model::ensure_family(Unit& unit, const char* by, bool backward) {
  Unit& head = unit.uneven ? *unit.parent : unit;
  if (!backward) note_use(head);
  std::vector<Unit*> members = {&head};
  members.insert(members.end(), head.brood.begin(), head.brood.end());
  for (const Unit* member : members)
    if (member->meta)
      throw Error("unit \"" + member->name + "\" has no values yet (" + by + " reads it).",
                  "call sharded.materialize(device), or load a checkpoint or state dict, first.");
  Unseen unseen;
  for (Unit* member : members) ++member->busy;
  struct Release {
    std::vector<Unit*>& members;
    ~Release() {
      for (Unit* member : members) --member->busy;
    }
  } release{members};
  if (family_ && family_ != &head)
    for (Unit* other : family_->brood)
      if (!other->pinned) reshard(*other);
  family_ = &head;
  if (stale_readers_) synchronize_readers(by);
  for (Unit* member : members) {
    if (member->state == Unit::State::kReady) continue;
    check_handles(*member, by);
    issue(*member, by);
  }
  for (Unit* member : {&head, &unit}) {
    if (member->state == Unit::State::kReady) continue;
    finish(*member);
    log_event(Event::kReady, *member, backward);
  }
  if (order_.last() != &head) {
    order_.note(&head, backward);
    prefetch(head, backward);
  }
  if (backward && in_backward_ && !std::exchange(head.family_used, true)) reduce_what_is_done();
}

void Model::issue(Unit& unit, const char* by) {
  if (unit.state != Unit::State::kSharded) return;
  if (in_backward_ && stepped_early(unit)) {
    if (!by) return;
    throw Error("unit \"" + unit.name + "\" is used by " + by +
                    " in a backward that has already updated it.",
                "don't call step_in_backward(): this unit is used again after its gradients have "
                "arrived.");
  }
  for (const auto& flat : unit.flats) flat->await_update();
  if (handed == Handed::kOut) follow_masters(unit, by ? by : "prefetch");
  if (unit.needs_slot()) {
    Slot* slot = find_slot(unit, by != nullptr);
    if (!slot) return;  // no room for this prefetch
    int64_t identity = unit.id + 1;
    std::string label = unit.label(by ? by : "prefetch");
    bool async = !has_streams(device) && !device.is_meta();
    CallOptions call{.async = async, .label = label, .identity = identity};
    OnStream on(gather_stream_);
    slot->free_after.wait(device);
    written_.wait(device);
    Profiled profiled(*this, Profiler::kGather, unit, in_backward_);
    bool from_neighbours = unit.keep_parts > 1 && unit.flats.front()->secondary_valid;
    for (const auto& flat : unit.flats) {
      at::Tensor full = full_view(unit, *flat, slot->bytes);
      const Communicator& comm =
          from_neighbours ? unit.group->neighbours(unit.keep_parts) : unit.group->gather;
      at::Tensor part = from_neighbours        ? flat->secondary
                        : shard_on_host(*flat) ? bring(*flat, full)
                                               : flat->shard;
      if (unit.group->shard_size == 1) continue;  // the copy is the whole gather
      unit.works.push_back(communicate([&] { return comm.all_gather(full, part, call); }));
      traffic.all_gather += part.nbytes() * (comm.size() - 1);
    }
    unit.gathered.record(device);
    profiled.done({&unit.gathered});
    slot->tenant = &unit;
    unit.slot = slot;
    calls_.push_back({&unit, nullptr});
  } else if (handed == Handed::kOut && unit.group->shares_memory && unit.group->shard_size > 1) {
    calls_.push_back({&unit, nullptr});  // the ranks met in follow_masters
  } else if (waits_for_copy(unit)) {
    OnStream on(gather_stream_);
    written_.wait(device);
    for (const auto& flat : unit.flats)
      if (shard_on_host(*flat)) bring(*flat, {});
    unit.gathered.record(device);
  }
  unit.state = Unit::State::kGathering;
  log_event(Event::kGatherIssued, unit, in_backward_, /*ahead=*/by == nullptr);
}

void Model::issue_ahead(Unit& unit) {
  if (unit.meta) return;
  Unseen unseen;
  if (stale_readers_) synchronize_readers("unshard");
  issue(unit, "unshard");
}

void Model::finish(Unit& unit) {
  try {
    std::optional<HostWait> wait;
    if (!unit.works.empty()) wait.emplace(*this, unit, in_backward_);
    for (Work& work : unit.works) communicate([&] { work.wait(); });
  } catch (...) {
    unit.works.clear();
    unit.state = Unit::State::kSharded;
    if (unit.slot) unit.slot->tenant = nullptr;
    unit.slot = nullptr;
    throw;
  }
  unit.works.clear();
  exposed_wait(*this, unit.gathered, in_backward_);
  for (const auto& flat : unit.flats) {
    at::Tensor full = unit.slot                ? full_view(unit, *flat, unit.slot->bytes)
                      : flat->window.defined() ? flat->window
                      : shard_on_host(*flat)   ? flat->host->resident
                                               : flat->shard;
    flat->point_at(full);
    flat->remember_versions();
    flat->set_keys(unit.keyed_when_ready());
  }
  unit.state = Unit::State::kReady;
}

at::Tensor Model::full_view(const Unit& unit, const Flat& flat, const at::Tensor& bytes) const {
  int64_t at = 0;
  for (const auto& other : unit.flats) {
    if (other.get() == &flat) break;
    at += (other->full_bytes() + 255) / 256 * 256;
  }
  return bytes.narrow(0, at, flat.full_bytes()).view(flat.param_dtype());
}

void Model::prefetch(Unit& unit, bool backward) {
  const auto& by_hand = backward ? unit.backward_next : unit.forward_next;
  int depth = backward ? options.backward_prefetch : options.forward_prefetch;
  std::vector<Unit*> next = by_hand.empty() ? order_.next(depth) : by_hand;
  if (!by_hand.empty() && !unit.next_checked) {
    std::vector<Unit*> known = order_.next(static_cast<int>(by_hand.size()));
    if (!known.empty()) {
      unit.next_checked = true;
      if (known.front() != by_hand.front())
        log::warn("unit \"" + unit.name + "\": its prefetch list begins with \"" +
                  by_hand.front()->name + "\", but \"" + known.front()->name + "\" was used next.");
    }
  }
  for (Unit* other : next)
    if ((other->needs_slot() || waits_for_copy(*other)) && !other->meta) issue(*other, nullptr);
}

bool Model::may_leave(const Unit& unit) const {
  return unit.busy == 0 && !unit.pinned && unit.state != Unit::State::kSharded && !unit.viewed();
}

Slot* Model::find_slot(Unit& unit, bool may_grow) {
  int64_t bytes = unit.full_bytes();
  if (unit.root || unit.keep_parts == 1 || unit.pinned || unit.uneven) {
    if (!unit.own) unit.own = make_slot(device, bytes, /*ring=*/false);
    return unit.own.get();
  }
  for (const auto& slot : ring_)
    if (!slot->tenant && slot->bytes.numel() >= bytes) return slot.get();
  // One in use, the prefetched ones, and one the device still computes with while the host is
  // ahead. Without prefetch a single slot, for the least memory.
  size_t ahead = std::max({0, options.forward_prefetch, options.backward_prefetch});
  for (const auto& other : units)
    ahead = std::max({ahead, other->forward_next.size(), other->backward_next.size()});
  size_t capacity = ahead > 0 ? 2 + ahead : 1;
  if (ring_.size() >= capacity && options.limit_all_gathers) {
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
    if (!grown_) {
      grown_ = true;
      log::info("unit \"" + unit.name + "\": all " + std::to_string(ring_.size()) +
                " buffers for gathered units are in use at once; allocating one more of " +
                human_bytes(static_cast<double>(bytes)) + ".");
    }
  }
  for (const auto& other : units)
    if (!other->root && other->keep_parts != 1 && other->needs_slot())
      bytes = std::max(bytes, other->full_bytes());
  ring_.push_back(make_slot(device, bytes, /*ring=*/true));
  return ring_.back().get();
}

void Model::reshard(Unit& unit) {
  std::lock_guard lock(mutex);
  if (unit.state == Unit::State::kSharded) return;
  Unseen unseen;
  Profiled profiled(*this, Profiler::kReshard, unit, in_backward_);
  bool was_ready = unit.state == Unit::State::kReady;
  for (Work& work : unit.works) work.wait();
  unit.works.clear();
  if (was_ready && unit.slot && !in_backward_ && unit.keep_parts > 1) keep_secondary(unit);
  std::string written;
  bool had_slot = unit.slot != nullptr;
  for (const auto& flat : unit.flats) {
    if (was_ready && !unit.writable && written.empty()) written = flat->written();
    flat->take_away();
    flat->set_keys(true);
  }
  if (unit.slot) {
    unit.gathered.wait(device);
    unit.slot->free_after.record(device);
    unit.slot->tenant = nullptr;
    unit.slot = nullptr;
    if (unit.uneven && unit.keep_parts != 1 && !unit.pinned) unit.own.reset();
  }
  unit.state = Unit::State::kSharded;
  profiled.done();
  log_event(Event::kResharded, unit, in_backward_);
  if (!written.empty())
    throw Error("rank " + std::to_string(world.rank()) + ": unit \"" + unit.name +
                    "\": parameter \"" + written +
                    "\" was written in place while it was gathered; the write " +
                    (had_slot ? "is lost." : "is not undone, and no other rank has seen it."),
                "write parameters inside sharded.summon_full_params().");
  check_handles(unit, "reshard");
}

void Model::reshard_all() {
  refuse_while_summoned("this call, which reshards every unit,");
  for (const auto& unit : units) reshard(*unit);
}

void Model::keep_secondary(Unit& unit) {
  for (const auto& flat : unit.flats) {
    int64_t numel = flat->layout().full_numel() / unit.keep_parts;
    if (!flat->secondary.defined())
      flat->secondary = at::empty({numel}, flat->shard.options().device(device));
    int64_t place = unit.group->shard_rank % unit.keep_parts;
    flat->secondary.copy_(full_view(unit, *flat, unit.slot->bytes).narrow(0, place * numel, numel));
    flat->secondary_valid = true;
  }
  written_.record(device);
}

// set_data can't be noticed when it happens. A parameter it took out of its unit would silently
// train on its own.
void Model::check_handles(const Unit& unit, const char* when) const {
  for (const auto& flat : unit.flats) {
    std::string moved = flat->moved();
    if (moved.empty()) continue;
    throw Error("rank " + std::to_string(world.rank()) + ": unit \"" + unit.name +
                    "\": parameter \"" + moved + "\" no longer belongs to it (found at " + when +
                    "): module->to(), torch::load or set_data replaced its memory.",
                "convert and load the module before fully_shard, or use .device, .mixed_precision "
                "and sharded.load_full_state_dict().");
  }
}

at::Tensor Model::gather_shard(Flat& flat, const at::Tensor& given, const char* what) {
  const Group& group = *flat.unit().group;
  at::Tensor shard = given.to(device);
  if (group.shard_size == 1) return shard;
  std::string label = flat.unit().label(what);
  at::Tensor full;
  before_.record(device);
  {
    OnStream on(gather_stream_);
    before_.wait(device);
    full = at::empty({flat.layout().full_numel()}, shard.options());
    group.gather.all_gather(full, shard, {.label = label, .identity = flat.unit().id + 1});
    before_.record(device);
  }
  before_.wait(device);
  if (has_streams(device)) full.record_stream(current_stream(device));
  return full;
}

// --- writing ---

void Model::synchronize_readers(const char* why) {
  std::set<Group*> met;
  std::chrono::nanoseconds before = traffic.host_time;
  for (const auto& unit : units)
    if (unit->group->shares_memory && unit->group->shard_size > 1 &&
        met.insert(unit->group.get()).second)
      communicate([&] { unit->group->gather.barrier({.label = why}); });
  stale_readers_ = false;
  if (profiler) profiler->met(traffic.host_time - before);
}

// The owner of handed-out masters may have updated them without notice (torch::optim writes through
// .data()), so the shard is compared with its master before each gather.
void Model::follow_masters(Unit& unit, const char* by) {
  const Group& group = *unit.group;
  bool meet = group.shares_memory && group.shard_size > 1;
  std::string label = unit.label(by);
  CallOptions call{.label = label, .identity = unit.id + 1};
  auto meet_all = [&] { communicate([&] { group.gather.barrier(call); }); };
  if (meet) meet_all();  // no rank reads from here on
  for (const auto& flat : unit.flats) {
    if (!flat->handed_out()) continue;
    flat->settle();
    if (flat->host) flat->host->stale = true;
    if (flat->shard.is_same(flat->master)) continue;
    bool on_host = flat->master.device().is_cpu();
    if (on_host && at::equal(flat->shard, flat->master.to(flat->param_dtype()))) continue;
    flat->shard.copy_(flat->master);
    shard_changed(*flat);
    if (on_host) flat->bump_versions();
  }
  if (meet) meet_all();  // every rank has written
  written_.record(device);
}

void Model::changed(Unit& unit) {
  Unseen unseen;
  for (const auto& flat : unit.flats) {
    flat->settle_master();
    flat->bump_versions();
    shard_changed(*flat);
  }
  stale_readers_ = true;
  written_.record(device);
}

void Model::shards_written() {
  for (Flat* flat : flats()) {
    flat->bump_versions();
    shard_changed(*flat);
  }
  stale_readers_ = true;
  written_.record(device);
  calls_.clear();  // of evaluation since the last backward
}

void Model::pin(Unit& unit, bool writable) {
  std::lock_guard lock(mutex);
  if (unit.pinned && (unit.writable || !writable)) return ensure(unit, "unshard", in_backward_);
  if (writable) reshard(unit);  // to gather it again in memory of its own
  unit.pinned = true;
  unit.writable = writable;
  if (writable && !unit.needs_slot() && !unit.flats.empty()) {
    // In private memory: other ranks read the shared memory, and the shard must not lose the
    // master's precision.
    Unseen unseen;
    if (unit.meta)
      throw Error("unit \"" + unit.name + "\" has no values yet.",
                  "call sharded.materialize(device) first.");
    if (stale_readers_) synchronize_readers("summon_full_params");
    if (handed == Handed::kOut) follow_masters(unit, "summon_full_params");
    unit.own = make_slot(device, unit.full_bytes(), /*ring=*/false);
    unit.own->tenant = &unit;
    unit.slot = unit.own.get();
    for (const auto& flat : unit.flats) {
      flat->settle();
      full_view(unit, *flat, unit.slot->bytes)
          .copy_(flat->window.defined() ? flat->window : flat->shard);
    }
    unit.state = Unit::State::kGathering;
    finish(unit);
    for (const auto& flat : unit.flats) flat->set_keys(unit.keyed_when_ready());
    return;
  }
  ensure(unit, "unshard", in_backward_);
}

void Model::unpin(Unit& unit) {
  std::lock_guard lock(mutex);
  if (!unit.pinned) return;
  bool temporary = unit.own && !(unit.root || unit.keep_parts == 1);
  unit.pinned = false;
  reshard(unit);
  unit.writable = false;
  if (temporary || !unit.needs_slot()) unit.own.reset();
}

}  // namespace fsdp::shard
