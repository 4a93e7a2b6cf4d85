#include "shard/gradients.h"

#include <ATen/SequenceNumber.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "base/log.h"
#include "kernels/ops.h"
#include "shard/dry_run.h"
#include "shard/model.h"
#include "shard/offload.h"
#include "shard/profile.h"
#include "shard/saved_activations.h"

namespace fsdp::shard {
namespace {

class Arrival : public torch::autograd::PostAccumulateGradHook {
 public:
  Arrival(const std::shared_ptr<Unit>& unit, size_t flat, size_t parameter,
          std::unique_ptr<PostAccumulateGradHook> users)
      : unit_(unit), flat_(flat), parameter_(parameter), users_(std::move(users)) {}

  void operator()(const torch::autograd::Variable& variable) override {
    if (users_) (*users_)(variable);
    auto unit = unit_.lock();
    if (unit && unit->model) unit->model->gradient_arrived(*unit->flats[flat_], parameter_);
  }

 private:
  std::weak_ptr<Unit> unit_;
  size_t flat_, parameter_;
  std::unique_ptr<PostAccumulateGradHook> users_;
};

at::Tensor make_gradient_memory(const Flat& flat) {
  int64_t numel = flat.layout().shard_numel();
  if (gradient_on_host(flat))
    return host_zeros(numel, flat.grad_dtype(), flat.device(), flat.host->pinned);
  return at::empty({numel}, at::TensorOptions().device(flat.device()).dtype(flat.grad_dtype()));
}

}  // namespace

void watch_gradient(const std::shared_ptr<Unit>& unit, size_t flat, size_t parameter) {
  const at::Tensor& handle = unit->flats[flat]->parameters()[parameter].handle;
  auto users = std::move(torch::autograd::impl::post_acc_grad_hooks(handle));
  unit->flats[flat]->hooked[parameter] = users != nullptr;
  torch::autograd::impl::set_post_acc_grad_hooks(
      handle, std::make_unique<Arrival>(unit, flat, parameter, std::move(users)));
}

void change_gradient(Flat& flat) {
  if (!flat.host) return;
  if (flat.host->stepped)
    throw Error("unit \"" + flat.unit().name +
                    "\": its gradient was already used by an update in backward.",
                "call step_in_backward() only if nothing clips, scales or changes gradients before "
                "step().");
  flat.await_gradient();
  flat.host->square_valid = false;
}

// --- the beginning and end of a backward ---

// A handle whose .grad is no longer the stand-in (or a leaf without a gradient) was cleared since
// the last backward by a zero_grad() that isn't ours.
void Model::forget_cleared_gradients() {
  Unseen unseen;
  for (Flat* flat : flats()) {
    if (!flat->grad.defined()) continue;
    bool kept = false;
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      const Parameter& p = flat->parameters()[i];
      if (!p.handle.requires_grad()) continue;
      const bool cleared_leaf = i < flat->leaves.size() && flat->leaves[i].defined() &&
                                !flat->leaves[i].grad().defined();
      if (flat->is_stand_in(p.handle.grad()) && !cleared_leaf) {
        kept = true;
      } else {
        change_gradient(*flat);
        flat->part_of(i, flat->grad).zero_();
      }
    }
    if (!kept) flat->grad.reset();
  }
}

void Model::begin_backward() {
  std::lock_guard lock(mutex);
  for (const auto& unit : units) check_handles(*unit, "backward");
  forget_cleared_gradients();
  settle_factor();
  in_backward_ = true;
  agree_on_use();
  order_reductions();
  prepare_gradient_slots();
  for (Flat* flat : flats()) {
    // Otherwise autograd would add to the stand-in.
    for (const Parameter& p : flat->parameters())
      if (flat->is_stand_in(p.handle.grad())) p.handle.mutable_grad() = at::Tensor();
    std::fill(flat->arrived.begin(), flat->arrived.end(), 0);
  }
  show_memory();
}

void Model::end_backward(bool failed) {
  std::lock_guard lock(mutex);
  Unseen unseen;
  if (failed) {
    drop_gradients();
  } else if (sync_gradients) {
    for (; next_turn_ < turns_.size(); ++next_turn_) take_turn(*turns_[next_turn_]);
    for (Flat* flat : turns_)
      if (flat->slot) reduce(*flat);  // gradients that came after their turn
  }
  finish_reductions();
  show_memory();
  for (Flat* flat : flats()) {
    flat->expect_none();
    if (flat->handed_out()) flat->await_gradient();  // its owner may read it at any time
    flat->show_gradients();
    if (!flat->grad.defined()) continue;
    for (size_t i = 0; i < flat->parameters().size(); ++i)
      if (flat->parameters()[i].handle.requires_grad())
        flat->parameters()[i].handle.mutable_grad() = flat->stand_in(i);
  }
  for (const auto& unit : units)
    // All ranks must agree on whether an uneven unit is gathered, so views don't keep it.
    if (may_leave(*unit) || unit->uneven) {
      // An in-place write found now must not hide the failure that ended the backward.
      try {
        reshard(*unit);
      } catch (const Error&) {
        if (!failed) throw;
      }
    }
  order_.cut();
  family_ = nullptr;
  pass_over_ = true;
  in_backward_ = false;
  writer_known_ = false;
  if (!calls_.empty()) last_calls_ = std::exchange(calls_, {});
}

void Model::drop_gradients() {
  if (keeps_gradients) return;
  for (const auto& unit : units)
    if (stepped_early(*unit)) {
      log::warn("unit \"" + unit->name +
                "\": a backward failed after step_in_backward() had updated the unit. Load a "
                "checkpoint.");
      break;
    }
  end_early_updates();
  for (Flat* flat : flats()) {
    for (const Parameter& p : flat->parameters()) p.handle.mutable_grad() = at::Tensor();
    const bool brought = flat->host && std::exchange(flat->host->brought, false);
    if (brought || (flat->in_own_slot() && flat->grad.defined())) {
      log::warn("unit \"" + flat->unit().name +
                "\": a backward failed while it was adding to the gradients of earlier backwards; "
                "all of them are dropped.");
      flat->grad.reset();
    }
    if (flat->slot) give_back(*flat);
    flat->expect_none();
  }
}

void Model::show_memory() {
  if (!profiler) return;
  MemoryReport now = memory();
  now.activations = saved_activations::held();
  profiler->see(now);
}

// --- one gradient ---

// Every replay of a recorded step would add to these gradients, even after they are freed.
void Model::refuse_if_kept(const Flat& flat) const {
  if (!keeps_gradients) return;
  throw Error("unit \"" + flat.unit().name +
                  "\": a step that is being recorded as a CUDA graph adds to gradients its model "
                  "already had.",
              "call zero_grad() on that model's optimizer before the step.");
}

void Model::gradient_arrived(Flat& flat, size_t parameter) {
  std::lock_guard lock(mutex);
  Unseen unseen;
  refuse_if_kept(flat);
  at::Tensor handle = flat.parameters()[parameter].handle;
  at::Tensor gradient = handle.grad();
  handle.mutable_grad() = at::Tensor();
  if (flat.is_stand_in(gradient)) return;
  if (gradient.defined()) {
    if (!flat.slot) take_gradient_slot(flat);
    if (gradient.is_sparse()) gradient = gradient.to_dense();
    const at::Tensor& target = flat.gradient_view(parameter);
    if (flat.filled[parameter]) {
      target.add_(gradient);
    } else {
      target.copy_(gradient);
      flat.filled[parameter] = 1;
    }
  }
  if (flat.expected[parameter] == 0) complete(flat, parameter);
}

// --- the order of reductions ---
//
// Reductions are collective, so all ranks issue them in one order: units by their first use in
// forward, reversed; uneven units before the even unit around them. A flat is reduced when its turn
// has come and all its gradients are here. A rank may lack some (an expert got no token); they count
// as zero. That none of them is still to come is known by the numbers autograd gives the nodes of a
// graph: it creates them in rising and runs them in falling order.

void Model::note_use(Unit& unit) {
  if (std::exchange(pass_over_, false)) {
    used_.clear();
    ++pass_;
  }
  if (std::exchange(unit.last_pass, pass_) == pass_) return;
  used_.push_back(&unit);
  unit.first_node = at::sequence_number::peek();  // the next one's
}

// Finds out which uneven units some rank has used in this pass.
void Model::agree_on_use() {
  takes_part_.clear();
  if (!sync_gradients ||
      std::none_of(units.begin(), units.end(), [](const auto& unit) { return unit->uneven; }))
    return;
  Unseen unseen;
  at::Tensor mine = at::zeros({static_cast<int64_t>(units.size())}, at::kByte);
  uint8_t* used = mine.mutable_data_ptr<uint8_t>();
  for (const Unit* unit : used_) used[unit->id] = 1;
  for (const Flat* flat : flats())
    if (flat->slot) used[flat->unit().id] = 1;  // by an earlier backward under no_sync()
  at::Tensor all = mine.to(device);
  communicate([&] {
    return world.comm().all_reduce(all, ReduceOp::MAX, {.label = "units in use (uneven_use)"});
  });
  mine = all.cpu();
  used = mine.mutable_data_ptr<uint8_t>();
  takes_part_.assign(used, used + units.size());
}

void Model::order_reductions() {
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
    for (const auto& unit : units) add(unit.get());
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
    for (auto inner = (*unit)->brood.rbegin(); inner != (*unit)->brood.rend(); ++inner)
      add(**inner);
    add(**unit);
  }
}

bool Model::is_complete(const Flat& flat) const {
  for (size_t i = 0; i < flat.parameters().size(); ++i)
    if (!flat.arrived[i] && flat.parameters()[i].handle.requires_grad()) return false;
  return true;
}

// Whether no gradient of the flat is still to come: autograd runs node `now`, and `completed` (or
// null) has just got its last gradient.
bool Model::is_done(const Flat& flat, uint64_t now, const Unit* completed) const {
  if (is_complete(flat) && (flat.slot || !flat.trainable())) return true;
  const Unit& unit = flat.unit();
  if (unit.last_pass == pass_) return unit.first_node > now;
  if (!unit.uneven) return !flat.slot;
  return unit.parent == completed || unit.parent->last_pass != pass_ ||
         unit.parent->first_node > now;
}

void Model::take_turn(Flat& flat) {
  const bool used_elsewhere =
      !takes_part_.empty() && takes_part_[flat.unit().id] && flat.trainable();
  if (!flat.slot && used_elsewhere) take_gradient_slot(flat);  // reduce() fills it with zeros
  if (flat.slot) reduce(flat);
}

void Model::reduce_until(uint64_t now, const Unit* completed) {
  for (; next_turn_ < turns_.size(); ++next_turn_) {
    if (!is_done(*turns_[next_turn_], now, completed)) return;
    take_turn(*turns_[next_turn_]);
  }
}

// Before a gather in backward: other ranks may wait in a reduction for this one.
void Model::reduce_before_gather() {
  if (!sync_gradients || next_turn_ == turns_.size()) return;
  if (const auto node = torch::autograd::get_current_node())
    reduce_until(node->sequence_nr(), nullptr);
}

// All gradients of the parameter have arrived.
void Model::complete(Flat& flat, size_t parameter) {
  flat.arrived[parameter] = 1;
  if (!sync_gradients || !is_complete(flat)) return;
  const Unit& unit = flat.unit();
  const bool whole = std::all_of(unit.flats.begin(), unit.flats.end(),
                                 [&](const auto& other) { return is_complete(*other); });
  if (whole && unit.last_pass == pass_)
    reduce_until(unit.first_node, &unit);
  else
    reduce_until(std::numeric_limits<uint64_t>::max(), nullptr);
  if (flat.slot && flat.turn < next_turn_) reduce(flat);  // after its turn
}

// --- gradients our own layers write (src/nn) ---

Place Model::open_gradient(Flat& flat, size_t parameter) {
  std::lock_guard lock(mutex);
  Unseen unseen;
  refuse_if_kept(flat);
  if (!flat.slot) take_gradient_slot(flat);
  return {flat.gradient_view(parameter), flat.filled[parameter] != 0};
}

void Model::close_gradient(Flat& flat, size_t parameter) {
  std::lock_guard lock(mutex);
  Unseen unseen;
  flat.filled[parameter] = 1;
  if (flat.expected[parameter] > 0) --flat.expected[parameter];
  if (flat.expected[parameter] == 0) complete(flat, parameter);
}

namespace {

const Communicator& reducer(const Group& group) {
  return group.shard_size > 1 ? group.reduce : group.replicate;
}

// Whether the ranks read each other's gradients in place. Allocating such memory is collective, so
// it happens only where all ranks come by: at the beginning of a backward, and in a reduction.
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
  if (!sync_gradients || used_.empty()) return;
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

void Model::give_back(Flat& flat) {
  flat.slot->taken = false;
  flat.slot = nullptr;
  std::fill(flat.filled.begin(), flat.filled.end(), 0);
}

// --- reduction ---

// Whether a gradient is final as written: no other rank adds to it, and no hook, divisor or offload
// handles it on its way.
bool Model::stays(const Flat& flat) const {
  return flat.alone() && !reduce_hook && divide_factor <= 0 && !gradient_on_host(flat);
}

// Where a reduced gradient waits for its copy to the host: in the slot, which is reserved until
// then anyway, and not in memory the allocator would have to hold back as long.
at::Tensor Model::leaving_part(Flat& flat) {
  GradientSlot& slot = *flat.slot;
  if (!slot.part.defined())
    slot.part = at::empty({slot.bytes.numel() / flat.unit().group->shard_size},
                          slot.bytes.options().device(device));
  int64_t numel = flat.layout().shard_numel();
  return slot.part.narrow(0, 0, numel * element_bytes(flat.reduce_dtype()))
      .view(flat.reduce_dtype());
}

void Model::reduce(Flat& flat) {
  Unit& unit = flat.unit();
  Group& group = *unit.group;
  for (size_t i = 0; i < flat.parameters().size(); ++i)
    if (!flat.filled[i]) flat.gradient_view(i).zero_();
  if (flat.in_own_slot()) {
    log_event(Event::kReduceIssued, unit, true);
    flat.grad = flat.grad_memory;
    flat.slot = nullptr;
    log_event(Event::kReduced, unit, true);
    return;
  }
  share_gradient(flat);
  // With shared memory this is the first collective, so ranks that took different branches meet
  // here; the label names the operator.
  std::string what = "gradients";
  if (*unit.touched_by) what.append(" of ").append(unit.touched_by);
  std::string label = unit.label(what.c_str());
  CallOptions call{.label = label, .identity = unit.id + 1};
  ReduceOp op = divide_factor > 0 ? ReduceOp::SUM : ReduceOp::AVG;
  const at::Tensor& full = flat.slot_view();
  calls_.push_back({&unit, &flat});
  log_event(Event::kReduceIssued, unit, true);

  before_.record(device);
  OnStream on(reduce_stream_);
  before_.wait(device);
  Profiled profiled(*this, Profiler::kReduce, unit, /*backward=*/true);
  bool fresh = !flat.grad.defined();
  flat.await_update();  // it may still read the memory written here
  if (!flat.grad_memory.defined()) flat.grad_memory = make_gradient_memory(flat);
  at::Tensor reduced = full;
  if (group.shard_size > 1) {
    bool direct = fresh && flat.reduce_dtype() == flat.grad_dtype();
    reduced = gradient_on_host(flat) ? leaving_part(flat)
              : direct               ? flat.grad_memory
                                     : at::empty({flat.layout().shard_numel()}, full.options());
    communicate([&] { return group.reduce.reduce_scatter(reduced, full, op, call); });
    traffic.reduce_scatter += reduced.nbytes() * (group.shard_size - 1);
  }
  std::optional<OnStream> beside;
  if (group.replicate_size > 1) {
    scattered_.record(device);
    beside.emplace(replicate_stream_);
    scattered_.wait(device);
    if (has_streams(device)) reduced.record_stream(current_stream(device));
    communicate([&] { return group.replicate.all_reduce(reduced, op, call); });
    traffic.all_reduce += 2 * reduced.nbytes() * (group.replicate_size - 1) / group.replicate_size;
  }
  accumulate(flat, reduced);
  (beside ? replicated_ : reduced_).record(device);
  std::optional<OnStream> away;
  if (gradient_on_host(flat)) away.emplace(leave_stream_);
  flat.slot->free_after.record(device);
  away.reset();
  profiled.done({beside ? &replicated_ : &reduced_, &flat.slot->free_after});
  give_back(flat);
  log_event(Event::kReduced, unit, true);
  if (early_update && updated_on_host(flat)) step_early(flat);
}

// Runs on the stream of the reduction.
void Model::accumulate(Flat& flat, at::Tensor reduced) {
  if (reduce_hook) reduce_hook(reduced, flat.unit().name);
  if (divide_factor > 0) reduced.div_(divide_factor);
  if (gradient_on_host(flat)) return send_gradient_to_host(flat, reduced);
  if (flat.grad.defined()) {
    flat.grad.add_(reduced);
    return;
  }
  if (!reduced.is_same(flat.grad_memory)) flat.grad_memory.copy_(reduced);
  flat.grad = flat.grad_memory;
}

void Model::finish_reductions() {
  exposed_wait(*this, reduced_, /*backward=*/true);
  exposed_wait(*this, replicated_, /*backward=*/true);
  exposed_wait(*this, summed_, /*backward=*/true);
}

void Model::zero_gradients(bool set_to_none) {
  std::lock_guard lock(mutex);
  Unseen unseen;
  factor.reset();
  end_early_updates();
  for (Flat* flat : flats()) {
    if (flat->slot) give_back(*flat);
    if (flat->host) flat->host->brought = false;
    if (set_to_none) {
      flat->grad.reset();
      for (const Parameter& p : flat->parameters()) p.handle.mutable_grad() = at::Tensor();
      // On a GPU forward can use the memory. On the CPU its pages would have to be faulted in
      // again.
      if (dry_run::like_gpu(device)) flat->release_gradient_memory();
    } else if (flat->grad.defined()) {
      change_gradient(*flat);
      flat->grad.zero_();
    }
    flat->show_gradients();
  }
  if (set_to_none && dry_run::like_gpu(device)) {  // backward waited for every reduction
    left_.wait(device);
    own_gradient_slots_.clear();
    gradient_slots_.clear();
  }
}

void Model::settle_factor() {
  if (!factor.defined()) return;
  Unseen unseen;
  for (Flat* flat : flats()) {
    if (!flat->grad.defined()) continue;
    change_gradient(*flat);
    at::Tensor here = factor.to(flat->grad.device());
    if (c10::elementSize(flat->grad.scalar_type()) > 2)
      flat->grad.mul_(here.to(flat->grad.scalar_type()));
    else  // without rounding the factor
      kernels::scale_into(flat->grad, flat->grad, here, /*accumulate=*/false);
  }
  factor.reset();
}

void Model::zero_weight_step() {
  std::lock_guard lock(mutex);
  if (last_calls_.empty() && std::any_of(units.begin(), units.end(), [](const auto& unit) {
        return unit->group->shard_size * unit->group->replicate_size > 1;
      }))
    throw Error("rank " + std::to_string(world.rank()) +
                    ": zero_weight_step() repeats the communication of the step before, and there "
                    "was none.",
                "take at least one step with data on every rank first.");
  begin_backward();
  try {
    Unseen unseen;
    std::vector<Call> calls = last_calls_;
    if (stale_readers_) synchronize_readers("zero_weight_step");
    for (const Call& call : calls) {
      if (call.flat) {
        take_gradient_slot(*call.flat);
        reduce(*call.flat);
      } else {
        reshard(*call.unit);
        issue(*call.unit, "zero_weight_step");
      }
    }
  } catch (...) {
    end_backward(/*failed=*/true);
    throw;
  }
  end_backward(/*failed=*/false);
}

}  // namespace fsdp::shard
