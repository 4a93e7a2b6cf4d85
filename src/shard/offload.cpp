#include "shard/offload.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/format.h"
#include "fsdp/error.h"
#include "kernels/update.h"
#include "shard/comm_context.h"
#include "shard/pinned_memory.h"
#include "shard/unit.h"

namespace fsdp::shard {

// --- memory ---

bool shard_on_host(const Flat& flat) {
  return flat.host && (flat.host->optimizer || flat.host->parameters);
}

bool gradient_on_host(const Flat& flat) {
  return flat.host && (flat.host->optimizer || flat.host->gradients);
}

bool updated_on_host(const Flat& flat) {
  return flat.host && flat.host->optimizer;
}

at::Tensor host_zeros(int64_t numel, at::ScalarType type, at::Device device, bool pinned) {
  const auto options = at::TensorOptions(type);
  if (device.is_meta()) return at::zeros({numel}, options.device(device));
  if (!pinned || !has_streams(device)) return at::zeros({numel}, options);
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(type));
  return pinned_memory(bytes, device).view(type);
}

// --- options ---

std::vector<bool> last_units(const std::vector<UnitShare>& units, double fraction) {
  std::vector<size_t> order;
  for (size_t i = units.size(); i-- > 0;)
    if (!units[i].root) order.push_back(i);
  int64_t all = 0, taken = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    if (units[i].root) order.push_back(i);
    all += units[i].numel;
  }
  std::vector<bool> chosen(units.size(), false);
  for (size_t i : order) {
    taken += units[i].numel;
    if (static_cast<double>(taken) > fraction * static_cast<double>(all)) break;
    chosen[i] = fraction > 0;
  }
  return chosen;
}

void check_offload(const Offload& offload) {
  if (!offload.directory.empty() && !offload.optimizer)
    throw Error(
        "offload.directory without offload.optimizer: only masters and states that the CPU updates "
        "can be kept in files.",
        "set offload.optimizer = true as well.");
  if (!offload.directory.empty() && !std::filesystem::is_directory(offload.directory))
    throw Error(
        formatted("offload.directory = {} isn't a directory on this host.", offload.directory),
        "create it on a fast local disk, on every host that has ranks.");
  if (!(offload.fraction >= 0 && offload.fraction <= 1))
    throw Error(formatted("offload.fraction = {:f} is not in [0, 1].", offload.fraction),
                "1 offloads every unit, 0.5 the last units, up to half of the parameters.");
}

// --- flats ---

void Flat::await_update() const {
  if (!host || !host->update) return;
  host->update->wait(unit_.name, unit_.timeout());
  host->update.reset();
}

void Flat::settle() const {
  await_update();
  if (host) host->read.synchronize();
}

void Flat::await_gradient() const {
  await_update();  // which reads the gradient
  if (host) host->left.synchronize();
}

void Flat::shard_changed() {
  secondary_valid = false;
  if (host) host->stale = true;
}

// --- HostOffload ---

at::Device HostOffload::device() const {
  return comm_.device();
}

void HostOffload::begin() {
  if (updates_) return;
  stream_ = SideStream(device());
  updates_ = std::make_unique<HostUpdates>(device());
}

void HostOffload::join_stream() const {
  join(stream_, device());
}

bool HostOffload::in_use() const {
  for (const auto& unit : units_)
    for (const auto& flat : unit->flats)
      if (flat->host) return true;
  return false;
}

void HostOffload::forget_events() {
  for (const auto& unit : units_)
    for (const auto& flat : unit->flats) {
      if (!flat->host) continue;
      flat->await_update();  // which waits for the events below
      flat->host->read.forget();
      flat->host->left.forget();
    }
  for (StreamEvent* event : {&leaving_, &left_, &summed_}) event->forget();
}

void HostOffload::release_after_copy(StreamEvent& free_after) const {
  OnStream on(stream_);
  free_after.record(device());
}

at::Tensor HostOffload::bring_shard(Flat& flat, const at::Tensor& full) {
  HostState& host = *flat.host;
  at::Tensor place = host.resident;
  if (!place.defined()) {
    int64_t numel = flat.layout().shard_numel();
    place = full.narrow(0, flat.rank() * numel, numel);
  } else if (!host.stale) {
    return place;
  }
  host.read.wait(device());  // a shard updated on the device may still be on its way back
  place.copy_(flat.shard, /*non_blocking=*/true);
  host.stale = false;
  host.read.record(device());
  if (flat.handed_out()) host.read.synchronize();  // its owner may write at any time
  return place;
}

void HostOffload::send_gradient(Flat& flat, const at::Tensor& reduced) {
  HostState& host = *flat.host;
  auto sum_up = [&](const at::Tensor& value) {
    if (!host.square.defined())
      host.square = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device()));
    host.square.copy_(kernels::sum_of_powers(value, 2));
    host.square_valid = true;
  };
  // On this stream if possible, so that the norm needn't wait for copies.
  const bool added = flat.grad.defined() && !std::exchange(host.brought, false);
  bool as_it_is = !added && reduced.scalar_type() == flat.grad_dtype();
  if (as_it_is) sum_up(reduced);
  leaving_.record(device());
  OnStream on(stream_);
  leaving_.wait(device());
  at::Tensor value = reduced.to(flat.grad_dtype());
  if (added) {
    // Add on the device, as without offload: the sum has the same bits, and nothing waits.
    value = at::empty_like(value);
    value.copy_(flat.grad, /*non_blocking=*/true);
    value.add_(reduced);
  }
  if (!as_it_is) {
    sum_up(value);
    summed_.record(device());
  }
  flat.grad_memory.copy_(value, /*non_blocking=*/true);
  flat.grad = flat.grad_memory;
  host.left.record(device());
  host.arrival = ++arrivals_;
  left_.record(device());
}

// Layers then add to the gradient as they do without offload, bit for bit.
void HostOffload::bring_gradient(Flat& flat) {
  flat.host->left.wait(device());
  flat.slot_view().copy_(flat.grad, /*non_blocking=*/true);
  std::fill(flat.filled.begin(), flat.filled.end(), 1);
  flat.host->brought = true;
}

void HostOffload::send_shard(Flat& flat, const at::Tensor& host) {
  leaving_.record(device());
  OnStream on(stream_);
  leaving_.wait(device());
  if (has_streams(device())) flat.shard.record_stream(current_stream(device()));
  at::Tensor to = host;
  to.copy_(flat.shard, /*non_blocking=*/true);
  flat.host->read.record(device());
}

// --- steps in backward ---

bool stepped_early(const Unit& unit) {
  return std::any_of(unit.flats.begin(), unit.flats.end(),
                     [](const auto& flat) { return flat->host && flat->host->stepped; });
}

void HostOffload::gradient_arrived(Flat& flat) {
  if (!early_update_ || !updated_on_host(flat)) return;
  Unit& unit = flat.unit();
  if (std::exchange(flat.host->due, true))
    throw Error(unit.label() +
                    ": a second backward came after step_in_backward(), which has used the "
                    "gradients of the first.",
                "call step_in_backward() before the last backward of a step; run the others before "
                "it or under no_sync().");
  std::vector<Flat*> all;  // the unit may be gathered again until all of them have gradients
  for (const auto& other : unit.flats)
    if (updated_on_host(*other) && other->trainable()) all.push_back(other.get());
  if (!std::all_of(all.begin(), all.end(), [](const Flat* one) { return one->host->due; })) return;
  for (Flat* one : all) {
    early_update_(*one);
    one->host->stepped = true;
    one->shard_changed();
  }
}

void HostOffload::update_early(std::function<void(Flat& flat)> update) {
  early_update_ = std::move(update);
}

void HostOffload::end_early_updates() {
  early_update_ = nullptr;
  for (const auto& unit : units_)
    for (const auto& flat : unit->flats)
      if (flat->host) flat->host->due = flat->host->stepped = false;
}

}  // namespace fsdp::shard
