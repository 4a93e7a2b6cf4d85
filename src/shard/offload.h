// Offload: flats whose shard, gradient, or master and states live in host memory.
//
// The device computes with an offloaded flat (one with a HostState) as with any other. Only the
// copies differ: a gather begins with a copy of the shard to the device, a reduced gradient is
// copied to the host while backward goes on, and optimizer.step() hands the update to a thread,
// flat by flat in the order of forward. The next user of a flat waits only for that flat's update,
// so updates overlap with the next forward. Where the master and the states stay on the device, the
// shard and the gradient are copied there for the update, one flat after the other
// (update_on_visit).
//
// Who may access host memory: the thread, from the time an update is handed to it until it is done;
// the device, until the events `read` and `left` have passed; otherwise the model, under its lock.
// Flat::settle() and Flat::await_gradient() wait for the first two. In the hot path nothing waits
// for the device: gathers and reductions wait for the thread only.
//
// With the CPU as the device everything is the same, except that copies are done when they return.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/sharding.h"
#include "shard/device_stream.h"
#include "shard/host_updates.h"

namespace fsdp::shard {

class CommContext;
class Flat;
class Unit;
struct Parked;

// Chooses the units that make up a fraction of the model: the last ones that fit into it. Their
// gradients arrive first in backward, and forward needs them last. The root comes after all others:
// its gradients arrive last, and forward needs it first.
struct UnitShare {
  int64_t numel;
  bool root;
};
std::vector<bool> last_units(const std::vector<UnitShare>& units, double fraction);

// The host state of an offloaded flat, beside its tensors.
struct HostState {
  bool parameters = false;  // the shard is in host memory, and no copy stays on the device
  bool gradients = false;   // the gradient is in host memory
  bool optimizer = false;   // master and states are, and therefore the shard and the gradient
  bool pinned = true;       // page-locked memory
  at::Tensor resident;      // [shard_numel] on the device, the source of gathers; undefined: every
                            // gather copies the shard into its place of the gathered buffer
  bool stale = true;        // the shard was written since `resident` was copied from it
  StreamEvent read;         // the device has read the shard
  StreamEvent left;         // the gradient has arrived on the host
  bool brought = false;     // … and was copied back to the slot, where further ones are added
  // The sum of the gradient's squares, one float64 on the device. Invalid once the gradient is
  // changed on the host.
  at::Tensor square;
  bool square_valid = false;
  std::shared_ptr<HostUpdate> update;  // the last one handed over; null: it was waited for
  uint64_t arrival = 0;                // position of the gradient in the order of arrival
  bool due = false;                    // step in backward: the gradient has arrived
  bool stepped = false;                // and was used: optimizer.step() skips this flat
  std::string directory;               // for the master and the states; empty: in memory
  std::shared_ptr<Parked> parked;      // the two on disk, once there are states (on_disk.h)
};

// Which tensors of a flat are in host memory; updated_on_host: the master and the states.
bool shard_on_host(const Flat& flat);
bool gradient_on_host(const Flat& flat);
bool updated_on_host(const Flat& flat);

// [numel] zeros in host memory, page-locked if `pinned` and the device is a GPU. On the meta device
// a meta tensor.
at::Tensor host_zeros(int64_t numel, at::ScalarType type, at::Device device, bool pinned);

// An Error if the options contradict each other or name a directory that doesn't exist.
void check_offload(const Offload& offload);

bool stepped_early(const Unit& unit);

// HostOffload: the copies between host and device, and the updates on the host.
class HostOffload {
 public:
  // `units`: of the model; they may change.
  HostOffload(CommContext& comm, const std::vector<std::shared_ptr<Unit>>& units)
      : comm_(comm), units_(units) {}
  HostOffload(const HostOffload&) = delete;
  HostOffload& operator=(const HostOffload&) = delete;

  void begin();              // creates the stream and the update thread
  bool in_use() const;       // whether any flat has a HostState
  void forget_events();      // see Engine::forget_events
  void join_stream() const;  // the compute stream waits for all copies

  // --- copies ---
  // On the gather stream: the flat's shard on the device, in its place of `full` or in memory of
  // its own. Its source may be written again after HostState::read.
  at::Tensor bring_shard(Flat& flat, const at::Tensor& full);
  // Copies the flat's shard, updated on the device, to `host`.
  void send_shard(Flat& flat, const at::Tensor& host);
  // On a reduction's stream: adds a reduced gradient to the one in host memory.
  void send_gradient(Flat& flat, const at::Tensor& reduced);
  void bring_gradient(Flat& flat);  // into the slot it has just taken
  // The slot may be used again once the gradient has left it.
  void release_after_copy(StreamEvent& free_after) const;
  void await_gradients() const { left_.wait(device()); }  // every gradient so far is on the host
  const StreamEvent& squares_known() const { return summed_; }

  // --- updates ---
  std::shared_ptr<HostUpdate> add(HostWork work) { return updates_->add(std::move(work)); }

  // --- steps in backward ---
  // From now until end_early_updates, `update` hands the update of a flat to the thread once all
  // flats of its unit have a gradient.
  void update_early(std::function<void(Flat& flat)> update);
  void gradient_arrived(Flat& flat);  // on the host
  void stop_early_updates() { early_update_ = nullptr; }
  void end_early_updates();  // the step is over

 private:
  at::Device device() const;

  CommContext& comm_;
  const std::vector<std::shared_ptr<Unit>>& units_;
  SideStream stream_;
  std::unique_ptr<HostUpdates> updates_;  // null: nothing is offloaded
  std::function<void(Flat& flat)> early_update_;
  StreamEvent leaving_, left_;  // a reduction is done; every gradient so far is on the host
  StreamEvent summed_;          // and the sum of squares of each of these is known
  uint64_t arrivals_ = 0;       // gradients that arrived on the host
};

}  // namespace fsdp::shard
