// Model: the engine of one sharded model. It gathers units when operators read them, reshards them
// when others need the memory, takes gradients from autograd, reduces them, and serves optimizers,
// checkpoints and reports.
//
// It is entered from five places: an operator that reads a parameter (touch.cpp), a saved parameter
// that backward unpacks (touch.cpp), a gradient that arrives (gradients.cpp), the beginning and end
// of a backward (touch.cpp), and calls of the user. `mutex` orders them: every such entry holds it
// while it reads or writes the model's state, or the state of its units and flats. It is recursive,
// so an entry may call another. Never run a backward while holding it: on a GPU gradients arrive in
// a thread of autograd's. Never hold it for two models at once.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "fsdp/fully_shard.h"
#include "fsdp/world.h"
#include "shard/gradient_route.h"
#include "shard/order.h"
#include "shard/unit.h"

namespace fsdp::shard {

struct ModuleTree;  // tree.h
// The leaves into which a backward accumulates gradients.
using GradientsToCome = std::unordered_set<const c10::TensorImpl*>;
class HostUpdates;  // offload.h
class Profiler;     // profile.h

// Work in the background of training, such as a save. Ends with the model at the latest.
struct Background {
  virtual ~Background() = default;
  virtual void check() = 0;  // throws its failure, once
};

class Model : public std::enable_shared_from_this<Model> {
 public:
  explicit Model(World world, at::Device device);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  mutable std::recursive_mutex mutex;
  const World world;
  at::Device device;
  std::vector<std::shared_ptr<Unit>> units;  // in the order of the module tree, the root last
  std::shared_ptr<ModuleTree> tree;
  ShardOptions options;
  std::shared_ptr<Model> successor;  // the model that took the units over (bottom-up use)

  void add(std::shared_ptr<Unit> unit);
  void take_over(const std::shared_ptr<Model>& other);
  std::vector<Flat*> flats() const;

  // --- gathering (model.cpp) ---
  // Gathers a unit and makes it usable. `by` names the operator (or other caller) that needs it.
  void ensure(Unit& unit, const char* by, bool backward);
  void ensure_family(Unit& unit, const char* by, bool backward);  // with uneven units
  void issue(Unit& unit, const char* by);  // starts the gather of a sharded unit
  void issue_ahead(Unit& unit);            // the same at the user's request
  // Frees a unit's gathered memory. Views of its parameters that still exist throw when read.
  void reshard(Unit& unit);
  void reshard_all();  // pinned units are gathered again at their next use
  bool may_leave(const Unit& unit) const;
  void pin(Unit& unit, bool writable);  // gathered until unpinned, in memory of its own
  void unpin(Unit& unit);
  void changed(Unit& unit);  // the unit's masters were written: its shards and readers follow
  void shards_written();     // all were: ranks that share memory meet before the next gather
  // Collective where ranks share memory: no rank reads parameters from here to the next gather.
  void synchronize_readers(const char* why);

  // --- gradients (gradients.cpp) ---
  void gradient_arrived(Flat& flat, size_t parameter);
  Place open_gradient(Flat& flat, size_t parameter);  // see gradient_route.h
  void close_gradient(Flat& flat, size_t parameter);
  void begin_backward(const GradientsToCome& coming);
  void end_backward(bool failed);
  void reduce(Flat& flat);
  void drop_gradients();            // of a failed backward
  void forget_cleared_gradients();  // cleared by a zero_grad() that isn't ours
  void zero_gradients(bool set_to_none);
  void settle_factor();  // applies a clip factor that no update has taken
  bool sync_gradients = true;
  double divide_factor = 0;
  std::function<void(at::Tensor, const std::string&)> reduce_hook;
  at::Tensor factor;  // gradients are still to be multiplied by this; undefined: by nothing
  std::map<const void*, std::function<int64_t()>> optimizers;  // bytes of each one's states

  // --- masters that others write (update.cpp) ---
  enum class Handed {
    kNowhere,
    kToOptimizer,  // written by update_parameters() only
    kOut,          // written by anybody at any time: every gather looks for changes
  };
  Handed handed = Handed::kNowhere;
  void hand_out_masters(Handed to);
  // An operator is about to write to a handed-out master of this unit.
  void before_write(Unit& unit, const char* by);
  int summoned = 0;  // number of FullParams alive: nothing may update the masters
  void refuse_while_summoned(const std::string& what) const;

  void zero_weight_step();

  // --- offload (offload.cpp) ---
  // On the gather stream: the flat's shard on the device, in its place of `full` or in memory of
  // its own. Its source may be written again after HostState::read.
  at::Tensor bring(Flat& flat, const at::Tensor& full);
  // On a reduction's stream: adds a reduced gradient to the one in host memory, on leave_stream_.
  void send_gradient_to_host(Flat& flat, const at::Tensor& reduced);
  void bring_gradient(Flat& flat);  // into the slot it has just taken
  // Copies the flat's shard, updated on the device, to `host` on leave_stream_.
  void send_shard_to_host(Flat& flat, const at::Tensor& host);
  void shard_changed(Flat& flat);             // its copies elsewhere are out of date
  std::shared_ptr<HostUpdates> host_updates;  // null: nothing is offloaded
  // Collects the kernels of an update for the update thread while they are handed over (update.h).
  std::vector<std::function<void()>>* handed_over = nullptr;
  std::map<const void*, std::function<int64_t()>> host_states;  // like `optimizers`
  // Step in backward: hands the update of a flat to the update thread. Null: not requested.
  std::function<void(Flat& flat)> early_update;
  void step_early(Flat& flat);  // its gradient has arrived; updates the unit once all have
  void end_early_updates();     // the step is over

  // --- CUDA graphs (capture.cpp) ---
  // Counts changes that a recorded step depends on and that show nowhere else: hooks, and where an
  // optimizer keeps its counts.
  uint64_t changes = 0;
  // True while another model's step is recorded and this one has gradients: the step must not add
  // to them.
  bool keeps_gradients = false;
  // Forgets every stream event: one recorded outside a capture can't be waited for inside it, nor
  // the other way round. The device must be idle, or the caller must wait for it.
  void forget_events();
  // Nothing is gathered; side streams follow the current stream from here on.
  void join_side_streams();

  // --- reports ---
  MemoryReport memory() const;
  // The full buffer, from every rank's `shard` (the flat's master or gradient). Collective.
  at::Tensor gather_shard(Flat& flat, const at::Tensor& shard, const char* what);
  std::pair<Flat*, size_t> find(const std::string& parameter);  // an Error suggests names
  void log_event(Event::Kind kind, const Unit& unit, bool backward, bool ahead = false);
  bool recording_events = false;
  std::vector<Event> events;
  Traffic traffic;
  Stalls stalls;  // of the compute stream, while it waits for gathers and reductions
  std::shared_ptr<Profiler> profiler;      // null: not profiled
  std::shared_ptr<Background> background;  // checked before every update

 private:
  friend void begin_offload(Model& model);

  struct Call {  // a collective of a step, so that a rank without data can repeat it
    Unit* unit;
    Flat* flat;  // null: a gather
  };

  // Runs a communicator's call and adds its host time to traffic.host_time.
  template <typename Function>
  auto communicate(Function call) {
    struct Clock {
      std::chrono::nanoseconds& total;
      std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
      ~Clock() { total += std::chrono::steady_clock::now() - start; }
    } clock{traffic.host_time};
    try {
      return call();
    } catch (const Error& error) {
      explain(error);
    }
  }
  // Rethrows, with a hint about units that only some ranks use.
  [[noreturn]] void explain(const Error& error) const;

  Slot* find_slot(Unit& unit, bool may_grow);
  at::Tensor full_view(const Unit& unit, const Flat& flat, const at::Tensor& bytes) const;
  void finish(Unit& unit);
  void prefetch(Unit& unit, bool backward);
  void follow_masters(Unit& unit, const char* by);
  void check_handles(const Unit& unit, const char* when) const;
  void keep_secondary(Unit& unit);
  void note_use(Unit& unit);
  void expect_gradients(const GradientsToCome& coming);
  void agree_on_use();
  void order_reductions();
  void complete(Flat& flat, size_t parameter);
  bool is_complete(const Flat& flat) const;
  bool is_done(const Flat& flat) const;
  void take_turn(Flat& flat);
  void reduce_what_is_done();
  void refuse_if_kept(const Flat& flat) const;
  bool stays(const Flat& flat) const;
  GradientSlot* make_gradient_slot(const Flat& flat, bool ring, bool shared);
  void prepare_gradient_slots();
  GradientSlot* find_ring_slot(const Flat& flat, bool shared_only);
  void take_gradient_slot(Flat& flat);
  void share_gradient(Flat& flat);
  void give_back(Flat& flat);
  void finish_reductions();
  void accumulate(Flat& flat, at::Tensor reduced);
  at::Tensor leaving_part(Flat& flat);
  void show_memory();  // to the profiler, if there is one

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
  // A pass is a forward (or several) and the backward after it.
  std::vector<Unit*> used_;       // in the forward of this pass, by first use
  uint64_t pass_ = 1;
  bool pass_over_ = false;        // the next forward begins a new one
  std::vector<Unit*> sequence_;   // all even units, by first use as far as it is known
  std::vector<Flat*> turns_;      // the reductions of this backward, in the order all ranks know
  size_t next_turn_ = 0;          // those before it were issued, or had no gradient
  Unit* family_ = nullptr;        // the even unit whose uneven ones are gathered
  bool writer_known_ = false;  // whoever writes to the masters was checked since the last backward
  StreamEvent written_;               // every write to a shard so far
  StreamEvent reduced_, replicated_;  // every reduction so far, on each of the two streams
  StreamEvent before_, scattered_;    // hand-over from one stream to the next
  StreamEvent leaving_, left_;        // a reduction is done; every gradient so far is on the host
  StreamEvent summed_;                // and the sum of squares of each of these is known
  uint64_t arrivals_ = 0;             // gradients that arrived on the host
};

// The model behind a handle: its last successor, if it was taken over.
std::shared_ptr<Model> live(const std::shared_ptr<Model>& model);

}  // namespace fsdp::shard
