// The handles that users hold: Sharded, Unit, NoSync. Each call goes to the model behind it.
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "fsdp/fully_shard.h"
#include "shard/model.h"
#include "shard/saved_activations.h"

namespace fsdp {

using shard::live;

// --- Sharded: training ---

std::vector<at::Tensor> Sharded::parameters() const {
  auto model = live(model_);
  for (const auto& unit : model->units)
    if (unit->meta)
      throw Error("unit \"" + unit->name + "\" has no values yet.",
                  "call sharded.materialize(device) before making an optimizer.");
  model->hand_out_masters();
  std::vector<at::Tensor> leaves;
  for (shard::Flat* flat : model->flats())
    if (flat->leaf.defined()) leaves.push_back(flat->leaf);
  return leaves;
}

void Sharded::zero_grad(bool set_to_none) const {
  live(model_)->zero_gradients(set_to_none);
}

std::unique_ptr<NoSync> Sharded::no_sync() const {
  return std::make_unique<NoSync>(live(model_));
}

void Sharded::set_requires_gradient_sync(bool sync) const {
  live(model_)->sync_gradients = sync;
}

void Sharded::set_gradient_divide_factor(double factor) const {
  if (!(factor >= 0))
    throw Error("the gradient divide factor is " + std::to_string(factor) + ".",
                "give a positive number, or 0 for the number of ranks.");
  live(model_)->divide_factor = factor;
}

void Sharded::set_reduce_hook(std::function<void(at::Tensor, const std::string&)> hook) const {
  auto model = live(model_);
  model->reduce_hook = std::move(hook);
  ++model->changes;
}

at::Tensor Sharded::scale_loss(const at::Tensor& loss, double weight) const {
  auto model = live(model_);
  if (!(weight >= 0))
    throw Error("scale_loss: the weight of a rank is " + std::to_string(weight) + ".",
                "give its number of tokens or samples; 0 for a rank without data.");
  at::Tensor total = at::tensor(weight, at::TensorOptions().dtype(at::kDouble)).to(model->device);
  const World& world = model->world;
  world.comm().all_reduce(total, ReduceOp::SUM, {.label = "weights of the ranks"});
  // Gradients are averaged over ranks; the factor turns that into the average over all tokens.
  return loss * (weight * world.size() / total).to(loss.scalar_type()).to(loss.device());
}

void Sharded::zero_weight_step() const {
  live(model_)->zero_weight_step();
}

at::Tensor Sharded::output(at::Tensor tensor) const {
  auto type = live(model_)->options.mixed_precision.output_dtype;
  bool cast = type && tensor.defined() && at::isFloatingType(tensor.scalar_type());
  return cast ? tensor.to(*type) : tensor;
}

NoSync::NoSync(std::shared_ptr<shard::Model> model)
    : model_(std::move(model)), before_(model_->sync_gradients) {
  model_->sync_gradients = false;
}

NoSync::~NoSync() {
  model_->sync_gradients = before_;
}

// --- Sharded: units ---

std::vector<Unit> Sharded::units() const {
  auto model = live(model_);
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
  throw Error("there is no unit \"" + name + "\".", "units are " + known + ".");
}

void Sharded::unshard() const {
  for (const Unit& unit : units()) unit.unshard();
}

void Sharded::reshard() const {
  for (const Unit& unit : units()) unit.reshard();
}

void Sharded::record_events(bool on) const {
  auto model = live(model_);
  std::lock_guard lock(model->mutex);
  model->recording_events = on;
  model->events.clear();
}

std::vector<Event> Sharded::events() const {
  auto model = live(model_);
  std::lock_guard lock(model->mutex);
  return model->events;
}

Traffic Sharded::traffic() const {
  std::shared_ptr<shard::Model> model = live(model_);
  std::lock_guard lock(model->mutex);
  model->traffic.exposed += model->stalls.take();
  Traffic traffic = model->traffic;
  if (!shard::has_streams(model->device)) traffic.exposed = traffic.host_time;
  return traffic;
}

void Sharded::count_activations(bool on) const {
  shard::saved_activations::count(on);
}

void Sharded::measure_exposed(bool on) const {
  live(model_)->stalls.on = on;
}

void Sharded::reset_traffic() const {
  std::shared_ptr<shard::Model> model = live(model_);
  std::lock_guard lock(model->mutex);
  model->stalls.take();
  model->traffic = {};
}

// --- Unit ---

Unit::Unit(std::shared_ptr<shard::Unit> unit) : unit_(std::move(unit)) {}

namespace {

shard::Model& model_of(const std::shared_ptr<shard::Unit>& unit) {
  if (!unit)
    throw Error("this handle holds no unit.", "use sharded.unit(name) or unit_of(module).");
  if (!unit->model)
    throw Error("unit \"" + unit->name + "\": its sharded model is gone.",
                "keep the module as long as its units are used.");
  return *unit->model;
}

// The units of a prefetch list; an Error if one is of another model.
std::vector<shard::Unit*> prefetch_list(const shard::Unit& unit,
                                        const std::vector<std::shared_ptr<shard::Unit>>& others) {
  std::vector<shard::Unit*> units;
  for (const auto& other : others) {
    if (!other || other->model != unit.model)
      throw Error("unit \"" + unit.name + "\": its prefetch list names " +
                      (other ? "unit \"" + other->name + "\" of another model." : "no unit."),
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
  return unit_->state == shard::Unit::State::kReady;
}

UnshardWork Unit::unshard(bool async) const {
  shard::Model& model = model_of(unit_);
  std::lock_guard lock(model.mutex);
  UnshardWork work;
  work.units_.push_back(unit_);
  if (async) {
    model.issue_ahead(*unit_);
  } else {
    model.hold(*unit_, /*writable=*/false);
  }
  return work;
}

void UnshardWork::wait() {
  for (const auto& unit : units_) model_of(unit).hold(*unit, /*writable=*/false);
  units_.clear();
}

void Unit::reshard() const {
  shard::Model& model = model_of(unit_);
  if (unit_->held)
    model.release(*unit_);
  else
    model.give_up(*unit_);
}

void Unit::set_reshard_after_forward(ReshardAfterForward reshard) const {
  shard::Model& model = model_of(unit_);
  std::lock_guard lock(model.mutex);
  model.give_up(*unit_);
  int parts = reshard.keep_parts.value_or(unit_->root ? 1 : 0);
  if (parts > 1 && parts < unit_->group->shard_size && unit_->needs_slot())
    unit_->group->neighbours(parts);
  unit_->keep_parts = parts > 1 && parts >= unit_->group->shard_size ? 0 : parts;
}

void Unit::set_modules_to_forward_prefetch(const std::vector<Unit>& units) const {
  model_of(unit_);
  std::vector<std::shared_ptr<shard::Unit>> others;
  for (const Unit& unit : units) others.push_back(unit.unit_);
  unit_->forward_next = prefetch_list(*unit_, others);
  unit_->next_checked = false;
}

void Unit::set_modules_to_backward_prefetch(const std::vector<Unit>& units) const {
  model_of(unit_);
  std::vector<std::shared_ptr<shard::Unit>> others;
  for (const Unit& unit : units) others.push_back(unit.unit_);
  unit_->backward_next = prefetch_list(*unit_, others);
  unit_->next_checked = false;
}

}  // namespace fsdp
