// MatrixOptimizer: splits an update into matrices, which go to their owners and back, and the rest,
// which is updated elementwise.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/format.h"
#include "fsdp/fully_shard.h"
#include "fsdp/muon.h"
#include "optim/matrix_work.h"
#include "optim/states.h"
#include "shard/model.h"
#include "shard/update.h"

namespace fsdp {

using optim::FlatUpdate;

namespace {

// A group that chooses only matrices, or only others.
ParamGroup narrowed(ParamGroup group, const std::shared_ptr<optim::MatrixKinds>& kinds,
                    bool matrices) {
  group.where = [kinds, matrices, chosen = std::move(group.where)](const std::string& name,
                                                                   const at::Tensor& parameter) {
    return kinds->names.contains(name) == matrices && chosen && chosen(name, parameter);
  };
  return group;
}

std::vector<ParamGroup> all_groups(const std::shared_ptr<optim::MatrixKinds>& kinds,
                                   std::vector<ParamGroup> of_others, ParamGroup others) {
  std::vector<ParamGroup> all;
  for (const ParamGroup& group : kinds->options.groups) {
    if (!group.where)
      throw Error("a group of matrices has no `where`, so it chooses none.",
                  "norms aren't matrices: put it into the groups of the other parameters.");
    all.push_back(narrowed(group, kinds, /*matrices=*/true));
    all.back().norms = false;
  }
  others.where = [](const std::string&, const at::Tensor&) { return true; };
  of_others.push_back(others);
  for (ParamGroup group : of_others) {
    if (!group.lr) group.lr = others.lr;
    if (!group.weight_decay) group.weight_decay = others.weight_decay;
    all.push_back(narrowed(std::move(group), kinds, /*matrices=*/false));
  }
  return all;
}

optim::States::Names names_of_groups(size_t matrices, size_t groups,
                                     const std::vector<std::string>& of_matrices,
                                     const std::vector<std::string>& of_others) {
  optim::States::Names names;
  for (size_t i = 0; i < groups; ++i) names.push_back(i < matrices ? of_matrices : of_others);
  return names;
}

std::unique_ptr<optim::States> states_for(const Sharded& sharded,
                                          const std::shared_ptr<optim::MatrixKinds>& kinds,
                                          const std::vector<ParamGroup>& groups, double lr,
                                          double weight_decay,
                                          const std::vector<std::string>& of_matrices,
                                          const std::vector<std::string>& of_others) {
  return std::make_unique<optim::States>(
      shard::model_of(sharded), groups, lr, weight_decay,
      names_of_groups(1 + kinds->options.groups.size(), 1 + groups.size(), of_matrices, of_others));
}

}  // namespace

MatrixOptimizer::MatrixOptimizer(const Sharded& sharded, const Setup& setup)
    : MatrixOptimizer(
          sharded,
          std::make_shared<optim::MatrixKinds>(*shard::model_of(sharded)->lock(), setup.matrices),
          setup) {}

MatrixOptimizer::MatrixOptimizer(const Sharded& sharded, std::shared_ptr<optim::MatrixKinds> kinds,
                                 const Setup& setup)
    : Optimizer(states_for(sharded, kinds, all_groups(kinds, setup.other_groups, setup.others),
                           setup.lr, setup.weight_decay, setup.matrix_states, setup.other_states)),
      kinds_(std::move(kinds)),
      work_(std::make_unique<optim::MatrixWork>(*this)) {
  const auto model = states_->model()->lock();
  // Wrong cuts are found now, not at the first step.
  for (const shard::Flat* flat : shard::trainable_flats(*model))
    for (size_t p = 0; p < flat->parameters().size(); ++p) kinds_->matrices_of(*flat, p);
}

MatrixOptimizer::~MatrixOptimizer() = default;

bool MatrixOptimizer::has_matrices(size_t group) const {
  return group <= kinds_->options.groups.size();
}

void MatrixOptimizer::step_in_backward() {
  const auto model = states_->model()->lock();
  if (!shard::host_flats(*model).empty())
    throw Error("step_in_backward() with an optimizer that needs whole matrices.",
                "leave it out: step() updates the units in host memory.");
}

void MatrixOptimizer::update_flats(shard::Engine& model, const std::vector<shard::Flat*>& flats,
                                   const at::Tensor& factor) {
  RECORD_USER_SCOPE(shard::kUpdateLabel);
  Update rest = states_->update(factor);
  std::vector<FlatUpdate> matrices;
  std::set<int64_t> counts;
  for (shard::Flat* flat : flats) {
    Update all = states_->update(factor);
    states_->add(*flat, all);
    matrices.push_back({flat, states_->update(factor), {}});
    for (const Piece& piece : all.pieces) {
      const bool matrix = has_matrices(piece.group);
      if (matrix) counts.insert(piece.count);
      // An empty piece, of a rank without a part of a line, is only counted.
      if (!matrix || optim::length_of(piece) > 0)
        (matrix ? matrices.back().what : rest).pieces.push_back(piece);
    }
    work_->make_room(matrices.back(), states_->model()->device());
  }
  for (const Piece& piece : rest.pieces) counts.erase(piece.count);
  if (!rest.pieces.empty()) prepare(rest)();
  work_->exchange(model, matrices, /*direct=*/true,
                  [&](FlatUpdate& update) { work_->applying(update)(); });
  // Whoever updates other parameters has counted that update.
  if (!rest.counts.defined()) return;
  for (const int64_t count : counts) {
    const at::Tensor updates = rest.counts.select(0, count);
    updates.add_(factor.defined() ? at::isfinite(factor).to(updates.scalar_type())
                                  : at::ones_like(updates));
  }
}

// The host computes directions from momentum and gradients, the device the updates from them, and
// the host applies these.
void MatrixOptimizer::update_host_flats(shard::Engine& model,
                                        const std::vector<std::pair<shard::Flat*, size_t>>& flats,
                                        const shard::HostFactor& factor) {
  const at::Device device = states_->model()->device();
  const bool copies = shard::has_streams(device);
  std::vector<FlatUpdate> matrices;
  std::vector<Update> rest;
  for (const auto& [flat, place] : flats) {
    flat->await_update();
    Update all{.factor = factor.value};
    states_->add(*flat, all);
    rest.push_back({.factor = factor.value});
    matrices.push_back({flat, {.factor = factor.value}, {}});
    for (const Piece& piece : all.pieces)
      if (optim::length_of(piece) > 0)
        (has_matrices(piece.group) ? matrices.back().what : rest.back()).pieces.push_back(piece);
    work_->make_room(matrices.back(), at::kCPU, /*pinned=*/copies);
    shard::update_on_host(model, *flat, place, factor, work_->directing({&matrices.back()}));
  }
  std::vector<FlatUpdate> on_device = matrices;
  for (FlatUpdate& update : on_device) {
    update.flat->await_update();
    for (at::Tensor& direction : update.directions)
      direction = direction.to(device, /*non_blocking=*/true);
  }
  work_->exchange(model, on_device, /*direct=*/false, [](FlatUpdate&) {});
  const shard::HostFactor both{factor.value, std::make_shared<shard::StreamEvent>()};
  for (size_t i = 0; copies && i < matrices.size(); ++i)
    for (size_t j = 0; j < matrices[i].directions.size(); ++j)
      matrices[i].directions[j].copy_(on_device[i].directions[j], /*non_blocking=*/true);
  both.arrived->record(device);  // the factor came before
  for (size_t i = 0; i < flats.size(); ++i)
    shard::update_on_host(model, *flats[i].first, flats[i].second, both,
                          [apply = work_->applying(matrices[i]),
                           others = rest[i].pieces.empty() ? nullptr : prepare(rest[i])] {
                            apply();
                            if (others) others();
                          });
}

}  // namespace fsdp
