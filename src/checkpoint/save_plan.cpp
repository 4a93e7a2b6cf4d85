#include "checkpoint/save_plan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cctype>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/optim.h"
#include "optim/states.h"
#include "shard/contents.h"
#include "shard/offload.h"

namespace fsdp::checkpoint {
namespace {

void add_whole(SavePlan& plan, std::vector<KeyPath> paths, const at::Tensor& tensor) {
  plan.chunks.push_back({std::move(paths), tensor.sizes().vec(), whole(tensor)});
}

void require_values(const shard::Unit& unit) {
  if (unit.meta)
    throw Error(formatted("unit \"{}\" has no values yet.", unit.name),
                "call sharded.materialize(device) before saving.");
}

struct MinePart {              // this rank's part of a parameter's master or of one of its states
  std::optional<size_t> slot;  // of the state; nullopt: the master
  at::Tensor mine;             // without memory
  at::Device device;
};

at::Tensor without_memory(int64_t numel, at::ScalarType type) {
  return at::empty({numel}, at::TensorOptions(type).device(at::kMeta));
}

MinePart part_of_master(const shard::Flat& flat, size_t parameter) {
  const at::Tensor& there = flat.rest.defined() ? flat.rest : flat.master;
  const at::Tensor all = without_memory(flat.layout().shard_numel(), flat.master_dtype());
  return {std::nullopt, flat.part_of(parameter, all), there.device()};
}

MinePart part_of_state(const shard::Flat& flat, size_t parameter, size_t slot,
                       const optim::States& states) {
  const at::Tensor there = states.slots_unread(flat).at(slot);
  const at::Tensor all = without_memory(there.numel(), there.scalar_type());
  return {slot, states.part(flat, parameter, slot, all), there.device()};
}

void plan_tensors(SavePlan& plan, shard::Engine& model, const Chosen& only) {
  Turns turns;
  const Optimizer* optimizer = plan.optimizer;
  const bool first = plan.file == 0;
  const shard::Flat* counted = nullptr;
  std::vector<int64_t> steps;  // of the parameters of `counted`
  for (const auto& sharded : sharded_parameters(model)) {
    const shard::Flat& flat = *sharded.flat;
    const auto& p = sharded.parameter();
    if (only && !only(p.name())) continue;
    require_values(flat.unit());
    // Adds this rank's parts of the master or of one state.
    const auto add = [&](std::vector<KeyPath> paths, const MinePart& kind) {
      const auto parts = parts_of(flat, sharded.index, kind.mine);
      int64_t bytes = 0;
      for (const auto& part : parts) bytes += static_cast<int64_t>(part.memory.nbytes());
      const bool empty = flat.layout().numel(sharded.index) == 0 && flat.rank() == 0;
      if (!plan.is_copy && !turns.mine(sharded, bytes)) return;
      for (size_t i = 0; i < parts.size(); ++i)
        plan.chunks.push_back({paths, p.sizes, parts[i],
                               FlatSource{&flat, kind.slot, sharded.index, i, kind.device}});
      if (empty) add_whole(plan, paths, at::empty(p.sizes, kind.mine.options().device(at::kCPU)));
    };
    std::vector<KeyPath> paths;
    for (const auto& name : p.names) paths.push_back({"model", name});
    add(std::move(paths), part_of_master(flat, sharded.index));
    if (!optimizer || !p.handle.requires_grad()) continue;
    if (&flat != counted) steps = optim::states_of(*optimizer).steps_of_parameters(flat);
    counted = &flat;
    if (steps[sharded.index] == 0) continue;
    const optim::States& states = optim::states_of(*optimizer);
    const auto& names = states.names(flat, sharded.index);
    for (size_t slot = 0; slot < names.size(); ++slot)
      add({{"optim", "state", p.name(), names[slot]}},
          part_of_state(flat, sharded.index, slot, states));
    if (first)  // a float32 scalar tensor, as in torch
      add_whole(plan, {{"optim", "state", p.name(), "step"}},
                at::full({}, steps[sharded.index], at::kFloat));
  }
  if (!first) return;
  for (const auto& [name, tensor] : replicated_tensors(model)) {
    if (only && !only(name)) continue;
    if (tensor.is_meta())
      throw Error(formatted("\"{}\" has no values yet.", name),
                  "call sharded.materialize(device) before saving.");
    add_whole(plan, {{"model", name}},
              tensor.is_non_overlapping_and_dense() ? tensor : tensor.clone());
  }
}

// Whether the key starts with "rank3", the prefix of a rank's own values.
bool is_rank(const std::string& key) {
  const std::string step = key.substr(0, key.find('.'));
  return step.size() > 4 && step.starts_with("rank") &&
         std::all_of(step.begin() + 4, step.end(),
                     [](unsigned char c) { return std::isdigit(c) != 0; });
}

void plan_extra(SavePlan& plan, const Extra& extra, const KeyPath& beneath) {
  for (const auto& [key, value] : extra) {
    if (key.empty() || (beneath.size() == 1 && is_rank(key)))
      throw Error(formatted("extra values can't be saved under the name \"{}\".", key),
                  "use a name that isn't empty and doesn't start like \"rank3.\".");
    KeyPath path = beneath;
    path.emplace_back(key);
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      if (!tensor->defined())
        throw Error(formatted("the extra tensor \"{}\" is undefined.", key),
                    "define it, or leave it out.");
      add_whole(plan, {path}, tensor->detach().resolve_conj().resolve_neg().contiguous());
      continue;
    }
    plan.values.push_back(
        {path, [value = value](pickle::Writer& writer) { put_value(writer, value); }});
  }
}

}  // namespace

int64_t SavePlan::bytes() const {
  constexpr int64_t kAround = 4096, kName = 64;  // bytes of an item without data; of a name
  int64_t sum = 0;
  for (const auto& chunk : chunks)
    sum += kAround + static_cast<int64_t>(chunk.part.memory.nbytes());
  return sum + static_cast<int64_t>(values.size()) * (kAround + kName);
}

at::Tensor ChunkReader::read(const PlannedChunk& chunk) {
  if (!chunk.source) return chunk.part.memory;
  const FlatSource& from = *chunk.source;
  if (at_ != from.flat) {
    master_.reset();
    slots_.clear();
    at_ = nullptr;
    here_.reset();  // before the next is created
    here_.emplace(*from.flat);
    at_ = from.flat;
  }
  if (!from.slot && !master_.defined()) master_ = from.flat->read_master();
  if (from.slot && slots_.empty()) slots_ = optim::states_of(*optimizer_).slots(*from.flat);
  const at::Tensor mine =
      from.slot ? optim::states_of(*optimizer_)
                      .part(*from.flat, from.parameter, *from.slot, slots_.at(*from.slot))
                : from.flat->part_of(from.parameter, master_);
  return parts_of(*from.flat, from.parameter, mine)[from.piece].memory;
}

int ranks_of_a_copy(const shard::Engine& model) {
  const World& world = shard::world_of(model);
  int ranks = 0;
  for (const auto& unit : shard::units_of(model)) {
    const shard::Group& group = *unit->group;
    if (group.replicate_size * group.shard_size != world.size()) return 0;
    if (ranks != 0 && ranks != group.shard_size) return 0;
    ranks = group.shard_size;
    if (group.shard_rank != world.rank() % ranks) return 0;
  }
  const bool on_each = ranks > 0 && world.local_size() % ranks == 0;
  return on_each && world.size() > world.local_size() ? ranks : 0;
}

SavePlan plan_save(shard::Engine& model, const Optimizer* optimizer, const SaveOptions& options) {
  SavePlan plan;
  const World& world = shard::world_of(model);
  const int rank = world.rank();
  plan.optimizer = optimizer;
  plan.file = rank;
  if (const int copy = options.on_each_host ? ranks_of_a_copy(model) : 0; copy > 0) {
    plan.is_copy = true;
    plan.file = rank % copy;
    plan.writes = world.local_rank() < copy;
    if (!plan.writes) return plan;
  }
  plan_tensors(plan, model, options.only);
  if (optimizer && plan.file == 0) plan.values = param_groups(*optimizer);
  if (plan.file == 0) plan_extra(plan, options.extra, {"extra"});
  if (!plan.is_copy) plan_extra(plan, options.per_rank, {"extra", "rank" + std::to_string(rank)});
  return plan;
}

}  // namespace fsdp::checkpoint
