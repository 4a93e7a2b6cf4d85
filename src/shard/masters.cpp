#include "shard/masters.h"

#include <ATen/ops/equal.h>
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/format.h"
#include "fsdp/error.h"
#include "shard/comm_context.h"
#include "shard/offload.h"
#include "shard/unit.h"

namespace fsdp::shard {
namespace {

at::Tensor in_host_memory(const Flat& flat, const at::Tensor& gradient) {
  return host_zeros(gradient.numel(), gradient.scalar_type(), flat.device(), flat.host->pinned)
      .copy_(gradient);
}

// torch::optim::LBFGS takes dot products of what it believes are whole gradients. Only the stack
// tells who writes.
bool called_by_lbfgs() {
  void* frames[64];
  const int count = backtrace(frames, 64);
  for (int i = 0; i < count; ++i) {
    Dl_info symbol;
    if (dladdr(frames[i], &symbol) != 0 && symbol.dli_sname &&
        std::strstr(symbol.dli_sname, "5torch5optim5LBFGS"))
      return true;
  }
  return false;
}

// torch::optim wants gradients in the master's dtype.
void convert_gradient(Flat& flat) {
  flat.settle();
  flat.await_gradient();
  if (!flat.grad_memory.defined() || flat.grad_memory.scalar_type() == flat.master_dtype()) return;
  at::Tensor grad = flat.grad.defined() ? flat.grad.to(flat.master_dtype()) : at::Tensor();
  flat.release_gradient_memory();
  flat.grad_memory.reset();
  flat.grad = grad.defined() && gradient_on_host(flat) ? in_host_memory(flat, grad) : grad;
  flat.grad_memory = flat.grad;
}

}  // namespace

void Masters::hand_out(HandedOut to) {
  for (const auto& unit : units_)
    for (const auto& flat : unit->flats)
      if (flat->trainable() && flat->host && !updated_on_host(*flat))
        throw Error(
            unit->label() +
                ": torch::optim would find its parameters and gradients on different devices "
                "(offload.parameters or offload.gradients without offload.optimizer).",
            "use fsdp::AdamW or fsdp::SGD, or set offload.optimizer = true as well.");
  handed_out_ = std::max(handed_out_, to);
  for (const auto& unit : units_)
    for (const auto& flat : unit->flats) {
      if (!flat->trainable() || !flat->shard.defined()) continue;
      if (!flat->handed_out()) convert_gradient(*flat);
      flat->hand_out();
      // Other ranks may still read the shared memory while this rank's owner of the masters writes.
      if (watched()) flat->own_the_master();
      flat->show_gradients();
    }
}

// torch::optim writes through .data(), so the shard is compared with its master.
void Masters::follow(Unit& unit, const char* by) {
  const Group& group = *unit.group;
  const bool meet = group.shares_memory && group.shard_size > 1;
  std::string label = unit.label(by);
  CallOptions call{.label = label, .identity = unit.id + 1};
  auto meet_all = [&] { comm_.run([&] { group.gather.barrier(call); }); };
  if (meet) meet_all();  // no rank reads from here on
  for (const auto& flat : unit.flats) {
    if (!flat->handed_out()) continue;
    flat->settle();
    if (flat->host) flat->host->stale = true;
    if (flat->shard.is_same(flat->master)) continue;
    bool on_host = flat->master.device().is_cpu();
    if (on_host && at::equal(flat->shard, flat->master.to(flat->param_dtype()))) continue;
    flat->shard.copy_(flat->master);
    flat->shard_changed();
    if (on_host) flat->bump_versions();
  }
  if (meet) meet_all();  // every rank has written
  comm_.shards_written();
}

void Masters::check_write(const Unit& unit, const char* by) {
  if (summoned_ > 0) refuse_while_summoned(formatted("unit \"{}\": an update ({})", unit.name, by));
  if (!watched())
    throw Error(formatted("unit \"{}\": {} writes to its masters outside of the wrapped "
                          "optimizer's step().",
                          unit.name, by),
                "write inside sharded.update_parameters(), or to sharded.parameters().");
  if (!std::exchange(writer_known_, true) && called_by_lbfgs())
    throw Error(
        "torch::optim::LBFGS can't update a sharded model: it takes dot products of whole "
        "gradients, and each rank has a part of them.",
        "use an elementwise optimizer, such as fsdp::AdamW or torch::optim::SGD.");
  if (unit.busy > 0)
    throw Error(formatted("unit \"{}\": {} writes to its masters while an operator uses it.",
                          unit.name, by),
                "call optimizer.step() after backward, not in a hook.");
}

void Masters::refuse_while_summoned(const std::string& what) const {
  if (summoned_ == 0) return;
  throw Error(formatted("rank {}: {} isn't possible while summon_full_params() is alive: it would "
                        "be overwritten.",
                        comm_.world().rank(), what),
              "let the object that summon_full_params() returned go out of scope first.");
}

// --- our optimizers ---

void Masters::attach(const void* optimizer, std::function<int64_t()> all,
                     std::function<int64_t()> host) {
  optimizers_[optimizer] = {std::move(all), std::move(host)};
}

int64_t Masters::state_bytes() const {
  int64_t bytes = 0;
  for (const auto& [optimizer, states] : optimizers_) bytes += states.all();
  return bytes;
}

int64_t Masters::host_state_bytes() const {
  int64_t bytes = 0;
  for (const auto& [optimizer, states] : optimizers_) bytes += states.host();
  return bytes;
}

}  // namespace fsdp::shard
