#include "shard/model.h"

#include "shard/engine.h"
#include "shard/registry.h"

namespace fsdp::shard {

Locked::Locked(Model& model) : lock_(model.mutex_), engine_(model.engine_.get()) {}

Locked::Locked(std::shared_ptr<Model> model)
    : model_(std::move(model)), lock_(model_->mutex_), engine_(model_->engine_.get()) {}

Model::Model(World world, at::Device device, ShardOptions options)
    : engine_(std::make_unique<Engine>(std::move(world), device, std::move(options))) {}

Model::~Model() {
  registry::remove(this);
}

const World& Model::world() const {
  return engine_->comm.world();
}

at::Device Model::device() const {
  return engine_->comm.device();
}

void Model::take_over(const std::shared_ptr<Model>& other) {
  Locked theirs(other);
  theirs->gatherer.reshard_all();
  theirs->reducer.finish_reductions();
  for (Flat* flat : theirs->flats()) {
    flat->settle();
    flat->await_gradient();
  }
  Engine& mine = *engine_;  // nobody else has this model yet
  if (theirs->offload.in_use()) mine.offload.begin();
  for (auto& unit : theirs->units) {
    unit->root = false;
    unit->uneven = unit->wants_uneven;
    unit->slot = nullptr;
    unit->apply_reshard_after_forward();  // only a root keeps its parameters by default
    unit->owner = weak_from_this();
    mine.units.push_back(std::move(unit));
  }
  theirs->units.clear();
  theirs->comm.forget_units();
  theirs->gatherer.forget_units();
  theirs->reducer.forget_units();
  other->successor_ = shared_from_this();
}

void Model::add(std::shared_ptr<Unit> unit) {
  unit->owner = weak_from_this();
  engine_->units.push_back(std::move(unit));
}

void Model::seal() {
  for (const auto& unit : engine_->units) {
    for (const Communicator* comm :
         {&unit->group->gather, &unit->group->reduce, &unit->group->replicate})
      if (*comm) communicators_.push_back(*comm);
  }
}

void Model::check_communicators() const {
  for (const Communicator& comm : communicators_) comm.check();
}

std::shared_ptr<Model> live(const std::shared_ptr<Model>& model) {
  if (!model)
    throw Error("this handle holds no sharded model.", "use the handle fully_shard returned.");
  std::shared_ptr<Model> last = model;
  while (auto next = last->successor()) last = std::move(next);
  return last;
}

}  // namespace fsdp::shard
