// The handles users hold: Sharded, Unit, NoSync. Each call takes the lock of the model behind the
// handle (model.h).
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "fsdp/fully_shard.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/saved_activations.h"
#include "shard/update.h"

namespace fsdp {

using shard::live;
using shard::Locked;

std::shared_ptr<shard::Model> shard::model_of(const Sharded& sharded) {
  return live(sharded.model_);
}

// --- Sharded: training ---

namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

Named handed_out(const Sharded& sharded, shard::HandedOut to) {
  const Locked model = shard::lock(sharded);
  model->hand_out_masters(to);
  Named named;
  for (shard::Flat* flat : model->flats())
    for (size_t i = 0; i < flat->leaves.size(); ++i)
      if (flat->leaves[i].defined())
        named.emplace_back(flat->parameters()[i].name(), flat->leaves[i]);
  return named;
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> Sharded::named_parameters() const {
  return handed_out(*this, shard::HandedOut::kToAnybody);
}

std::vector<at::Tensor> Sharded::parameters() const {
  std::vector<at::Tensor> leaves;
  for (auto& [name, leaf] : named_parameters()) leaves.push_back(leaf);
  return leaves;
}

std::vector<at::Tensor> Sharded::parameters_to_update() const {
  std::vector<at::Tensor> leaves;
  for (auto& [name, leaf] : handed_out(*this, shard::HandedOut::kToOptimizer))
    leaves.push_back(leaf);
  return leaves;
}

void Sharded::update_parameters(const std::function<void()>& write) const {
  const Locked model = shard::lock(*this);
  model->reducer.settle_factor();
  shard::begin_update(*model);
  try {
    shard::Unseen unseen;
    write();
  } catch (...) {
    shard::end_update(*model, /*shards_written=*/false);
    throw;
  }
  shard::end_update(*model, /*shards_written=*/false);
}

void Sharded::zero_grad(bool set_to_none) const {
  shard::lock(*this)->reducer.zero(set_to_none);
}

NoSync Sharded::no_sync() const {
  return NoSync(live(model_));
}

void Sharded::set_requires_gradient_sync(bool sync) const {
  const Locked model = shard::lock(*this);
  model->reducer.set_sync(sync);
}

void Sharded::set_gradient_divide_factor(double factor) const {
  if (!(factor >= 0))
    throw Error(formatted("the gradient divide factor is {:f}.", factor),
                "pass a positive number, or 0 for the number of ranks.");
  const Locked model = shard::lock(*this);
  model->reducer.set_divide_factor(factor);
}

void Sharded::set_reduce_hook(std::function<void(at::Tensor, const std::string&)> hook) const {
  const Locked model = shard::lock(*this);
  model->reducer.set_hook(std::move(hook));
  ++model->changes;
}

at::Tensor Sharded::scale_loss(const at::Tensor& loss, double weight) const {
  auto model = live(model_);
  if (!(weight >= 0))
    throw Error(formatted("scale_loss: the weight of this rank is {:f}.", weight),
                "pass its number of tokens or samples, or 0 for a rank without data.");
  at::Tensor total = at::tensor(weight, at::TensorOptions().dtype(at::kDouble)).to(model->device());
  const World& world = model->world();
  world.comm().all_reduce(total, ReduceOp::SUM, {.label = "weights of the ranks"});
  // Gradients are averaged over ranks; the factor turns that into the average over all tokens.
  return loss * (weight * world.size() / total).to(loss.scalar_type()).to(loss.device());
}

void Sharded::zero_weight_step() const {
  shard::lock(*this)->zero_weight_step();
}

at::Tensor Sharded::output(at::Tensor tensor) const {
  auto type = shard::lock(*this)->options.mixed_precision.output_dtype;
  bool cast = type && tensor.defined() && at::isFloatingType(tensor.scalar_type());
  return cast ? tensor.to(*type) : tensor;
}

NoSync::NoSync(std::shared_ptr<shard::Model> model) : model_(std::move(model)) {
  const Locked engine = model_->lock();
  before_ = engine->reducer.syncs();
  engine->reducer.set_sync(false);
}

NoSync::~NoSync() {
  if (model_) model_->lock()->reducer.set_sync(before_);
}

// --- Sharded: units ---

std::vector<Unit> Sharded::units() const {
  const Locked model = shard::lock(*this);
  std::vector<Unit> units;
  for (const auto& unit : model->units)
    if (unit->root) units.emplace_back(unit);
  for (const auto& unit : model->units)
    if (!unit->root) units.emplace_back(unit);
  return units;
}

Unit Sharded::unit(const std::string& name) const {
  std::string known;
  for (const Unit& unit : units()) {
    if (unit.name() == name) return unit;
    if (known.size() < 200) known += (known.empty() ? "\"" : ", \"") + unit.name() + "\"";
  }
  throw Error(formatted("there is no unit \"{}\".", name), formatted("the units are {}.", known));
}

void Sharded::unshard() const {
  for (const Unit& unit : units()) unit.unshard();
}

void Sharded::reshard() const {
  for (const Unit& unit : units()) unit.reshard();
}

void Sharded::record_events(bool on) const {
  const Locked model = shard::lock(*this);
  model->comm.record_events(on);
}

std::vector<Event> Sharded::events() const {
  const Locked model = shard::lock(*this);
  return model->comm.events();
}

Traffic Sharded::traffic() const {
  const Locked model = shard::lock(*this);
  return model->comm.take_traffic();
}

void Sharded::count_activations(bool on) const {
  shard::saved_activations::count(on);
}

void Sharded::measure_exposed(bool on) const {
  const Locked model = shard::lock(*this);
  model->comm.stalls().on = on;
}

void Sharded::reset_traffic() const {
  const Locked model = shard::lock(*this);
  model->comm.reset_traffic();
}

// --- Unit ---

Unit::Unit(std::shared_ptr<shard::Unit> unit) : unit_(std::move(unit)) {}

namespace {

Locked locked_model(const std::shared_ptr<shard::Unit>& unit) {
  if (!unit)
    throw Error("this handle holds no unit.", "use sharded.unit(name) or unit_of(module).");
  return Locked(unit->require_owner("keep the module alive as long as its units are used."));
}

// The units of a prefetch list; an Error if one belongs to another model.
std::vector<shard::Unit*> prefetch_list(const shard::Unit& unit,
                                        const std::vector<std::shared_ptr<shard::Unit>>& others) {
  std::vector<shard::Unit*> units;
  for (const auto& other : others) {
    if (!other || other->owner.lock() != unit.owner.lock())
      throw Error(formatted("unit \"{}\": its prefetch list has {}.", unit.name,
                            other ? other->label() + " of another model" : "an empty handle"),
                  "use units of the same sharded model (sharded.units(), unit_of(module)).");
    units.push_back(other.get());
  }
  return units;
}

}  // namespace

const std::string& Unit::name() const {
  return unit_->name;
}
int64_t Unit::numel() const {
  return unit_->numel();
}
bool Unit::is_unsharded() const {
  const auto model = unit_->owner.lock();
  if (!model) return false;
  const Locked locked = model->lock();
  return unit_->state == shard::Unit::State::kReady;
}

UnshardHandle Unit::unshard(bool async_op) const {
  const Locked model = locked_model(unit_);
  UnshardHandle work;
  work.units_.push_back(unit_);
  if (async_op) {
    model->gatherer.issue_ahead(*unit_);
  } else {
    model->gatherer.pin(*unit_, /*writable=*/false);
  }
  return work;
}

void UnshardHandle::wait() {
  for (const auto& unit : units_) locked_model(unit)->gatherer.pin(*unit, /*writable=*/false);
  units_.clear();
}

void Unit::reshard() const {
  const Locked model = locked_model(unit_);
  if (unit_->pinned)
    model->gatherer.unpin(*unit_);
  else
    model->gatherer.reshard(*unit_);
}

void Unit::set_reshard_after_forward(ReshardAfterForward choice) const {
  const Locked model = locked_model(unit_);
  unit_->parts_kept(choice);  // throws before anything changes
  model->gatherer.reshard(*unit_);
  unit_->reshard_after_forward = choice;
  unit_->apply_reshard_after_forward();
}

void Unit::set_modules_to_forward_prefetch(const std::vector<Unit>& units) const {
  std::vector<std::shared_ptr<shard::Unit>> others;
  for (const Unit& unit : units) others.push_back(unit.unit_);
  const Locked model = locked_model(unit_);
  unit_->forward_next = prefetch_list(*unit_, others);
  unit_->next_checked = false;
}

void Unit::set_modules_to_backward_prefetch(const std::vector<Unit>& units) const {
  std::vector<std::shared_ptr<shard::Unit>> others;
  for (const Unit& unit : units) others.push_back(unit.unit_);
  const Locked model = locked_model(unit_);
  unit_->backward_next = prefetch_list(*unit_, others);
  unit_->next_checked = false;
}

}  // namespace fsdp
