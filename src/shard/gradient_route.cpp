#include "shard/gradient_route.h"

#include <torch/csrc/autograd/variable.h>

#include "shard/engine.h"
#include "shard/model.h"

namespace fsdp::shard {
namespace {

std::shared_ptr<Model> owner_of_gradient(const std::shared_ptr<Unit>& unit) {
  auto model = unit ? unit->owner.lock() : nullptr;
  if (!model)
    throw Error("a layer writes the gradient of a parameter whose sharded model is gone.",
                "keep the module and its handle alive as long as graphs made with it are used.");
  return model;
}

}  // namespace

void GradientRoute::expect() {
  auto unit = unit_.lock();
  const auto model = owner_of_gradient(unit);
  const Locked locked = model->lock();
  Flat& flat = *unit->flats[flat_];
  ++flat.expected[parameter_];
  expects_ = since_ == flat.expectations ? expects_ + 1 : 1;
  since_ = flat.expectations;
}

GradientRoute::~GradientRoute() {
  auto unit = expects_ > 0 ? unit_.lock() : nullptr;
  const auto model = unit ? unit->owner.lock() : nullptr;
  if (!model) return;
  const Locked locked = model->lock();
  Flat& flat = *unit->flats[flat_];
  if (since_ == flat.expectations) flat.expected[parameter_] -= expects_;
}

GradientPlace GradientRoute::open() {
  auto unit = unit_.lock();
  return owner_of_gradient(unit)->lock()->reducer.open(*unit->flats[flat_], parameter_);
}

void GradientRoute::close() {
  auto unit = unit_.lock();
  --expects_;
  owner_of_gradient(unit)->lock()->reducer.close(*unit->flats[flat_], parameter_);
}

c10::intrusive_ptr<GradientRoute> route_of(const at::Tensor& parameter) {
  Flat* flat = flat_of(parameter);
  if (!flat || !parameter.requires_grad() || flat->unit().owner.expired()) return {};
  size_t index = flat->index_of(parameter);
  if (index == flat->parameters().size()) return {};  // a view of a parameter
  if (flat->hooked[index] || !torch::autograd::impl::hooks(parameter).empty()) return {};
  const auto& flats = flat->unit().flats;
  size_t place = 0;
  while (flats[place].get() != flat) ++place;
  return c10::make_intrusive<GradientRoute>(flat->unit().shared_from_this(), place, index);
}

}  // namespace fsdp::shard
