#include "checkpoint/save_plan.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <cctype>

#include "fsdp/error.h"
#include "fsdp/optim.h"

namespace fsdp::checkpoint {
namespace {

void add_whole(SavePlan& plan, std::vector<KeyPath> paths, const at::Tensor& tensor) {
  plan.chunks.push_back({std::move(paths), tensor.sizes().vec(), whole(tensor)});
}

void require_values(const shard::Unit& unit) {
  if (unit.meta)
    throw Error("unit \"" + unit.name + "\" has no values yet.",
                "call sharded.materialize(device) before the model is saved.");
}

// A flat's master; the flat's parameters come in a row, and a split master is joined for all of
// them.
class Masters {
 public:
  const at::Tensor& of(const shard::Flat& flat) {
    if (flat_ != &flat) master_ = flat.read_master();
    flat_ = &flat;
    return master_;
  }

 private:
  const shard::Flat* flat_ = nullptr;
  at::Tensor master_;
};

void plan_tensors(SavePlan& plan, shard::Model& model, const Optimizer* optimizer) {
  Turns turns;
  Masters masters;
  const bool first = model.world.rank() == 0;
  for (const auto& sharded : sharded_parameters(model)) {
    shard::Flat& flat = *sharded.flat;
    require_values(flat.unit());
    const auto& p = sharded.parameter();
    // Shards of one tensor in several places: its master, then its states.
    const auto add = [&](std::vector<KeyPath> paths, const at::Tensor& shard) {
      auto parts = parts_of(flat, sharded.index, shard);
      int64_t bytes = 0;
      for (const auto& part : parts) bytes += static_cast<int64_t>(part.memory.nbytes());
      if (flat.layout().numel(sharded.index) == 0 && flat.rank() == 0)
        parts.push_back({{std::vector<int64_t>(p.sizes.size(), 0), p.sizes},
                         shard.detach().narrow(0, 0, 0).view(p.sizes)});
      if (!turns.mine(sharded, bytes)) return;
      for (auto& part : parts) plan.chunks.push_back({paths, p.sizes, std::move(part)});
    };
    std::vector<KeyPath> paths;
    for (const auto& name : p.names) paths.push_back({"model", name});
    add(std::move(paths), masters.of(flat));
    if (!optimizer || !p.handle.requires_grad() || optimizer->steps(flat) == 0) continue;
    for (const auto& [name, state] : optimizer->state(flat))
      add({{"optim", "state", p.name(), name}}, state);
    if (first)  // a tensor of float32 without dimensions, as torch has it
      add_whole(plan, {{"optim", "state", p.name(), "step"}},
                at::full({}, optimizer->steps(flat), at::kFloat));
  }
  if (!first) return;
  for (const auto& [name, tensor] : replicated_tensors(model)) {
    if (tensor.is_meta())
      throw Error("\"" + name + "\" has no values yet.",
                  "call sharded.materialize(device) before the model is saved.");
    add_whole(plan, {{"model", name}},
              tensor.is_non_overlapping_and_dense() ? tensor : tensor.clone());
  }
}

// "rank3" is where a rank's own values are kept.
bool is_rank(const std::string& key) {
  const std::string step = key.substr(0, key.find('.'));
  return step.size() > 4 && step.starts_with("rank") &&
         std::all_of(step.begin() + 4, step.end(),
                     [](unsigned char c) { return std::isdigit(c) != 0; });
}

void plan_extra(SavePlan& plan, const Extra& extra, const KeyPath& beneath) {
  for (const auto& [key, value] : extra) {
    if (key.empty() || (beneath.size() == 1 && is_rank(key)))
      throw Error("extra values cannot be saved under the name \"" + key + "\".",
                  "names must not be empty, nor begin as \"rank3.\".");
    KeyPath path = beneath;
    path.emplace_back(key);
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      if (!tensor->defined())
        throw Error("the extra tensor \"" + key + "\" is undefined.", "leave it out, or fill it.");
      add_whole(plan, {path}, tensor->detach().resolve_conj().resolve_neg().contiguous());
      continue;
    }
    plan.values.push_back({path, [value = value](pickle::Writer& writer) {
                             if (const auto* integer = std::get_if<int64_t>(&value))
                               writer.integer(*integer);
                             else if (const auto* real = std::get_if<double>(&value))
                               writer.real(*real);
                             else if (const auto* flag = std::get_if<bool>(&value))
                               writer.boolean(*flag);
                             else
                               writer.string(std::get<std::string>(value));
                           }});
  }
}

}  // namespace

int64_t SavePlan::bytes() const {
  constexpr int64_t kAround = 4096, kName = 64;  // an item without its data; in a pickled list
  int64_t sum = 0;
  for (const auto& chunk : chunks)
    sum += kAround + static_cast<int64_t>(chunk.part.memory.nbytes());
  return sum + static_cast<int64_t>(values.size()) * (kAround + kName);
}

SavePlan plan_save(shard::Model& model, const Optimizer* optimizer, const SaveOptions& options) {
  SavePlan plan;
  const int rank = model.world.rank();
  plan_tensors(plan, model, optimizer);
  if (optimizer && rank == 0) plan.values = param_groups(*optimizer);
  if (rank == 0) plan_extra(plan, options.extra, {"extra"});
  plan_extra(plan, options.per_rank, {"extra", "rank" + std::to_string(rank)});
  return plan;
}

}  // namespace fsdp::checkpoint
