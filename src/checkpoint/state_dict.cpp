// state_dict and load_state_dict: like save and load, but with memory instead of files.
#include "fsdp/state_dict.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <set>

#include "base/format.h"
#include "base/log.h"
#include "checkpoint/metadata.h"
#include "checkpoint/mismatch.h"
#include "checkpoint/overlap.h"
#include "checkpoint/parts.h"
#include "checkpoint/same_model.h"
#include "checkpoint/together.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "optim/states.h"
#include "shard/contents.h"
#include "shard/update.h"

namespace fsdp::checkpoint {
namespace {

// --- making ---

class Making {
 public:
  Making(shard::Engine& model, const Optimizer* optimizer, const StateDictOptions& options)
      : model_(model),
        optimizer_(optimizer),
        options_(options),
        full_(options.type == StateDictType::FULL_STATE_DICT),
        kept_(!full_ || !options.rank0_only || shard::world_of(model).rank() == 0) {}

  StateDict run() {
    for (shard::Flat* flat : shard::all_flats(model_)) {
      if (flat->unit().meta)
        throw Error(formatted("unit \"{}\" was built on the meta device and has no values yet.",
                              flat->unit().name),
                    "call sharded.materialize(device), or load values, before state_dict.");
      add_flat(*flat);
    }
    for (const auto& [name, tensor] : replicated_tensors(model_)) {
      if (tensor.is_meta())
        throw Error(formatted("\"{}\" was built on the meta device and has no values yet.", name),
                    "call sharded.materialize(device) before state_dict.");
      if (kept_) add({"model." + name}, tensor.sizes().vec(), {owned(whole(tensor))});
    }
    return std::move(state_);
  }

 private:
  void add_flat(shard::Flat& flat) {
    const at::Tensor master = flat.read_master();
    add_shards(
        flat, [&] { return master; }, [&](size_t p) { return flat.part_of(p, master); },
        [&](size_t p) {
          std::vector<std::string> names;
          for (const auto& name : flat.parameters()[p].names) names.push_back("model." + name);
          return names;
        });
    if (!optimizer_ || optim::states_of(*optimizer_).steps(flat) == 0) return;
    const optim::States& states = optim::states_of(*optimizer_);
    const auto steps = states.steps_of_parameters(flat);
    // A parameter that is frozen or was never updated has no state.
    const auto state_name = [&](size_t p, const std::string& state) {
      const auto& of = flat.parameters()[p];
      return of.handle.requires_grad() && steps[p] > 0
                 ? std::vector<std::string>{"optim.state." + of.name() + "." + state}
                 : std::vector<std::string>{};
    };
    const auto slots = states.slots(flat);
    for (size_t slot = 0; slot < slots.size(); ++slot)
      add_shards(
          flat, [&] { return states.spread(flat, slot); },
          [&](size_t p) { return states.part(flat, p, slot, slots[slot]); },
          [&](size_t p) {
            const auto& names = states.names(flat, p);
            return slot < names.size() ? state_name(p, names[slot]) : std::vector<std::string>{};
          });
    if (!kept_) return;
    for (size_t p = 0; p < steps.size(); ++p)
      add(state_name(p, "step"), {},
          {{{}, at::full({}, static_cast<double>(steps[p]), at::kFloat)}});
  }

  // Adds every parameter's tensor under its names. `shard`: this rank's, laid out like the flat's
  // master; `part_of`: the part of one parameter.
  template <typename Shard, typename PartOf, typename Names>
  void add_shards(shard::Flat& flat, Shard shard, PartOf part_of, Names names_of) {
    at::Tensor everyone;
    if (full_) everyone = shard::gather_shard(model_, flat, shard(), "state_dict");
    if (!kept_) return;
    for (size_t i = 0; i < flat.parameters().size(); ++i) {
      const auto& p = flat.parameters()[i];
      const auto names = names_of(i);
      if (names.empty()) continue;
      std::vector<StateShard> shards;
      if (full_)
        shards.push_back(owned(whole(flat.view_of(i, everyone))));
      else
        for (const auto& part : parts_of(flat, i, part_of(i))) shards.push_back(owned(part));
      add(names, p.sizes, shards, flat.master_dtype());
    }
  }

  StateShard owned(const Part& part) const {
    const auto device = options_.offload_to_cpu ? at::Device(at::kCPU) : part.memory.device();
    const bool copy = full_ || options_.copy;
    return {part.rectangle, part.memory.to(part.memory.options().device(device),
                                           /*non_blocking=*/false, copy)};
  }

  void add(const std::vector<std::string>& names, const std::vector<int64_t>& sizes,
           const std::vector<StateShard>& shards, std::optional<at::ScalarType> dtype = {}) {
    for (const auto& name : names)
      state_[name] = {sizes, dtype ? *dtype : shards.front().values.scalar_type(), shards};
  }

  shard::Engine& model_;
  const Optimizer* optimizer_;
  const StateDictOptions& options_;
  bool full_, kept_;
  StateDict state_;
};

// --- loading ---

struct Fill {
  const StateTensor* from;
  Part part;
};

struct FlatStates {                                              // the states of one flat
  std::vector<int64_t> steps;                                    // per parameter
  std::map<size_t, std::map<size_t, const StateTensor*>> found;  // by slot, by parameter
};

class Loading {
 public:
  Loading(const StateDict& state, shard::Engine& model, Optimizer* optimizer, bool strict)
      : state_(state), model_(model), optimizer_(optimizer), strict_(strict) {}

  // Finds and checks everything. Returns the names that don't match.
  std::vector<std::string> plan() {
    for (const auto& [name, tensor] : state_) check_tensor(name, tensor);
    for (const auto& sharded : sharded_parameters(model_)) {
      const auto& p = sharded.parameter();
      const auto* found = find("model.", p.names, p.sizes, /*may_be_missing=*/false);
      if (!found) {
        incomplete_.insert(&sharded.flat->unit());
        continue;
      }
      const auto mine = sharded.flat->part_of(sharded.index, sharded.flat->edit_master());
      for (auto& part : parts_of(*sharded.flat, sharded.index, mine))
        fill(*found, std::move(part), "model." + p.name());
    }
    for (const auto& [name, tensor] : replicated_tensors(model_)) {
      const auto* found = find("model.", {name}, tensor.sizes().vec(), false);
      if (!found) continue;
      check_cover(*found, whole(tensor).rectangle, "model." + name);
      replicated_.emplace_back(found, tensor);
    }
    if (optimizer_) plan_states();
    for (const auto& [name, tensor] : state_)
      if (!used_.contains(name) && (optimizer_ || !name.starts_with("optim.")))
        note(formatted("\"{}\" is in the state dict but not in the {}", name,
                       name.starts_with("optim.") ? "optimizer" : "model"),
             name);
    refuse();
    return skipped_;
  }

  void write() {
    for (const auto& [from, part] : fills_) copy(*from, part);
    for (const auto& [from, tensor] : replicated_) {
      if (tensor.is_meta())
        shard::become(tensor,
                      at::zeros(tensor.sizes(), tensor.options().device(shard::device_of(model_))));
      copy(*from, whole(tensor));
    }
    for (const auto& unit : shard::units_of(model_))
      if (!incomplete_.contains(unit.get())) unit->meta = false;
    for (const auto& [flat, states] : states_) write_states(*flat, states);
  }

 private:
  void note(const std::string& problem, const std::string& name) {
    problems_.push_back(problem);
    skipped_.push_back(name);
  }

  void refuse() const {
    if (strict_ && !problems_.empty()) throw_mismatch("the state dict", problems_);
  }

  // Checks that a tensor of the state dict is consistent in itself.
  static void check_tensor(const std::string& name, const StateTensor& tensor) {
    for (const auto& [rectangle, values] : tensor.shards) {
      bool good = values.defined() && rectangle.offsets.size() == tensor.sizes.size() &&
                  rectangle.sizes.size() == tensor.sizes.size() &&
                  values.sizes() == at::IntArrayRef(rectangle.sizes);
      for (size_t d = 0; good && d < tensor.sizes.size(); ++d)
        good = rectangle.offsets[d] >= 0 && rectangle.sizes[d] <= tensor.sizes[d] &&
               rectangle.offsets[d] <= tensor.sizes[d] - rectangle.sizes[d];
      if (!good)
        throw Error(formatted("\"{}\" of shape {} has an invalid shard in the state dict.", name,
                              shape_text(tensor.sizes)),
                    "a shard's values must have the sizes of its rectangle, and the rectangle must "
                    "be inside of the tensor.");
    }
  }

  const StateTensor* find(const std::string& prefix, const std::vector<std::string>& names,
                          const std::vector<int64_t>& sizes, bool may_be_missing) {
    const StateTensor* found = nullptr;
    bool known = false;
    for (const auto& name : names) {
      const auto entry = state_.find(prefix + name);
      if (entry == state_.end()) continue;
      known = true;
      used_.insert(prefix + name);
      if (entry->second.sizes != sizes)
        note(formatted("\"{}{}\" has shape {} in the state dict and {} in the model", prefix, name,
                       shape_text(entry->second.sizes), shape_text(sizes)),
             prefix + name);
      else if (!found)
        found = &entry->second;
    }
    if (!known && !may_be_missing)
      note(formatted("\"{}{}\" is in the model but not in the state dict", prefix, names.front()),
           prefix + names.front());
    return found;
  }

  static void check_cover(const StateTensor& from, const Rectangle& wanted,
                          const std::string& name) {
    int64_t covered = 0;
    for (const auto& shard : from.shards)
      if (const auto both = overlap_of(shard.rectangle, wanted))
        covered += element_count(both->sizes);
    if (covered != element_count(wanted.sizes))
      throw Error(
          formatted(
              "this rank needs {} at {} of \"{}\" {}, but the state dict has other parts of it.",
              shape_text(wanted.sizes), shape_text(wanted.offsets), name, shape_text(from.sizes)),
          "a sharded state dict only fits the sharding it was made with; load a full one, "
          "or use checkpoint::save and load.");
  }

  void fill(const StateTensor& from, Part part, const std::string& name) {
    check_cover(from, part.rectangle, name);
    fills_.push_back({&from, std::move(part)});
  }

  void plan_states() {
    bool updated = false;
    for (const shard::Flat* flat : shard::all_flats(model_))
      updated |= optim::states_of(*optimizer_).steps(*flat) > 0;
    const bool any = std::any_of(state_.begin(), state_.end(), [](const auto& entry) {
      return entry.first.starts_with("optim.");
    });
    // A state dict from before the first update has none either.
    if (!any && updated)
      return note("it has no optimizer states (\"optim.…\"), but the optimizer does", "optim");
    for (const auto& sharded : sharded_parameters(model_)) {
      const auto& p = sharded.parameter();
      if (!p.handle.requires_grad()) continue;
      FlatStates& states = states_[sharded.flat];
      bool has_state = false;
      const auto& kept = optim::states_of(*optimizer_).names(*sharded.flat, sharded.index);
      for (size_t slot = 0; slot < kept.size(); ++slot) {
        std::vector<std::string> names;
        for (const auto& name : p.names) names.push_back(name + "." + kept[slot]);
        const auto* found = find("optim.state.", names, p.sizes, /*may_be_missing=*/true);
        if (!found) continue;
        has_state = true;
        const auto mine = sharded.flat->part_of(sharded.index, sharded.flat->shard);
        for (const auto& part : parts_of(*sharded.flat, sharded.index, mine))
          check_cover(*found, part.rectangle, "optim.state." + names.front());
        states.found[slot][sharded.index] = found;
      }
      states.steps.resize(sharded.flat->parameters().size());
      states.steps[sharded.index] = std::max<int64_t>(steps_of(p.names), has_state ? 1 : 0);
    }
  }

  int64_t steps_of(const std::vector<std::string>& names) {
    double most = 0;
    for (const auto& name : names) {
      const auto entry = state_.find("optim.state." + name + ".step");
      if (entry == state_.end()) continue;
      used_.insert(entry->first);
      const auto& shards = entry->second.shards;
      const double steps = shards.size() == 1 && shards[0].values.numel() == 1
                               ? shards[0].values.item().toDouble()
                               : -1;
      if (!(steps >= 0) || steps > 1e15)
        throw Error(
            formatted("\"{}\" in the state dict isn't a valid number of updates.", entry->first),
            "it must be one number of at least 0.");
      most = std::max(most, steps);
    }
    return static_cast<int64_t>(most);
  }

  static void copy(const StateTensor& from, const Part& to) {
    for (const auto& shard : from.shards) {
      const auto both = overlap_of(shard.rectangle, to.rectangle);
      if (!both) continue;
      at::Tensor source = shard.values, target = to.memory;
      for (int64_t d = 0; d < target.dim(); ++d) {
        const auto at = static_cast<size_t>(d);
        source = source.narrow(d, both->offsets[at] - shard.rectangle.offsets[at], both->sizes[at]);
        target = target.narrow(d, both->offsets[at] - to.rectangle.offsets[at], both->sizes[at]);
      }
      target.copy_(source);
    }
  }

  void write_states(shard::Flat& flat, const FlatStates& states) {
    const bool updated = std::any_of(states.steps.begin(), states.steps.end(), std::identity());
    const optim::States& all = optim::states_of(*optimizer_);
    if (!updated && all.slots(flat).empty()) return;
    const auto slots = optim::states_of(*optimizer_).restore(flat, states.steps);
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const auto found = states.found.find(slot);
      for (size_t i = 0; i < flat.parameters().size(); ++i) {
        if (slot >= all.names(flat, i).size()) continue;
        const at::Tensor mine = all.part(flat, i, slot, slots[slot]);
        const StateTensor* from = nullptr;
        if (found != states.found.end() && found->second.contains(i)) from = found->second.at(i);
        if (!from) {
          mine.zero_();
          continue;
        }
        for (const auto& part : parts_of(flat, i, mine)) copy(*from, part);
      }
    }
  }

  const StateDict& state_;
  shard::Engine& model_;
  Optimizer* optimizer_;
  bool strict_;
  std::vector<Fill> fills_;
  std::vector<std::pair<const StateTensor*, at::Tensor>> replicated_;
  std::map<shard::Flat*, FlatStates> states_;
  std::set<shard::Unit*> incomplete_;  // units that don't get all of their values
  std::set<std::string> used_;
  std::vector<std::string> problems_, skipped_;
};

}  // namespace

StateDict state_dict(const Sharded& sharded, const Optimizer* optimizer,
                     const StateDictOptions& options) {
  const auto model = shard::model_of(sharded);
  const auto engine = model->lock();
  require_same_model(model, optimizer, "state_dict");
  shard::Unseen unseen;
  return Making(*engine, optimizer, options).run();
}

std::vector<std::string> load_state_dict(const StateDict& state, const Sharded& sharded,
                                         Optimizer* optimizer, const LoadOptions& options) {
  const auto model = shard::model_of(sharded);
  const World& world = model->world();
  const auto engine = model->lock();
  require_same_model(model, optimizer, "load_state_dict");
  shard::Unseen unseen;
  Loading loading(state, *engine, options.optimizer ? optimizer : nullptr, options.strict);
  std::vector<std::string> skipped;
  together(world, "load_state_dict", [&] { skipped = loading.plan(); });
  shard::begin_load(*engine, "load_state_dict");
  const auto tell = [&] {
    for (const auto& unit : shard::units_of(*engine)) shard::loaded(*engine, *unit);
  };
  try {
    together(world, "load_state_dict: values", [&] { loading.write(); });
  } catch (...) {
    tell();  // some of it may have been written
    throw;
  }
  tell();
  return skipped;
}

}  // namespace fsdp::checkpoint
