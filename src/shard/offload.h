// Offload: flats whose shard, gradient, or master and states live in host memory, and the thread
// that updates them there.
//
// A flat with a Home is computed with on the device like any other. What differs is the way there
// and back: a gather begins with a copy of the shard to the device, a reduced gradient is copied to
// the host while backward goes on, and optimizer.step() hands the update to a thread, flat by flat
// in the order of forward. Whoever wants the flat next waits for its own update and no other, so
// the updates overlap with the next forward. Where the master and the states stay on the device,
// the rest comes there for its update, one flat after the other (update_on_visit).
//
// Who may touch host memory: the thread, from the moment an update is handed to it until it is
// done; the device, until the moments `read` and `left` have passed; else the model, under its
// mutex. Flat::settle() and Flat::await_gradient() wait for the first two. In the hot path nothing
// waits for the device: what gathers and reduces waits for the thread only.
//
// On the CPU as the device everything is the same, but for copies that are done when they return.
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

// Which units a fraction of the model comes to: the last ones, as long as they do not exceed it.
// Their gradients come first in backward, and forward wants them last. The root's come last, and
// forward wants them first.
struct UnitShare {
  int64_t numel;
  bool root;
};
std::vector<bool> last_units(const std::vector<UnitShare>& units, double fraction);

// The update of one flat, handed to the thread.
class HostUpdate {
 public:
  // Throws what the update threw, or an Error when it takes longer than `limit`.
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
  std::function<bool()> can_start = {};  // what it needs has come; none: it has
  uint64_t arrival = 0;                  // what comes first has the smallest
  size_t wanted = 0;                     // what forward wants first has the smallest
};

// Runs updates one after the other in a thread of its own, which starts with the first: of those
// that can start the one that forward wants first; where none can, the one whose gradient comes
// next.
class HostUpdates {
 public:
  explicit HostUpdates(at::Device device = at::kCPU) : device_(device) {}
  ~HostUpdates();  // after the last update
  HostUpdates(const HostUpdates&) = delete;
  HostUpdates& operator=(const HostUpdates&) = delete;

  std::shared_ptr<HostUpdate> add(HostWork work);

 private:
  void loop();

  const at::Device device_;  // whose events are looked at
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<std::shared_ptr<HostUpdate>, HostWork>> waiting_;
  bool closed_ = false;
  std::thread thread_;
};

// What a flat in host memory has beside its tensors.
struct Home {
  bool parameters = false;  // the shard lies there, and nothing of it stays on the device
  bool gradients = false;   // the gradient lies there
  bool optimizer = false;   // master and states do, and so the shard and the gradient
  bool pinned = true;
  at::Tensor resident;   // [shard_numel] on the device, gathered from; undefined: the shard is
                         // copied into its place of every gather
  bool stale = true;     // the shard was written since `resident` was copied from it
  Moment read;           // the device has read the shard
  Moment left;           // the gradient has come to the host
  bool brought = false;  // … and was copied to the slot again, where the next ones are added
  // The sum of the gradient's squares, one float64 on the device. Not valid once the gradient is
  // changed on the host.
  at::Tensor square;
  bool square_valid = false;
  std::shared_ptr<HostUpdate> update;  // the last; null: none that has not been waited for
  uint64_t arrival = 0;                // of the gradient, among all
  bool due = false;                    // the gradient of a step in backward has come
  bool stepped = false;                // and was used: optimizer.step() has nothing left to do
  std::string directory;               // for the master and the states; empty: in memory
  std::shared_ptr<Parked> parked;      // these, once there are states (on_disk.h)
};

// What of a flat lies in host memory.
bool shard_at_home(const Flat& flat);
bool gradient_at_home(const Flat& flat);
bool updated_at_home(const Flat& flat);

// [numel] of zeros in host memory, pinned where a GPU is there and it is wanted; without memory for
// a model on the meta device.
at::Tensor host_zeros(int64_t numel, at::ScalarType type, at::Device device, bool pinned);

// An Error when the options contradict each other, or what the rest of the options asks for.
void check_offload(const Offload& offload);

void begin_offload(Model& model);  // its stream and thread
bool stepped_early(const Unit& unit);
bool offloads(const Model& model);  // whether any flat has a home

}  // namespace fsdp::shard
