#include "shard/on_disk.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "base/format.h"
#include "fsdp/error.h"
#include "shard/engine.h"
#include "shard/offload.h"
#include "shard/tensor_access.h"
#include "shard/update.h"

namespace fsdp::shard {
namespace {

constexpr int kBuffers = 3;  // one being updated, one being read, one being written

Parked* parked(const Flat& flat) {
  return flat.host ? flat.host->parked.get() : nullptr;
}

// The part of the master that isn't the shard; undefined if there is none.
const at::Tensor& master_apart(const Flat& flat) {
  return flat.rest.defined() || flat.master.is_same(flat.shard) ? flat.rest : flat.master;
}

void copy(void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

std::shared_ptr<Parked> make_parked(const Flat& flat, size_t states) {
  auto made = std::make_shared<Parked>();
  const at::Tensor& master = master_apart(flat);
  made->has_master = master.defined();
  if (made->has_master) made->bytes.push_back(static_cast<int64_t>(master.nbytes()));
  const auto size = static_cast<int64_t>(c10::elementSize(flat.master_dtype()));
  made->bytes.resize(made->bytes.size() + states, flat.layout().shard_numel() * size);
  {
    const Lock lock(made->mutex);
    made->memory.resize(made->bytes.size());
  }
  for (const int64_t bytes : made->bytes)
    made->storages.push_back(make_storage(
        static_cast<size_t>(bytes), at::kCPU, /*tag=*/nullptr,
        formatted("fsdp: unit \"{}\": this master or state is on disk.\n  HINT: request it again "
                  "(optimizer.state, sharded.full_tensor) after each step.",
                  flat.unit().name)));
  return made;
}

// Moves the master to its storage in `to`. Its values stay in memory until the first update; the
// handle stays the same tensor.
void move_master(const Flat& flat, Parked& to) {
  if (!to.has_master) return;
  const at::Tensor& master = master_apart(flat);
  at::Tensor values = master.alias();
  const at::Tensor moved =
      tensor_over(to.storages[0], master.scalar_type(), master.sizes(), master.strides(), 0);
  point_at(*to.storages[0], values.data_ptr());
  become(master, moved);
  const Lock lock(to.mutex);
  to.memory[0] = std::move(values);
}

// Reserves disk space for every flat of the model that belongs on disk and has none yet.
void park(Engine& model, size_t states) {
  Unseen unseen;
  std::vector<Flat*> flats;
  for (Flat* flat : host_flats(model))
    if (!flat->host->parked && !flat->host->directory.empty()) flats.push_back(flat);
  if (flats.empty()) return;
  std::vector<std::shared_ptr<Parked>> made;
  std::vector<std::vector<int64_t>> entries;
  for (Flat* flat : flats) {
    flat->settle();
    made.push_back(make_parked(*flat, states));
    entries.push_back(made.back()->bytes);
  }
  auto store = std::make_shared<disk::StateStore>(
      flats[0]->host->directory, std::move(entries),
      disk::StoreOptions{.buffers = std::min(kBuffers, 1 + static_cast<int>(flats.size()))});
  for (size_t i = 0; i < flats.size(); ++i) {
    made[i]->store = store;
    made[i]->entry = static_cast<int>(i);
    flats[i]->host->parked = made[i];
    move_master(*flats[i], *made[i]);  // only once there is space, which may have thrown
  }
}

bool is_away(const Parked& flat, size_t i) FSDP_REQUIRES(flat.mutex) {
  return !flat.memory[i].defined();
}

// Tensors [from, to) of a flat.
void bring(Parked& flat, size_t from, size_t to) {
  const Lock lock(flat.mutex);
  bool any = false;
  for (size_t i = from; i < to; ++i) any |= is_away(flat, i);
  if (!any) return;
  Unseen unseen;
  const auto places = flat.store->get(flat.entry);
  for (size_t i = from; i < to; ++i) {
    if (!is_away(flat, i)) continue;
    flat.memory[i] = at::empty({flat.bytes[i]}, at::kByte);
    copy(flat.memory[i].mutable_data_ptr(), places[i], flat.bytes[i]);
    point_at(*flat.storages[i], flat.memory[i].mutable_data_ptr());
  }
  flat.store->put(flat.entry, /*changed=*/false);
}

bool any_is_here(Parked& flat) {
  const Lock lock(flat.mutex);
  return std::any_of(flat.memory.begin(), flat.memory.end(),
                     [](const at::Tensor& memory) { return memory.defined(); });
}

int64_t bytes_away(const Flat& flat, bool of_states) {
  Parked* const found = parked(flat);
  if (!found) return 0;
  const Lock lock(found->mutex);
  int64_t sum = 0;
  for (size_t i = 0; i < found->bytes.size(); ++i)
    if (is_away(*found, i) && of_states == (i > 0 || !found->has_master)) sum += found->bytes[i];
  return sum;
}

}  // namespace

Parked::~Parked() {
  for (const auto& storage : storages)
    orphan(
        *storage,
        "fsdp: the model of this master or state is gone.\n  HINT: keep the module alive as long "
        "as its tensors are used.");
}

std::vector<at::Tensor> make_states(Engine& model, const Flat& flat,
                                    const std::vector<int64_t>& sizes) {
  const int64_t numel = flat.layout().shard_numel();
  const size_t count = sizes.size();
  std::vector<at::Tensor> states;
  if (!flat.host || flat.host->directory.empty()) {
    for (const int64_t size : sizes) states.push_back(at::zeros({size}, flat.master_options()));
    return states;
  }
  const bool again = flat.host->parked != nullptr && flat.host->parked->handed_out;
  if (!flat.host->parked) park(model, count);
  Parked& found = *flat.host->parked;
  const size_t first = found.has_master ? 1 : 0;
  const auto in_use = [&](size_t i) { return found.storages[i].use_count() > 1; };
  bool refused = found.bytes.size() != first + count;
  for (size_t i = first; again && !refused && i < found.bytes.size(); ++i) refused = in_use(i);
  if (refused)
    throw Error(
        flat.unit().label() + ": its states on disk belong to another optimizer.",
        "with offload.directory a model has one optimizer; destroy the old one before creating "
        "another of the same kind.");
  for (size_t i = first; i < found.bytes.size(); ++i) {
    if (again) {  // they belonged to an optimizer that is gone
      at::Tensor values = at::zeros({found.bytes[i]}, at::kByte);
      point_at(*found.storages[i], values.mutable_data_ptr());
      const Lock lock(found.mutex);
      found.memory[i] = std::move(values);
    }
    states.push_back(tensor_over(found.storages[i], flat.master_dtype(), {numel}, {1}, 0));
  }
  found.handed_out = true;
  return states;
}

void with_states(HostState& host, const std::function<void()>& work) {
  if (!host.parked) return work();
  Parked& flat = *host.parked;
  const auto places = flat.store->get(flat.entry);
  {
    const Lock lock(flat.mutex);
    for (size_t i = 0; i < places.size(); ++i) {
      if (flat.memory[i].defined()) copy(places[i], flat.memory[i].const_data_ptr(), flat.bytes[i]);
      point_at(*flat.storages[i], places[i]);
      flat.memory[i].reset();
    }
  }
  const auto give_back = [&] {
    for (const auto& storage : flat.storages) take_away(*storage);
    flat.store->put(flat.entry);
  };
  try {
    work();
  } catch (...) {
    give_back();
    throw;
  }
  give_back();
}

void bring_master(const Flat& flat) {
  if (Parked* found = parked(flat); found && found->has_master) bring(*found, 0, 1);
}

void bring_states(const Flat& flat) {
  if (Parked* found = parked(flat)) bring(*found, found->has_master ? 1 : 0, found->bytes.size());
}

void put_away(const Flat& flat) {
  Parked* const found = parked(flat);
  if (!found) return;
  if (any_is_here(*found)) with_states(*flat.host, [] {});
}

StatesHere::StatesHere(const Flat& flat) : parked_(flat.host ? flat.host->parked : nullptr) {
  flat.settle();
  if (!parked_) return;
  for (size_t i = 0; i < parked_->memory.size(); ++i)
    if (!parked_->memory[i].defined()) brought_.push_back(i);
  bring(*parked_, 0, parked_->memory.size());
}

StatesHere::~StatesHere() {
  if (!parked_) return;
  const Lock lock(parked_->mutex);
  for (const size_t i : brought_) {
    take_away(*parked_->storages[i]);
    parked_->memory[i].reset();
  }
}

int64_t master_bytes_away(const Flat& flat) {
  return bytes_away(flat, /*of_states=*/false);
}

int64_t state_bytes_away(const Flat& flat) {
  return bytes_away(flat, /*of_states=*/true);
}

int64_t buffer_bytes(const Flat& flat) {
  Parked* const found = parked(flat);
  return found && found->entry == 0 ? found->store->bytes_in_memory() : 0;
}

}  // namespace fsdp::shard
