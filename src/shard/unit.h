// Unit: what is gathered and given up together, and its state. Model moves it between states.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fsdp/communicator.h"
#include "fsdp/mesh.h"
#include "fsdp/sharding.h"
#include "shard/buffers.h"
#include "shard/flat.h"

namespace torch::nn {
class Module;
}

namespace fsdp::shard {

class Model;

// The ranks a unit is spread over. Gathers and reductions have communicators of their own, so that
// neither waits in the other's queue.
struct Group {
  DeviceMesh mesh;
  int number = 0;    // tells groups of one world apart, the same on every rank
  std::string text;  // "shard=4"
  int shard_size = 1, shard_rank = 0;
  int replicate_size = 1;
  Communicator gather, reduce;  // along "shard"
  Communicator replicate;       // along "replicate"
  bool shares_memory = false;   // all ranks of `gather` are on one host, over shm
  // Neighbours that hold 1/parts each (reshard_after_forward = n).
  const Communicator& neighbours(int parts);

 private:
  std::vector<std::pair<int, Communicator>> neighbours_;
};

struct OwnedModule {  // a module with parameters of its own in a unit
  std::string path;
  std::shared_ptr<torch::nn::Module> module;  // null for TorchScript
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  enum class State {
    kSharded,    // no memory; the parameters carry the key
    kGathering,  // the gather was issued; the parameters still carry the key
    kReady,      // whole; the key is off, unless keyed_when_ready()
  };

  Model* model = nullptr;  // null once the model is gone
  int id = 0;              // the same on every rank
  std::string name;        // path of its module; "root"
  bool root = false;
  std::shared_ptr<Group> group;
  std::vector<std::unique_ptr<Flat>> flats;
  std::vector<OwnedModule> modules;
  std::vector<const void*> tops;  // the modules that it was made of
  MixedPrecision precision;
  int keep_parts = 0;  // reshard_after_forward: 0 nothing, 1 everything, n a part
  bool cast_inputs = false;
  bool meta = false;  // has no values yet: built on the meta device, or not to be initialised
  bool watched = false;  // recomputation wants to see every use (tape_hook.h)

  State state = State::kSharded;
  int busy = 0;           // operators that run on it
  bool held = false;      // by unshard() or summon_full_params(): not given up by itself
  bool writable = false;  // summon_full_params(writeback)
  Slot* slot = nullptr;
  std::unique_ptr<Slot> own;
  std::vector<Work> works;
  Moment gathered;
  uint64_t last_use = 0;
  const char* touched_by = "";                     // the operator that last brought it in forward
  std::vector<Unit*> forward_next, backward_next;  // set by hand
  bool next_checked = false;

  int64_t numel() const;
  int64_t full_bytes() const;  // of all flats, each on a boundary of 256 bytes
  bool needs_slot() const;     // gathering needs memory of its own
  bool pinned() const;
  bool keyed_when_ready() const { return cast_inputs || watched; }
  std::string label(const char* what) const;
};

}  // namespace fsdp::shard
