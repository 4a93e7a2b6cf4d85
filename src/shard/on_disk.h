// Masters and states on a disk (Offload::directory): tensors whose memory comes for an update and
// goes after it.
//
// Such a tensor is like any other of a flat in host memory, but its storage is empty. For an update
// the model's thread brings the flat's tensors into a buffer of the store (disk/state_store.h),
// points the storages at it, and gives it back to be written. Who looks at one in between (a
// checkpoint, full_tensor) gets it in memory of its own, where it stays and may be written until
// the flat's next update takes it to the disk again.
//
// The store has an entry for each flat, made when an optimizer first asks for states: only then is
// known how many there are. What is a tensor of the device's own dtype (a float32 shard that is its
// own master) is needed for every gather, and stays in memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "disk/state_store.h"
#include "shard/flat.h"

namespace fsdp::shard {

class Model;

// A flat's tensors on the disk: its master, or the half of it that the shard lacks, where that is a
// tensor of its own; then the states.
struct Parked {
  ~Parked();

  std::shared_ptr<disk::StateStore> store;
  int entry = 0;
  bool has_master = false;
  bool handed_out = false;  // an optimizer has the states
  std::vector<int64_t> bytes;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
  std::mutex mutex;
  std::vector<at::Tensor> memory;  // where it lies while it is looked at; undefined: on the disk
};

// `count` states of a flat, zeros: on the disk where its home has a directory, else where the
// master is. Called for one flat, it makes room for all of the model.
std::vector<at::Tensor> make_states(Model& model, const Flat& flat, size_t count);

// Runs `work` while the tensors are in memory. No other thread may want them.
void with_states(Home& home, const std::function<void()>& work);

// Brings them into memory to be looked at, when no update is under way.
void bring_master(const Flat& flat);
void bring_states(const Flat& flat);

// What was brought, or is not on the disk yet, goes there now and not with the next update.
void put_away(const Flat& flat);

// While alive, all that a flat has on the disk is in memory; what was not there before then goes.
// For those who look at one flat after the other, and write to none.
class StatesHere {
 public:
  explicit StatesHere(const Flat& flat);
  ~StatesHere();
  StatesHere(const StatesHere&) = delete;
  StatesHere& operator=(const StatesHere&) = delete;

 private:
  std::shared_ptr<Parked> parked_;  // null: nothing is on the disk
  std::vector<size_t> brought_;
};

// What is not in memory now.
int64_t master_bytes_away(const Flat& flat);
int64_t state_bytes_away(const Flat& flat);
int64_t buffer_bytes(const Flat& flat);  // of the store, counted for one of its flats

}  // namespace fsdp::shard
