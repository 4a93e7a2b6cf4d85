#include "shard/gradient_route.h"

#include <torch/csrc/autograd/variable.h>

#include "shard/model.h"

namespace fsdp::shard {
namespace {

Flat* flat_of(const at::Tensor& tensor) {
  StorageTag* tag = tensor.defined() && tensor.has_storage() ? tag_of(tensor) : nullptr;
  bool ours = tag && tag->kind == StorageTag::kParameters;
  return ours ? static_cast<Flat*>(tag->owner) : nullptr;
}

Model& model_of_gradient(const std::shared_ptr<Unit>& unit) {
  if (!unit || !unit->model)
    throw Error("a layer writes the gradient of a parameter whose sharded model is gone.",
                "keep the module and its handle alive as long as graphs made with it are used.");
  return *unit->model;
}

}  // namespace

void GradientRoute::expect() {
  auto unit = unit_.lock();
  std::lock_guard lock(model_of_gradient(unit).mutex);
  Flat& flat = *unit->flats[flat_];
  ++flat.expected[parameter_];
  expects_ = since_ == flat.expectations ? expects_ + 1 : 1;
  since_ = flat.expectations;
}

GradientRoute::~GradientRoute() {
  auto unit = expects_ > 0 ? unit_.lock() : nullptr;
  if (!unit || !unit->model) return;
  std::lock_guard lock(unit->model->mutex);
  Flat& flat = *unit->flats[flat_];
  if (since_ == flat.expectations) flat.expected[parameter_] -= expects_;
}

Place GradientRoute::open() {
  auto unit = unit_.lock();
  return model_of_gradient(unit).open_gradient(*unit->flats[flat_], parameter_);
}

void GradientRoute::close() {
  auto unit = unit_.lock();
  --expects_;
  model_of_gradient(unit).close_gradient(*unit->flats[flat_], parameter_);
}

c10::intrusive_ptr<GradientRoute> route_of(const at::Tensor& parameter) {
  Flat* flat = flat_of(parameter);
  if (!flat || !parameter.requires_grad() || !flat->unit().model) return {};
  size_t index = flat->index_of(parameter);
  if (index == flat->parameters().size()) return {};  // a view of a parameter
  if (flat->hooked[index] || !torch::autograd::impl::hooks(parameter).empty()) return {};
  const auto& flats = flat->unit().flats;
  size_t place = 0;
  while (flats[place].get() != flat) ++place;
  return c10::make_intrusive<GradientRoute>(flat->unit().shared_from_this(), place, index);
}

}  // namespace fsdp::shard
