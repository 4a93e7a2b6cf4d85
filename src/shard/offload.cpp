#include "shard/offload.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>

#include "fsdp/error.h"
#include "kernels/update.h"
#include "shard/model.h"

namespace fsdp::shard {

// --- the thread ---

void HostUpdate::run(const std::function<void()>& work) noexcept {
  std::exception_ptr failure;
  try {
    work();
  } catch (...) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex_);
  failure_ = failure;
  done_ = true;
  done_changed_.notify_all();
}

void HostUpdate::wait(const std::string& unit, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (!done_changed_.wait_for(lock, limit, [&] { return done_; }))
    throw Error("unit \"" + unit + "\": its update on the CPU did not finish in " +
                    std::to_string(limit.count() / 1000) + " s.",
                "its gradient may not have arrived (docs/hangs.md), or FSDP_TIMEOUT is too short "
                "for this CPU.");
  if (!failure_) return;
  try {
    std::rethrow_exception(std::exchange(failure_, nullptr));
  } catch (const std::exception& error) {
    throw Error("unit \"" + unit + "\": its update on the CPU failed: " + error.what(),
                "its parameters and states may be partly updated; load a checkpoint.");
  }
}

HostUpdates::~HostUpdates() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<HostUpdate> HostUpdates::add(HostWork work) {
  auto update = std::make_shared<HostUpdate>();
  std::lock_guard lock(mutex_);
  waiting_.emplace_back(update, std::move(work));
  if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  changed_.notify_all();
  return update;
}

namespace {

// A failed query (the device is lost) counts as true; the work itself then reports the failure.
bool can_start(const HostWork& work) {
  try {
    return !work.can_start || work.can_start();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

void HostUpdates::loop() {
  at::NoGradGuard no_grad;
  Unseen unseen;
  std::optional<c10::DeviceGuard> on;  // else querying an event creates a context on GPU 0
  if (has_streams(device_)) on.emplace(device_);
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    auto next = waiting_.end();
    for (auto entry = waiting_.begin(); entry != waiting_.end(); ++entry) {
      const HostWork& work = entry->second;
      if (next != waiting_.end() && next->second.wanted <= work.wanted) continue;
      if (can_start(work)) next = entry;
    }
    if (next == waiting_.end())
      next = std::min_element(waiting_.begin(), waiting_.end(), [](const auto& a, const auto& b) {
        return a.second.arrival < b.second.arrival;
      });
    auto [update, work] = std::move(*next);
    waiting_.erase(next);
    lock.unlock();
    // Free its tensors before it counts as done: make_states() checks whether they are in use.
    update->run([&run = work.run] { std::exchange(run, nullptr)(); });
    work = {};
  }
}

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
  at::TensorOptions on = at::TensorOptions().dtype(type);
  if (device.is_meta()) return at::zeros({numel}, on.device(device));
  return at::zeros({numel}, on.pinned_memory(pinned && has_streams(device)));
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
    throw Error("offload.directory = " + offload.directory + " isn't a directory on this host.",
                "create it on a fast local disk, on every host that has ranks.");
  if (!(offload.fraction >= 0 && offload.fraction <= 1))
    throw Error("offload.fraction = " + std::to_string(offload.fraction) + " is not in [0, 1].",
                "1 offloads every unit, 0.5 the last units, up to half of the parameters.");
}

void begin_offload(Model& model) {
  if (model.host_updates) return;
  model.leave_stream_ = SideStream(model.device);
  model.host_updates = std::make_shared<HostUpdates>(model.device);
}

bool offloads(const Model& model) {
  for (const Flat* flat : model.flats())
    if (flat->host) return true;
  return false;
}

// --- flats ---

void Flat::await_update() const {
  if (host && host->update) {
    host->update->wait(unit_.name,
                       unit_.model ? unit_.model->world.timeout() : std::chrono::minutes(5));
    host->update.reset();
  }
}

void Flat::settle() const {
  await_update();
  if (host) host->read.synchronize();
}

void Flat::await_gradient() const {
  await_update();  // which reads the gradient
  if (host) host->left.synchronize();
}

// --- copies between host and device ---

void Model::shard_changed(Flat& flat) {
  flat.secondary_valid = false;
  if (flat.host) flat.host->stale = true;
}

at::Tensor Model::bring(Flat& flat, const at::Tensor& full) {
  HostState& host = *flat.host;
  at::Tensor place = host.resident;
  if (!place.defined()) {
    int64_t numel = flat.layout().shard_numel();
    place = full.narrow(0, flat.rank() * numel, numel);
  } else if (!host.stale) {
    return place;
  }
  host.read.wait(device);  // a shard updated on the device may still be on its way back
  place.copy_(flat.shard, /*non_blocking=*/true);
  host.stale = false;
  host.read.record(device);
  if (flat.handed_out()) host.read.synchronize();  // its owner may write at any time
  return place;
}

void Model::send_gradient_to_host(Flat& flat, const at::Tensor& reduced) {
  HostState& host = *flat.host;
  auto sum_up = [&](const at::Tensor& value) {
    if (!host.square.defined())
      host.square = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
    host.square.copy_(kernels::sum_of_powers(value, 2));
    host.square_valid = true;
  };
  // On this stream if possible, so that the norm needn't wait for copies.
  const bool added = flat.grad.defined() && !std::exchange(host.brought, false);
  bool as_it_is = !added && reduced.scalar_type() == flat.grad_dtype();
  if (as_it_is) sum_up(reduced);
  leaving_.record(device);
  OnStream on(leave_stream_);
  leaving_.wait(device);
  at::Tensor value = reduced.to(flat.grad_dtype());
  if (added) {
    // Add on the device, as without offload: the sum has the same bits, and nothing waits.
    value = at::empty_like(value);
    value.copy_(flat.grad, /*non_blocking=*/true);
    value.add_(reduced);
  }
  if (!as_it_is) {
    sum_up(value);
    summed_.record(device);
  }
  flat.grad_memory.copy_(value, /*non_blocking=*/true);
  flat.grad = flat.grad_memory;
  host.left.record(device);
  host.arrival = ++arrivals_;
  left_.record(device);
}

// For a flat that no other rank shares: layers then add to its gradient as they do without offload,
// bit for bit.
void Model::bring_gradient(Flat& flat) {
  const bool added_later = reduce_hook || divide_factor > 0;
  if (!flat.alone() || added_later || !gradient_on_host(flat) || !flat.grad.defined()) return;
  flat.host->left.wait(device);
  flat.slot_view().copy_(flat.grad, /*non_blocking=*/true);
  std::fill(flat.filled.begin(), flat.filled.end(), 1);
  flat.host->brought = true;
}

void Model::send_shard_to_host(Flat& flat, const at::Tensor& host) {
  leaving_.record(device);
  OnStream on(leave_stream_);
  leaving_.wait(device);
  if (has_streams(device)) flat.shard.record_stream(current_stream(device));
  at::Tensor to = host;
  to.copy_(flat.shard, /*non_blocking=*/true);
  flat.host->read.record(device);
}

// --- steps in backward ---

bool stepped_early(const Unit& unit) {
  return std::any_of(unit.flats.begin(), unit.flats.end(),
                     [](const auto& flat) { return flat->host && flat->host->stepped; });
}

void Model::step_early(Flat& flat) {
  Unit& unit = flat.unit();
  if (std::exchange(flat.host->due, true))
    throw Error("unit \"" + unit.name +
                    "\": a second backward came after step_in_backward(), which has used the "
                    "gradients of the first.",
                "call step_in_backward() before the last backward of a step; run the others before "
                "it or under no_sync().");
  std::vector<Flat*> all;  // the unit may be gathered again until all of them have gradients
  for (const auto& other : unit.flats)
    if (updated_on_host(*other) && other->trainable()) all.push_back(other.get());
  if (!std::all_of(all.begin(), all.end(), [](const Flat* one) { return one->host->due; })) return;
  for (Flat* one : all) {
    early_update(*one);
    one->host->stepped = true;
    shard_changed(*one);
  }
}

void Model::end_early_updates() {
  early_update = nullptr;
  for (Flat* flat : flats())
    if (flat->host) flat->host->due = flat->host->stepped = false;
}

}  // namespace fsdp::shard
