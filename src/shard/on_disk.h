// Masters and states on disk (Offload::directory): tensors that have memory only during an update.
//
// Such a tensor is like any other of a flat in host memory, but its storage is empty. For an update
// the model's update thread reads the flat's tensors into a buffer of the store
// (disk/state_store.h), points the storages at it, and returns the buffer to be written. A reader
// in between (a checkpoint, full_tensor) gets the tensor in memory of its own, where it stays and
// may be written until the flat's next update moves it to disk again.
//
// The store has one entry per flat, created when an optimizer first asks for states: only then is
// their number known. A master that is the shard itself (both float32) is needed for every gather
// and stays in memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "disk/state_store.h"
#include "shard/flat.h"

namespace fsdp::shard {

struct Engine;

// A flat's tensors on disk: its master, or for a split master the half that the shard lacks, if
// either is a tensor of its own; then the states.
struct Parked {
  ~Parked();

  std::shared_ptr<disk::StateStore> store;
  int entry = 0;
  bool has_master = false;
  bool handed_out = false;  // to an optimizer
  std::vector<int64_t> bytes;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages;
  Mutex mutex;
  // Its memory while it is read; undefined: it is on disk.
  std::vector<at::Tensor> memory FSDP_GUARDED_BY(mutex);
};

// States of a flat, zeros, one for each of `sizes`: on disk if its host state has a directory (each
// must then be as long as the shard), otherwise on the master's device. The first call reserves
// space for all flats of the model, for as many states each.
std::vector<at::Tensor> make_states(Engine& model, const Flat& flat,
                                    const std::vector<int64_t>& sizes);

// Runs `work` with the tensors in memory. No other thread may use them meanwhile.
void with_states(HostState& host, const std::function<void()>& work);

// Reads them into memory. No update may be under way.
void bring_master(const Flat& flat);
void bring_states(const Flat& flat);

// Writes to disk now what is in memory, instead of with the next update.
void put_away(const Flat& flat);

// While alive, everything a flat has on disk is in memory; the memory it took is freed afterwards.
// For callers that read one flat after the other and write to none.
class StatesHere {
 public:
  explicit StatesHere(const Flat& flat);
  ~StatesHere();
  StatesHere(const StatesHere&) = delete;
  StatesHere& operator=(const StatesHere&) = delete;

 private:
  std::shared_ptr<Parked> parked_;  // null: nothing is on disk
  std::vector<size_t> brought_;
};

// Bytes that are on disk and not in memory.
int64_t master_bytes_away(const Flat& flat);
int64_t state_bytes_away(const Flat& flat);
int64_t buffer_bytes(const Flat& flat);  // of the store; counted for its first flat only

}  // namespace fsdp::shard
