// Model: the engine of one sharded model. It gathers units when they are touched, gives them up
// when others need the room, takes gradients from autograd, reduces them, and knows what optimizers
// and onlookers need.
//
// Everything that happens to it comes from five places: an operator that reads a parameter
// (touch.cpp), a saved parameter that backward unpacks (touch.cpp), a gradient that arrives
// (gradients.cpp), the two ends of a backward (touch.cpp), and calls of the user. One mutex orders
// them.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fsdp/fully_shard.h"
#include "fsdp/world.h"
#include "shard/gradient_route.h"
#include "shard/order.h"
#include "shard/unit.h"

namespace fsdp::shard {

struct ModuleTree;  // tree.h
class HostUpdates;  // offload.h
class Profiler;     // profile.h

// Work that goes on behind training, as a save does. Ends, at the latest, with the model.
struct Background {
  virtual ~Background() = default;
  virtual void check() = 0;  // throws what went wrong, once
};

class Model : public std::enable_shared_from_this<Model> {
 public:
  explicit Model(World world, at::Device device);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  std::recursive_mutex mutex;
  const World world;
  at::Device device;
  std::vector<std::shared_ptr<Unit>> units;  // in the order of the module tree, the root last
  std::shared_ptr<ModuleTree> tree;
  ShardOptions options;
  std::shared_ptr<Model> successor;  // who took the units over (bottom-up use)

  void add(std::shared_ptr<Unit> unit);
  void take_over(const std::shared_ptr<Model>& other);
  std::vector<Flat*> flats() const;

  // --- gathering (model.cpp) ---
  // Makes a unit whole and usable. `by` is the operator (or what else) that asks.
  void ensure(Unit& unit, const char* by, bool backward);
  void issue(Unit& unit, const char* by);  // starts its gather, if it is not there
  void issue_ahead(Unit& unit);            // the same at the user's wish
  // Gives up a unit's memory. Views that somebody holds then throw when they are read.
  void give_up(Unit& unit);
  void give_up_all();  // but those held by hand
  bool may_leave(const Unit& unit) const;
  void hold(Unit& unit, bool writable);  // whole until released, in memory of its own
  void release(Unit& unit);
  void changed(Unit& unit);  // the masters of the unit were written: shards and readers follow
  void shards_written();     // everything was: readers wait for each other before the next gather
  // Collective where ranks share memory: nobody reads parameters until the next gather.
  void synchronize_readers(const char* why);

  // --- gradients (gradients.cpp) ---
  void gradient_arrived(Flat& flat, size_t parameter);
  Place open_gradient(Flat& flat, size_t parameter);  // see gradient_route.h
  void close_gradient(Flat& flat, size_t parameter);
  void begin_backward();
  void end_backward(bool failed);
  void reduce(Flat& flat);
  void drop_gradients();            // of a backward that failed
  void forget_cleared_gradients();  // by a zero_grad that is not ours
  void zero_gradients(bool set_to_none);
  void settle_factor();  // applies a clip factor that no update has taken
  bool sync_gradients = true;
  double divide_factor = 0;
  std::function<void(at::Tensor, const std::string&)> reduce_hook;
  at::Tensor factor;  // what gradients must still be multiplied with; undefined: nothing
  std::map<const void*, std::function<int64_t()>> optimizers;  // bytes of their states
  bool masters_handed_out = false;
  void hand_out_masters();
  void zero_weight_step();

  // --- offload (offload.cpp) ---
  // On the gather stream: the flat's shard on the device, in its place of `full` or in memory of
  // its own. What it is copied from may be written again after Home::read.
  at::Tensor bring(Flat& flat, const at::Tensor& full);
  // On a reduction's stream: adds a reduced gradient to the one in host memory, on its own stream.
  void send_home(Flat& flat, const at::Tensor& reduced);
  void bring_gradient(Flat& flat);  // to the slot that it has just taken
  // The flat's shard, updated on the device, goes to `home` on the stream of its own.
  void send_shard_home(Flat& flat, const at::Tensor& home);
  void shard_changed(Flat& flat);             // copies of it elsewhere are out of date
  std::shared_ptr<HostUpdates> host_updates;  // null: nothing is offloaded
  // Kernels of an update that the thread will run, while it is made up (update.h).
  std::vector<std::function<void()>>* handed_over = nullptr;
  std::map<const void*, std::function<int64_t()>> host_states;  // like `optimizers`
  // A step in backward: hands the update of a flat to the thread. Null: none is asked for.
  std::function<void(Flat& flat)> early_update;
  void step_early(Flat& flat);  // its gradient has come: the unit is updated once all have
  void end_early_updates();     // the step is over

  // --- CUDA graphs (capture.cpp) ---
  // Of what a recorded step depends on and nothing else shows: hooks, where an optimizer counts.
  uint64_t changes = 0;
  // While another model's step is recorded: gradients of before are here, and the step must not add
  // to them.
  bool keeps_gradients = false;
  // Forgets every moment: what was recorded outside of a capture cannot be waited for inside of it,
  // nor the other way round. The device must be idle, or the caller wait for it.
  void forget_moments();
  // Nothing is gathered, and side streams follow the current stream from here on.
  void join_side_streams();

  // --- looking ---
  MemoryReport memory() const;
  // The whole buffer from everybody's `shard` (the flat's master or gradient). Collective.
  at::Tensor gather_shard(Flat& flat, const at::Tensor& shard, const char* what);
  std::pair<Flat*, size_t> find(const std::string& parameter);  // an Error suggests names
  void log_event(Event::Kind kind, const Unit& unit, bool backward, bool ahead = false);
  bool recording_events = false;
  std::vector<Event> events;
  Traffic traffic;
  Stalls stalls;                       // of the compute stream, in waits for gathers and reductions
  std::shared_ptr<Profiler> profiler;  // null: nobody looks
  std::shared_ptr<Background> background;  // is asked before every update

 private:
  friend void begin_offload(Model& model);

  struct Call {  // what was sent in a step, so that a rank without data can do the same
    Unit* unit;
    Flat* flat;  // null: a gather
  };

  // A call of a communicator, whose host time is not our own.
  template <typename Function>
  auto theirs(Function call) {
    struct Clock {
      std::chrono::nanoseconds& total;
      std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
      ~Clock() { total += std::chrono::steady_clock::now() - start; }
    } clock{traffic.host_time};
    return call();
  }

  Slot* find_slot(Unit& unit, bool may_grow);
  at::Tensor full_view(const Unit& unit, const Flat& flat, const at::Tensor& bytes) const;
  void finish(Unit& unit);
  void prefetch(Unit& unit, bool backward);
  void follow_masters(Unit& unit, const char* by);
  void check_handles(const Unit& unit, const char* when) const;
  void keep_secondary(Unit& unit);
  void complete(Flat& flat, size_t parameter);
  void refuse_if_kept(const Flat& flat) const;
  bool stays(const Flat& flat) const;
  void take_gradient_slot(Flat& flat);
  void give_back(Flat& flat);
  void finish_reductions();
  void accumulate(Flat& flat, at::Tensor reduced);
  at::Tensor leaving_part(Flat& flat);
  void show_memory();  // to the profiler

  SideStream gather_stream_, reduce_stream_, replicate_stream_, leave_stream_;
  Order order_;
  std::vector<std::unique_ptr<Slot>> ring_;
  std::vector<std::unique_ptr<GradientSlot>> gradient_slots_;
  std::map<Flat*, GradientSlot*> own_gradient_slots_;
  std::vector<Call> calls_, last_calls_;
  uint64_t uses_ = 0;
  bool stale_readers_ = false;  // shards were written since the ranks last met
  bool in_backward_ = false;
  bool grown_ = false;
  Moment written_;               // every write to a shard so far
  Moment reduced_, replicated_;  // every reduction so far, on either stream
  Moment before_, scattered_;    // handed from one stream to the next
  Moment leaving_, left_;        // a reduction is done; every gradient so far is on the host
  Moment summed_;                // and the squares of all of these are known
  uint64_t arrivals_ = 0;        // of gradients there
};

// The model behind a handle: the one that took it over, if one did.
std::shared_ptr<Model> live(const std::shared_ptr<Model>& model);

}  // namespace fsdp::shard
