// Engine: the units of a sharded model, and the parts that work on them. Whoever has a reference to
// it holds the model's lock (model.h).
//
//   CommContext      streams, communicators' calls, and a record of them
//   Gatherer         gathers and reshards units
//   GradientReducer  takes gradients from autograd and reduces them
//   HostOffload      copies to and from host memory, and updates there
//   Masters          who writes to the master shards
//
// It is entered from five places: an operator that reads a parameter (touch.cpp), a saved parameter
// that backward unpacks (touch.cpp), a gradient that arrives (gradients.cpp), the beginning and end
// of a backward (touch.cpp), and calls of the user (handle.cpp, state.cpp).
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fully_shard.h"
#include "shard/comm_context.h"
#include "shard/gatherer.h"
#include "shard/gradient_reducer.h"
#include "shard/masters.h"
#include "shard/offload.h"
#include "shard/unit.h"

namespace fsdp::shard {

struct Background;  // background.h
struct ModuleTree;  // tree.h

struct Engine {
  Engine(World world, at::Device device, ShardOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const ShardOptions options;
  std::vector<std::shared_ptr<Unit>> units;  // in the order of the module tree, the root last
  std::shared_ptr<ModuleTree> tree;
  CommContext comm;
  HostOffload offload;
  Masters masters;
  GradientReducer reducer;
  Gatherer gatherer;
  std::shared_ptr<Background> background;  // checked before every update
  // Counts changes that a recorded step depends on and that show nowhere else: hooks, and where an
  // optimizer keeps its counts.
  uint64_t changes = 0;

  const World& world() const { return comm.world(); }
  at::Device device() const { return comm.device(); }
  std::vector<Flat*> flats() const { return flats_of(units); }
  std::pair<Flat*, size_t> find(const std::string& parameter);  // an Error suggests names

  // Something reads the unit's parameters: an operator, or `by` in backward.
  void use(Unit& unit, const char* by, bool backward);
  // An operator is about to write to a handed-out master of this unit.
  void before_write(Unit& unit, const char* by);
  void hand_out_masters(HandedOut to);
  void begin_backward(const GradientsToCome& coming);
  void end_backward(bool failed);
  void zero_weight_step();  // Sharded::zero_weight_step

  MemoryReport memory() const;

  // --- captures (capture.h) ---
  // Forgets every stream event: one recorded outside a capture can't be waited for inside it, nor
  // the other way round. The device must be idle, or the caller must wait for it.
  void forget_events();
};

}  // namespace fsdp::shard
