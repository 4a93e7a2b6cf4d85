#include "shard/gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>

#include "base/format.h"
#include "base/log.h"
#include "kernels/ops.h"
#include "shard/comm_context.h"
#include "shard/dry_run.h"
#include "shard/engine.h"
#include "shard/gradient_reducer.h"
#include "shard/model.h"
#include "shard/offload.h"
#include "shard/profile.h"

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
    auto model = unit ? unit->owner.lock() : nullptr;
    if (model) model->lock()->reducer.arrived(*unit->flats[flat_], parameter_);
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
    throw Error(flat.unit().label() + ": its gradient was already used by an update in backward.",
                "call step_in_backward() only if nothing clips, scales or changes gradients before "
                "step().");
  flat.await_gradient();
  flat.host->square_valid = false;
}

void settle_gradients(Engine& model) {
  model.reducer.forget_cleared();
  model.reducer.settle_factor();
}

void scale_gradients(Engine& model, const at::Tensor& factor) {
  model.reducer.set_factor(factor);
  if (!model.masters.apply_factors()) model.reducer.settle_factor();
}

at::Tensor skip_unless_finite(Engine& model, const at::Tensor& loss, const at::Tensor& norm) {
  // 0 × inf is NaN, and an update whose factor is NaN writes nothing.
  at::Tensor factor = model.reducer.take_factor();
  if (!factor.defined()) factor = at::ones_like(norm);
  factor.addcmul_(loss, norm, 0);
  model.reducer.set_factor(factor);
  return factor.ne(factor);
}

// --- the beginning and end of a backward ---

// A handle whose .grad is no longer the stand-in (or a leaf without a gradient) was cleared since
// the last backward by a zero_grad() that isn't ours.
void GradientReducer::forget_cleared() {
  Unseen unseen;
  for (Flat* flat : flats_of(units_)) {
    if (!flat->grad.defined()) continue;
    bool kept = false;
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      const Parameter& p = flat->parameters()[i];
      if (!p.handle.requires_grad()) continue;
      const bool cleared_leaf =
          i < flat->leaves.size() && flat->leaves[i].defined() && !flat->leaves[i].grad().defined();
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

void GradientReducer::begin_backward(const GradientsToCome& coming) {
  forget_cleared();
  settle_factor();
  expect(coming);
  agree_on_use();
  order_reductions();
  prepare_slots();
  for (Flat* flat : flats_of(units_)) {
    // Otherwise autograd would add to the stand-in.
    for (const Parameter& p : flat->parameters())
      if (flat->is_stand_in(p.handle.grad())) p.handle.mutable_grad() = at::Tensor();
  }
  comm_.show_memory();
}

void GradientReducer::end_backward(bool failed) {
  if (failed) {
    drop();
  } else if (sync_) {
    for (; next_turn_ < turns_.size(); ++next_turn_) take_turn(*turns_[next_turn_]);
    for (Flat* flat : turns_)
      if (flat->slot) reduce(*flat);  // gradients that came after their turn
  }
  finish_reductions();
  comm_.show_memory();
  for (Flat* flat : flats_of(units_)) {
    flat->expect_none();
    if (flat->handed_out()) flat->await_gradient();  // its owner may read it at any time
    flat->show_gradients();
    if (!flat->grad.defined()) continue;
    for (size_t i = 0; i < flat->parameters().size(); ++i)
      if (flat->parameters()[i].handle.requires_grad())
        flat->parameters()[i].handle.mutable_grad() = flat->stand_in(i);
  }
  pass_over_ = true;
}

void GradientReducer::drop() {
  if (keeps_gradients_) return;
  for (const auto& unit : units_)
    if (stepped_early(*unit)) {
      log::warn(unit->label() +
                ": a backward failed after step_in_backward() had updated the unit. Load a "
                "checkpoint.");
      break;
    }
  offload_.end_early_updates();
  for (Flat* flat : flats_of(units_)) {
    for (const Parameter& p : flat->parameters()) p.handle.mutable_grad() = at::Tensor();
    const bool brought = flat->host && std::exchange(flat->host->brought, false);
    if (brought || (flat->in_own_slot() && flat->grad.defined())) {
      log::warn(flat->unit().label() +
                ": a backward failed while it was adding to the gradients of earlier "
                "backwards; all of them are dropped.");
      flat->grad.reset();
    }
    if (flat->slot) release_slot(*flat);
    flat->expect_none();
  }
}

// --- one gradient ---

// Every replay of a recorded step would add to these gradients, even after they are freed.
void GradientReducer::refuse_if_kept(const Flat& flat) const {
  if (!keeps_gradients_) return;
  throw Error(flat.unit().label() +
                  ": a step that is being recorded as a CUDA graph adds to gradients its "
                  "model already had.",
              "call zero_grad() on that model's optimizer before the step.");
}

void GradientReducer::arrived(Flat& flat, size_t parameter) {
  Unseen unseen;
  refuse_if_kept(flat);
  at::Tensor handle = flat.parameters()[parameter].handle;
  at::Tensor gradient = handle.grad();
  handle.mutable_grad() = at::Tensor();
  if (flat.is_stand_in(gradient)) return;
  if (gradient.defined()) {
    if (!flat.slot) take_slot(flat);
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

GradientPlace GradientReducer::open(Flat& flat, size_t parameter) {
  Unseen unseen;
  refuse_if_kept(flat);
  if (!flat.slot) take_slot(flat);
  return {flat.gradient_view(parameter), flat.filled[parameter] != 0};
}

void GradientReducer::close(Flat& flat, size_t parameter) {
  Unseen unseen;
  flat.filled[parameter] = 1;
  if (flat.expected[parameter] > 0) --flat.expected[parameter];
  if (flat.expected[parameter] == 0) complete(flat, parameter);
}

// --- reduction ---

// Whether a gradient is final as written: no other rank adds to it, and no hook, divisor or offload
// handles it on its way.
bool GradientReducer::stays(const Flat& flat) const {
  return flat.alone() && !hook_ && divide_factor_ <= 0 && !gradient_on_host(flat);
}

// Where a reduced gradient waits for its copy to the host: in the slot, which is reserved until
// then anyway, and not in memory the allocator would have to hold back as long.
at::Tensor GradientReducer::leaving_part(Flat& flat) {
  GradientSlot& slot = *flat.slot;
  if (!slot.part.defined())
    slot.part = at::empty({slot.bytes.numel() / flat.unit().group->shard_size},
                          slot.bytes.options().device(comm_.device()));
  int64_t numel = flat.layout().shard_numel();
  return slot.part.narrow(0, 0, numel * element_bytes(flat.reduce_dtype()))
      .view(flat.reduce_dtype());
}

void GradientReducer::reduce(Flat& flat) {
  Unit& unit = flat.unit();
  const at::Device device = comm_.device();
  for (size_t i = 0; i < flat.parameters().size(); ++i)
    if (!flat.filled[i]) flat.gradient_view(i).zero_();
  if (flat.in_own_slot()) {
    comm_.log(Event::kReduceIssued, unit, true);
    flat.grad = flat.grad_memory;
    flat.slot = nullptr;
    comm_.log(Event::kReduced, unit, true);
    return;
  }
  share_slot(flat);
  comm_.note_reduction(flat);
  comm_.log(Event::kReduceIssued, unit, true);

  before_.record(device);
  OnStream on(comm_.reduce_stream());
  before_.wait(device);
  Profiled profiled(comm_, Profiler::kReduce, unit, /*backward=*/true);
  flat.await_update();  // it may still read the memory written here
  if (!flat.grad_memory.defined()) flat.grad_memory = make_gradient_memory(flat);
  at::Tensor reduced = scatter(flat);
  std::optional<OnStream> beside;
  if (unit.group->replicate_size > 1) {
    scattered_.record(device);
    beside.emplace(comm_.replicate_stream());
    scattered_.wait(device);
    sum_over_replicas(flat, reduced);
  }
  accumulate(flat, reduced);
  StreamEvent& done = beside ? replicated_ : reduced_;
  done.record(device);
  if (gradient_on_host(flat))
    offload_.release_after_copy(flat.slot->free_after);
  else
    flat.slot->free_after.record(device);
  profiled.done({&done, &flat.slot->free_after});
  release_slot(flat);
  comm_.log(Event::kReduced, unit, true);
  offload_.gradient_arrived(flat);
}

// With shared memory this is the first collective of a step, so ranks that took different branches
// meet here; the label names the operator.
std::string GradientReducer::label_of(const Unit& unit) {
  if (!*unit.touched_by) return unit.label("gradients");
  return unit.label(formatted("gradients of {}", unit.touched_by).c_str());
}

// This rank's part of the sum over the ranks that share the unit.
at::Tensor GradientReducer::scatter(Flat& flat) {
  const Group& group = *flat.unit().group;
  const at::Tensor& full = flat.slot_view();
  if (group.shard_size == 1) return full;
  if (flat.reduce_wire() != Wire::PLAIN) return scatter_coded(flat);
  const bool direct = !flat.grad.defined() && flat.reduce_dtype() == flat.grad_dtype();
  at::Tensor reduced = gradient_on_host(flat) ? leaving_part(flat)
                       : direct               ? flat.grad_memory
                                : at::empty({flat.layout().shard_numel()}, full.options());
  const std::string label = label_of(flat.unit());
  comm_.run([&] {
    return group.reduce.reduce_scatter(reduced, full, op(),
                                       {.label = label, .identity = flat.unit().id + 1});
  });
  comm_.traffic().reduce_scatter += reduced.nbytes() * (group.shard_size - 1);
  return reduced;
}

void GradientReducer::sum_over_replicas(Flat& flat, const at::Tensor& reduced) {
  const Group& group = *flat.unit().group;
  const at::Device device = comm_.device();
  if (has_streams(device)) reduced.record_stream(current_stream(device));
  const std::string label = label_of(flat.unit());
  comm_.run([&] {
    return group.replicate.all_reduce(reduced, op(),
                                      {.label = label, .identity = flat.unit().id + 1});
  });
  comm_.traffic().all_reduce +=
      2 * reduced.nbytes() * (group.replicate_size - 1) / group.replicate_size;
}

// Runs on the stream of the reduction.
void GradientReducer::accumulate(Flat& flat, at::Tensor reduced) {
  if (hook_) hook_(reduced, flat.unit().name);
  if (divide_factor_ > 0) reduced.div_(divide_factor_);
  if (gradient_on_host(flat)) return offload_.send_gradient(flat, reduced);
  if (flat.grad.defined()) {
    flat.grad.add_(reduced);
    return;
  }
  if (!reduced.is_same(flat.grad_memory)) flat.grad_memory.copy_(reduced);
  flat.grad = flat.grad_memory;
}

void GradientReducer::finish_reductions() {
  exposed_wait(comm_, reduced_, /*backward=*/true);
  exposed_wait(comm_, replicated_, /*backward=*/true);
  exposed_wait(comm_, offload_.squares_known(), /*backward=*/true);
}

void GradientReducer::zero(bool set_to_none) {
  Unseen unseen;
  factor_.reset();
  offload_.end_early_updates();
  for (Flat* flat : flats_of(units_)) {
    if (flat->slot) release_slot(*flat);
    if (flat->host) flat->host->brought = false;
    if (set_to_none) {
      flat->grad.reset();
      for (const Parameter& p : flat->parameters()) p.handle.mutable_grad() = at::Tensor();
      // On a GPU forward can use the memory. On the CPU its pages would have to be faulted in
      // again.
      if (dry_run::like_gpu(comm_.device())) flat->release_gradient_memory();
    } else if (flat->grad.defined()) {
      change_gradient(*flat);
      flat->grad.zero_();
    }
    flat->show_gradients();
  }
  if (set_to_none && dry_run::like_gpu(comm_.device())) {  // backward waited for every reduction
    offload_.await_gradients();
    own_slots_.clear();
    slots_.clear();
    sent_.reset();
    received_.reset();
  }
}

void GradientReducer::settle_factor() {
  if (!factor_.defined()) return;
  Unseen unseen;
  for (Flat* flat : flats_of(units_)) {
    if (!flat->grad.defined()) continue;
    change_gradient(*flat);
    at::Tensor here = factor_.to(flat->grad.device());
    if (c10::elementSize(flat->grad.scalar_type()) > 2)
      flat->grad.mul_(here.to(flat->grad.scalar_type()));
    else  // without rounding the factor
      kernels::scale_into(flat->grad, flat->grad, here, /*accumulate=*/false);
  }
  factor_.reset();
}

bool GradientReducer::has_gradients() const {
  const auto flats = flats_of(units_);
  return std::any_of(flats.begin(), flats.end(),
                     [](const Flat* flat) { return flat->grad.defined() || flat->slot; });
}

void GradientReducer::forget_events() {
  for (const auto& slot : slots_) slot->free_after.forget();
  for (StreamEvent* event : {&reduced_, &replicated_, &before_, &scattered_}) event->forget();
}

void GradientReducer::forget_units() {
  used_.clear();
  sequence_.clear();
  turns_.clear();
}

}  // namespace fsdp::shard
