// What optimizers need of a sharded model: its flats, and the beginning and end of an update.
//
// Between begin_update and end_update the masters (and shards) may be written; no rank reads them
// then. With shared memory begin_update waits for every rank, so an update is collective. The
// caller holds the model's lock from begin_update to end_update (Optimizer::step does).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "fsdp/communicator.h"
#include "shard/device_stream.h"
#include "shard/flat.h"

namespace fsdp::shard {

struct Engine;
struct Group;

std::vector<Flat*> all_flats(const Engine& model);
std::vector<Flat*> trainable_flats(const Engine& model);

// Registers an optimizer, for memory() and so that clipping may leave its factor to the update.
// `host_bytes`: bytes of the states in host memory.
void attach_optimizer(Engine& model, const void* optimizer, std::function<int64_t()> state_bytes,
                      std::function<int64_t()> host_bytes);
void detach_optimizer(Engine& model, const void* optimizer);
// Where an optimizer keeps its counts has changed, on which recorded steps depend.
void counts_moved(Engine& model);

// Reshards every unit. Takes and returns the factor that gradients must still be multiplied by (one
// float32 on the model's device, from clip_grad_norm_); undefined: none.
at::Tensor begin_update(Engine& model);
// The masters have changed. `shards_written`: the shards (where they are separate tensors) were
// written too; otherwise they are written from the masters here.
void end_update(Engine& model, bool shards_written);

// Sums `tensor` over all ranks that own other shards of this model, for norms and for counting
// infinities: in place, on the device, in stream order. Collective.
void sum_over_ranks(Engine& model, at::Tensor tensor);
// Sums or averages the loss of a step over all ranks that share the model: in place. Collective.
void reduce_loss(Engine& model, at::Tensor loss, bool average);

// An all-to-all beside the current stream.
class Travelling {
 public:
  // Sends `in_counts[r]` elements of `in` to rank r and gets `out_counts[r]` from it. Both tensors
  // must live until wait() has returned. Collective.
  Travelling(Engine& model, const Communicator& among, at::Tensor out, at::Tensor in,
             std::vector<int64_t> out_counts, std::vector<int64_t> in_counts,
             const CallOptions& call);
  void wait() const;  // the current stream (on the CPU: the caller) waits for `out`

 private:
  at::Device device_;
  Work work_;
  StreamEvent done_;
};

void zero_gradients(Engine& model, bool set_to_none);

// --- flats in host memory (offload.h), between begin_update and end_update ---

bool offloads(const Engine& model);  // whether anything of the model is in host memory
bool on_host(const Flat& flat);      // updated there
// The flats updated on the host, in the order in which forward will need them.
std::vector<Flat*> host_flats(Engine& model);
// Waits for every update under way.
void await_updates(Engine& model);

// The factor of an update, for the host.
struct HostFactor {
  at::Tensor value;                      // undefined: none
  std::shared_ptr<StreamEvent> arrived;  // when it may be read; null: at once
};
HostFactor bring_factor(Engine& model, const at::Tensor& factor);

// Runs `update` later, in the model's update thread, once the gradient and the factor have arrived
// and the device has read the shard. Users of the flat wait for it. `wanted`: the flat's position
// in forward.
void update_on_host(Engine& model, Flat& flat, size_t wanted, const HostFactor& factor,
                    std::function<void()> update);
// From now until the next update or zero_grad, gradients of host_flats() are used as they arrive:
// backward calls `update` for every flat of a unit once the last of them has its gradient. step()
// skips these flats. Nothing may clip or change gradients in between.
void update_in_backward(Engine& model, std::function<void(Engine& model, Flat& flat)> update);
bool updated_in_backward(const Flat& flat);
bool updated_in_backward(const Engine& model);  // some flat was

// Flats with only the shard or the gradient in host memory: the update runs on the device.
std::vector<Flat*> visiting_flats(Engine& model);
// Calls `update` with both copied to the device, in the flat's own fields. The shard is then copied
// back, overlapping with the device's next work.
void update_on_visit(Engine& model, Flat& flat, const std::function<void()>& update);

// Profilers show updates under the unit's name and this label.
inline constexpr const char* kUpdateLabel = "(update)";

}  // namespace fsdp::shard
