#include "fsdp/optim.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>

#include "fsdp/fully_shard.h"
#include "optim/require.h"
#include "optim/states.h"
#include "shard/model.h"
#include "shard/update.h"

namespace fsdp {

using optim::require;

ParamGroup no_decay() {
  return {
      .where = [](const std::string&, const at::Tensor& parameter) { return parameter.dim() <= 1; },
      .norms = true,
      .weight_decay = 0.0};
}

optim::States& optim::states_of(const Optimizer& optimizer) {
  return *optimizer.states_;
}

Optimizer::Optimizer(const Sharded& sharded, std::vector<ParamGroup> groups, double lr,
                     double weight_decay, std::vector<std::string> state_names)
    : Optimizer(std::make_unique<optim::States>(shard::model_of(sharded), std::move(groups), lr,
                                                weight_decay,
                                                optim::States::Names{std::move(state_names)})) {}

Optimizer::Optimizer(std::unique_ptr<optim::States> states) : states_(std::move(states)) {
  shard::attach_optimizer(
      *states_->model()->lock(), this, [this] { return states_->bytes(); },
      [this] { return states_->bytes(/*on_host_only=*/true); });
}

Optimizer::~Optimizer() {
  shard::detach_optimizer(*states_->model()->lock(), this);
}

const std::vector<Optimizer::Group>& Optimizer::groups() const {
  return states_->groups;
}

bool Optimizer::capturable() const {
  return states_->capturable();
}

void Optimizer::set_capturable(bool on) {
  states_->set_capturable(on);
}

int64_t Optimizer::state_bytes() const {
  return states_->bytes();
}

void Optimizer::step() {
  const auto model = states_->model()->lock();
  if (shard::live(states_->model()) != states_->model())
    throw Error("the model was sharded as a part of a larger one after its optimizer was created.",
                "create the optimizer after the last call of fully_shard.");
  at::NoGradGuard no_grad;
  const at::Tensor factor = shard::begin_update(*model);
  const bool skipped =
      factor.defined() && factor.device().is_cpu() && !std::isfinite(factor.item<float>());
  if (!skipped) {
    const auto host_flats = shard::host_flats(*model);
    // This finds out that the disk is too small before anything is updated.
    for (const auto* flat : host_flats)
      if (flat->grad.defined()) states_->prepare(*flat);
    update_on_device(*model, factor);
    std::vector<std::pair<shard::Flat*, size_t>> due;
    for (size_t i = 0; i < host_flats.size(); ++i)
      if (host_flats[i]->grad.defined() && !shard::updated_in_backward(*host_flats[i]))
        due.emplace_back(host_flats[i], i);
    if (!due.empty()) update_host_flats(*model, due, shard::bring_factor(*model, factor));
  }
  shard::end_update(*model, /*shards_written=*/true);
}

void Optimizer::step_in_backward() {
  const auto model = states_->model()->lock();
  const auto flats = shard::host_flats(*model);
  shard::update_in_backward(*model, [this, flats](shard::Engine& engine, shard::Flat& flat) {
    at::NoGradGuard no_grad;
    const auto place = std::find(flats.begin(), flats.end(), &flat) - flats.begin();
    update_on_host(engine, flat, static_cast<size_t>(place), {});
  });
}

// All flats at once, except those that are copied to the device one by one.
void Optimizer::update_on_device(shard::Engine& model, const at::Tensor& factor) {
  std::vector<shard::Flat*> at_once;
  for (auto* flat : shard::trainable_flats(model))
    if (flat->grad.defined() && !flat->host) at_once.push_back(flat);
  if (!at_once.empty()) update_flats(model, at_once, factor);
  const shard::Flat* before[2] = {nullptr, nullptr};
  for (auto* flat : shard::visiting_flats(model)) {
    if (!flat->grad.defined()) continue;
    if (before[0]) before[0]->settle();  // at most two at once, or all might be on the device
    before[0] = std::exchange(before[1], flat);
    shard::update_on_visit(model, *flat, [&] { update_flats(model, {flat}, factor); });
    states_->forget_pieces(*flat);  // which would keep the copies on the device
  }
}

void Optimizer::update_flats(shard::Engine&, const std::vector<shard::Flat*>& flats,
                             const at::Tensor& factor) {
  Update what = states_->update(factor);
  for (auto* flat : flats) states_->add(*flat, what);
  RECORD_USER_SCOPE(shard::kUpdateLabel);
  prepare(what)();
}

void Optimizer::update_host_flats(shard::Engine& model,
                                  const std::vector<std::pair<shard::Flat*, size_t>>& flats,
                                  const shard::HostFactor& factor) {
  for (const auto& [flat, place] : flats) update_on_host(model, *flat, place, factor);
}

// Flats in host memory are updated there, one by one, in a thread of their own.
void Optimizer::update_on_host(shard::Engine& model, shard::Flat& flat, size_t place,
                               const shard::HostFactor& factor) {
  flat.await_update();
  Update one{.factor = factor.value};
  states_->add(flat, one);
  shard::update_on_host(model, flat, place, factor, prepare(one));
}

void Optimizer::zero_grad(bool set_to_none) {
  shard::zero_gradients(*states_->model()->lock(), set_to_none);
}

double Optimizer::lr(size_t group) const {
  const auto model = states_->model()->lock();
  return groups().at(group).lr;
}

void Optimizer::set_lr(double lr) {
  const auto model = states_->model()->lock();
  for (size_t i = 0; i < groups().size(); ++i)
    if (!states_->own_lr(i)) set_lr(lr, i);
}

void Optimizer::set_lr(double lr, size_t group) {
  const auto model = states_->model()->lock();
  require(lr >= 0, "set_lr", "lr", lr, "0 or more", "3e-4 is usual.");
  require(group < groups().size(), "set_lr", "group", group, "one of groups()",
          "0 is the default group, 1 the first of the options' groups.");
  if (std::exchange(states_->groups[group].lr, lr) != lr) states_->write_rate(group, 0, lr);
}

void Optimizer::set_weight_decay(double weight_decay, size_t group) {
  const auto model = states_->model()->lock();
  require(weight_decay >= 0, "set_weight_decay", "weight_decay", weight_decay, "0 or more",
          "0 turns it off.");
  require(group < groups().size(), "set_weight_decay", "group", group, "one of groups()",
          "0 is the default group, 1 the first of the options' groups.");
  if (std::exchange(states_->groups[group].weight_decay, weight_decay) != weight_decay)
    states_->write_rate(group, 1, weight_decay);
}

}  // namespace fsdp
