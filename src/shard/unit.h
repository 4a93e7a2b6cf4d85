// Unit: the parameters that are gathered and resharded together, and their state. Model moves a
// unit from state to state.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/sharding.h"
#include "shard/buffers.h"
#include "shard/flat.h"
#include "shard/group.h"

namespace torch::nn {
class Module;
}

namespace fsdp::shard {

class Model;

inline int64_t aligned_bytes(int64_t bytes) {  // flats of a unit begin at multiples of 256 bytes
  return (bytes + 255) / 256 * 256;
}

struct OwnedModule {  // a module with parameters of its own in a unit
  std::string path;
  std::shared_ptr<torch::nn::Module> module;  // null for TorchScript
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  enum class State {
    kSharded,    // no memory; the parameters carry the key
    kGathering,  // the gather was issued; the parameters still carry the key
    kReady,      // gathered; the key is off, unless keyed_when_ready()
  };

  std::weak_ptr<Model> owner;  // expired once the model is gone
  int id = 0;                  // the same on every rank
  std::string name;            // path of its module, or "root"
  bool root = false;
  std::shared_ptr<Group> group;
  std::vector<std::unique_ptr<Flat>> flats;
  std::vector<OwnedModule> modules;
  std::vector<const void*> tops;  // the modules the unit was made of
  MixedPrecision precision;
  ReshardAfterForward reshard_after_forward;  // as the user chose
  bool strategy_keeps = false;                // SHARD_GRAD_OP and NO_SHARD keep parameters
  int keep_parts = 0;                         // what the two come to; see parts_kept
  bool cast_inputs = false;
  bool meta = false;     // no values yet: built on the meta device, or not to be initialised
  bool watched = false;  // recomputation wants to see every use (tape_hook.h)

  // --- units that only some ranks use ---
  bool uneven = false;              // may be; gathered with its family, by all ranks or by none
  Unit* parent = nullptr;           // of an uneven unit: the even unit around it
  std::vector<Unit*> uneven_units;  // of an even unit: those inside it
  bool wants_uneven = false;        // the user's choice, for when it is no longer a root
  // --- in this backward ---
  bool reached = false;      // it brings a gradient of the unit to this rank
  bool takes_part = false;   // to some rank
  bool family_used = false;  // this rank has gathered the unit with its family

  State state = State::kSharded;
  int busy = 0;           // number of operators that run on it
  bool pinned = false;    // by unshard() or summon_full_params(); stays gathered until unpinned
  bool writable = false;  // summon_full_params(writeback)
  Slot* slot = nullptr;
  std::unique_ptr<Slot> own;
  std::vector<Work> works;
  StreamEvent gathered;
  uint64_t last_use = 0;
  uint64_t last_pass = 0;                          // the last pass (model.h) whose forward used it
  const char* touched_by = "";                     // the operator that last used it in forward
  std::vector<Unit*> forward_next, backward_next;  // prefetch lists set by the user
  bool next_checked = false;

  int64_t numel() const;
  int64_t full_bytes() const;  // of all flats, each aligned to 256 bytes
  bool needs_slot() const;     // gathering needs memory of its own
  int64_t coded_bytes() const;  // what a gather receives in fewer bits, all flats
  // A flat's part of memory for all flats.
  at::Tensor full_view(const Flat& flat, const at::Tensor& bytes) const;
  // Whether a gather sends the flat in fewer bits. summon_full_params() shows exact values.
  bool sends_codes(const Flat& flat) const {
    return flat.gather_wire() != Wire::PLAIN && !writable;
  }
  bool viewed() const;         // a view of a parameter exists outside of the engine
  bool keyed_when_ready() const { return cast_inputs || watched; }
  std::string label(const char* what = "") const;  // unit "layers.0" (what)
  std::chrono::milliseconds timeout() const;       // of its world
  // An Error if the model is gone; `hint` says what to keep alive.
  std::shared_ptr<Model> require_owner(const char* hint) const;

  int parts_kept(const ReshardAfterForward& choice) const {
    return shard::parts_kept(choice, root || strategy_keeps, *group);
  }
  // Sets keep_parts from reshard_after_forward. The unit must be sharded. Collective: all ranks
  // make the same choice.
  void apply_reshard_after_forward();
};

std::vector<Flat*> flats_of(const std::vector<std::shared_ptr<Unit>>& units);

}  // namespace fsdp::shard
