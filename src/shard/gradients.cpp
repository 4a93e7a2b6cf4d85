#include "shard/gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
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

void Model::begin_backward(const GradientsToCome& coming) {
  std::lock_guard lock(mutex);
  for (const auto& unit : units) check_handles(*unit, "backward");
  forget_cleared_gradients();
  settle_factor();
  in_backward_ = true;
  expect_gradients(coming);
  agree_on_use();
  order_reductions();
  prepare_gradient_slots();
  for (Flat* flat : flats()) {
    // Otherwise autograd would add to the stand-in.
    for (const Parameter& p : flat->parameters())
      if (flat->is_stand_in(p.handle.grad())) p.handle.mutable_grad() = at::Tensor();
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
    if (may_leave(*unit) || (unit->uneven && !unit->pinned)) {
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
  if (std::any_of(units.begin(), units.end(), [](const auto& unit) { return unit->uneven; }))
    throw Error("rank " + std::to_string(world.rank()) +
                    ": zero_weight_step() can't repeat a step of units that only some ranks use.",
                "run forward and backward on a sample and scale its loss by 0.");
  begin_backward({});
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
