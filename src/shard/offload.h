// Offload: flats whose shard, gradient, or master and states live in host memory, and the thread
// that updates them there.
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
// the device, until the events `read` and `left` have passed; otherwise the model, under its mutex.
// Flat::settle() and Flat::await_gradient() wait for the first two. In the hot path nothing waits
// for the device: gathers and reductions wait for the thread only.
//
// With the CPU as the device everything is the same, except that copies are done when they return.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "fsdp/sharding.h"
#include "shard/device_stream.h"

namespace fsdp::shard {

class Flat;
class Model;
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

// The update of one flat, as handed to the thread.
class HostUpdate {
 public:
  // Throws the update's exception as an Error, or an Error if it takes longer than `limit`.
  void wait(const std::string& unit, std::chrono::milliseconds limit);
  void run(const std::function<void()>& work) noexcept;

 private:
  std::mutex mutex_;
  std::condition_variable done_changed_;
  bool done_ = false;
  std::exception_ptr failure_;
};

struct HostWork {
  std::function<void()> run;
  std::function<bool()> can_start = {};  // whether its inputs have arrived; empty: they have
  uint64_t arrival = 0;                  // order in which gradients arrive
  size_t wanted = 0;                     // order in which forward needs the flats
};

// Runs updates one after the other in a thread of its own, which starts with the first update. Of
// the updates that can start, the one forward needs first runs next; if none can start, the one
// whose gradient arrives next.
class HostUpdates {
 public:
  explicit HostUpdates(at::Device device = at::kCPU) : device_(device) {}
  ~HostUpdates();  // waits for the last update
  HostUpdates(const HostUpdates&) = delete;
  HostUpdates& operator=(const HostUpdates&) = delete;

  std::shared_ptr<HostUpdate> add(HostWork work);

 private:
  void loop();

  const at::Device device_;  // of the events that updates wait for
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<std::shared_ptr<HostUpdate>, HostWork>> waiting_;
  bool closed_ = false;
  std::thread thread_;
};

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

void begin_offload(Model& model);  // creates its stream and its update thread
bool stepped_early(const Unit& unit);
bool offloads(const Model& model);  // whether any flat has a HostState

}  // namespace fsdp::shard
