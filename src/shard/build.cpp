// fully_shard: plans the units, fills each rank's shards, and leaves the module's parameters
// without memory. At most one parameter is whole at a time, and none whose values are only drawn.
#include <ATen/ops/zeros.h>
#include <torch/csrc/jit/runtime/graph_executor.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/format.h"
#include "base/log.h"
#include "base/table.h"
#include "fsdp/fully_shard.h"
#include "shard/agreement.h"
#include "shard/deferred.h"
#include "shard/dry_run.h"
#include "shard/engine.h"
#include "shard/gradients.h"
#include "shard/model.h"
#include "shard/offload.h"
#include "shard/plan.h"
#include "shard/registry.h"

namespace fsdp {

const char* name(ShardingStrategy strategy) {
  constexpr const char* kNames[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"};
  return kNames[static_cast<int>(strategy)];
}

const char* name(Wire wire) {
  constexpr const char* kNames[] = {"PLAIN", "BF16", "FP8", "INT8"};
  return kNames[static_cast<int>(wire)];
}

namespace shard {
namespace {

Dtypes dtypes_of(const Parameter& p, const MixedPrecision& precision) {
  at::ScalarType own = p.handle.scalar_type();
  bool trainable = p.handle.requires_grad();
  if (!at::isFloatingType(own))
    return {own, own, own, own, false, trainable, Wire::PLAIN, Wire::PLAIN};
  bool fp32 = (precision.norms_in_fp32 && p.is_norm) ||
              (precision.keep_fp32 && precision.keep_fp32(p.name(), p.handle)) ||
              (p.is_batch_norm && precision.param_dtype);
  at::ScalarType param = fp32 ? at::kFloat : precision.param_dtype.value_or(own);
  const bool follows = trainable || precision.frozen_masters;
  at::ScalarType master = follows ? precision.master_dtype.value_or(own) : param;
  bool split = precision.split_master && param == at::kBFloat16 && master == at::kFloat;
  // Blocks of other numbers would lose more, and the few bytes don't matter.
  const bool matrix = p.handle.dim() >= 2 && !fp32;
  return {param,
          master,
          precision.reduce_dtype.value_or(param),
          precision.grad_dtype.value_or(master),
          split,
          trainable,
          matrix ? precision.gather : Wire::PLAIN,
          matrix || precision.reduce == Wire::BF16 ? precision.reduce : Wire::PLAIN};
}

void check_precision(const MixedPrecision& precision, const std::string& where) {
  const auto check = [&](const char* field, const std::optional<at::ScalarType>& type) {
    if (!type || at::isFloatingType(*type)) return;
    throw Error(formatted("mixed_precision.{} of {} is {}, which can't hold weights or gradients "
                          "in training.",
                          field, where, c10::toString(*type)),
                "use at::kBFloat16, at::kHalf or at::kFloat.");
  };
  check("param_dtype", precision.param_dtype);
  check("reduce_dtype", precision.reduce_dtype);
  check("buffer_dtype", precision.buffer_dtype);
  check("output_dtype", precision.output_dtype);
  check("master_dtype", precision.master_dtype);
  check("grad_dtype", precision.grad_dtype);
}

// Throws where numbers can't travel as `precision` says.
void check_wires(const PlannedUnit& unit, const MixedPrecision& precision,
                 const ShardOptions& options) {
  if (precision.gather == Wire::PLAIN && precision.reduce == Wire::PLAIN) return;
  const char* field = precision.gather != Wire::PLAIN ? "gather" : "reduce";
  const Wire wire = precision.gather != Wire::PLAIN ? precision.gather : precision.reduce;
  const std::string given =
      formatted("unit \"{}\": mixed_precision.{} is {}", unit.name, field, name(wire));
  if (precision.gather == Wire::BF16)
    throw Error(given + ", which is for gradients.",
                "set mixed_precision.param_dtype to at::kBFloat16, or gather to Wire::FP8 or "
                "Wire::INT8.");
  if (options.strategy == ShardingStrategy::NO_SHARD)
    throw Error(
        given + ", but NO_SHARD gathers no parameters and reduces along \"replicate\" only.",
        "use another strategy, or Wire::PLAIN.");
  for (const Parameter& p : unit.parameters) {
    const Dtypes dtypes = dtypes_of(p, precision);
    const bool gathers = dtypes.gather_wire != Wire::PLAIN && dtypes.param == at::kDouble;
    const bool reduces = dtypes.reduce_wire != Wire::PLAIN && dtypes.reduce == at::kDouble;
    if (gathers || reduces)
      throw Error(formatted("{}, but parameter \"{}\" is {} in {}.", given, p.name(),
                            c10::toString(at::kDouble), gathers ? "gathers" : "reductions"),
                  "float64 is meant to be exact: use Wire::PLAIN, or set param_dtype and "
                  "reduce_dtype to at::kFloat.");
  }
}

void check_precisions(const std::vector<PlannedUnit>& planned, const ShardOptions& options) {
  check_precision(options.mixed_precision, "the model");
  for (const PlannedUnit& unit : planned) {
    const auto& own = unit.options.mixed_precision;
    if (own) check_precision(*own, formatted("unit \"{}\"", unit.name));
    check_wires(unit, own.value_or(options.mixed_precision), options);
  }
}

std::vector<bool> choose_offloaded(const std::vector<PlannedUnit>& planned,
                                   const Offload& offload) {
  if (!offload.any()) return std::vector<bool>(planned.size(), false);
  std::vector<UnitShare> units;
  for (const PlannedUnit& unit : planned) {
    units.push_back({0, unit.root});
    for (const Parameter& p : unit.parameters)
      if (p.handle.requires_grad()) units.back().numel += p.handle.numel();
  }
  std::vector<bool> chosen = last_units(units, offload.fraction);
  if (std::find(chosen.begin(), chosen.end(), true) == chosen.end())
    log::warn("offload.fraction is smaller than the last unit's share, so nothing is offloaded.");
  return chosen;
}

const ReshardAfterForward& reshard_choice(const PlannedUnit& unit, const ShardOptions& options) {
  const auto& own = unit.options.reshard_after_forward;
  return own ? *own : options.reshard_after_forward;
}

std::shared_ptr<Unit> make_unit(PlannedUnit& planned, const ShardOptions& options,
                                const std::shared_ptr<Group>& group, at::Device device,
                                bool offloaded) {
  auto unit = std::make_shared<Unit>();
  unit->name = planned.name;
  unit->root = planned.root;
  unit->group = group;
  unit->precision = planned.options.mixed_precision.value_or(options.mixed_precision);
  unit->reshard_after_forward = reshard_choice(planned, options);
  unit->strategy_keeps = options.strategy == ShardingStrategy::SHARD_GRAD_OP ||
                         options.strategy == ShardingStrategy::NO_SHARD;
  unit->wants_uneven = planned.options.uneven_use.value_or(options.uneven_use);
  unit->uneven = unit->wants_uneven && !planned.root;
  unit->cast_inputs = unit->precision.param_dtype && unit->precision.cast_forward_inputs;
  for (ModuleTree* top : planned.tops) unit->tops.push_back(top->identity);

  // In order of first appearance, which is the same on every rank.
  std::vector<std::pair<Dtypes, std::vector<Parameter>>> kinds;
  for (Parameter& p : planned.parameters) {
    Dtypes dtypes = dtypes_of(p, unit->precision);
    auto known = std::find_if(kinds.begin(), kinds.end(),
                              [&](const auto& kind) { return kind.first == dtypes; });
    if (known == kinds.end()) known = kinds.insert(kinds.end(), {dtypes, {}});
    known->second.push_back(std::move(p));
  }
  for (auto& [dtypes, parameters] : kinds) {
    // Matrices first: those with the same input (q, k and v) are then adjacent, and everything
    // without weight decay is one contiguous range.
    std::stable_partition(parameters.begin(), parameters.end(),
                          [](const Parameter& p) { return p.handle.dim() >= 2; });
    unit->flats.push_back(std::make_unique<Flat>(*unit, std::move(parameters), group->shard_size,
                                                 group->shard_rank, options.cut, dtypes, device));
    // A frozen flat has no states; it is offloaded only if parameters are.
    if (offloaded && (options.offload.parameters || dtypes.trainable)) {
      auto host = std::make_shared<HostState>();
      host->parameters = options.offload.parameters;
      host->gradients = options.offload.gradients;
      host->optimizer = options.offload.optimizer;
      host->pinned = options.offload.pin_memory;
      host->directory = options.offload.directory;
      unit->flats.back()->host = std::move(host);
    }
  }
  return unit;
}

// A unit is gathered as a whole, so all of its flats have windows or none has. What is computed
// with isn't the shards where they travel in fewer bits.
bool has_windows(const Unit& unit) {
  return unit.group->shares_memory && unit.group->shard_size > 1 && unit.coded_bytes() == 0 &&
         std::none_of(unit.flats.begin(), unit.flats.end(),
                      [](const auto& flat) { return shard_on_host(*flat); });
}

void allocate(Flat& flat, const Group& group) {
  at::TensorOptions on = at::TensorOptions().device(flat.device());
  int64_t numel = flat.layout().shard_numel();
  if (shard_on_host(flat)) {
    flat.shard = host_zeros(numel, flat.param_dtype(), flat.device(), flat.host->pinned);
    if (!flat.host->parameters)
      flat.host->resident = at::zeros({numel}, on.dtype(flat.param_dtype()));
  } else if (has_windows(flat.unit())) {
    flat.window =
        group.gather.gather_buffer(flat.layout().full_numel(), flat.param_dtype(), flat.device());
    flat.shard = flat.window.narrow(0, group.shard_rank * numel, numel);
  } else {
    flat.shard = at::zeros({numel}, on.dtype(flat.param_dtype()));
  }
  flat.allocate_master();
}

// Gives this rank's part of a parameter its initial values, if it has any yet.
void keep_value(Unit& unit, Flat& flat, size_t parameter, InitialValues& values) {
  const Parameter& p = flat.parameters()[parameter];
  const int64_t first = flat.layout().slice(parameter, flat.rank()).begin;
  if (values.draw(p.name(), p.handle, flat.part_of(parameter, flat.edit_master()), first)) return;
  const at::Tensor whole = values.value(p.name(), p.handle);
  if (whole.defined())
    flat.keep_part(parameter, whole, flat.edit_master());
  else
    unit.meta = !dry_run::on();
}

// Without `initialize`, parameters of a deferred model get no values.
void fill(const std::shared_ptr<Unit>& unit, bool initialize, InitialValues& values) {
  Unseen unseen;
  for (size_t f = 0; f < unit->flats.size(); ++f) {
    Flat& flat = *unit->flats[f];
    allocate(flat, *unit->group);
    for (size_t i = 0; i < flat.parameters().size(); ++i) {
      const Parameter& p = flat.parameters()[i];
      if (!initialize && deferred::is_deferred(p.handle))
        unit->meta = !dry_run::on();
      else
        keep_value(*unit, flat, i, values);
      p.handle.mutable_grad() = at::Tensor();
      flat.bind(i);
      watch_gradient(unit, f, i);
    }
    flat.settle_master();
  }
}

void move_buffers(ModuleTree& tree, const ShardOptions& options, at::Device device,
                  InitialValues& values) {
  Unseen unseen;
  for_each_module(tree, [&](ModuleTree& node) {
    for (auto& [name, buffer] : node.buffers) {
      if (tag_of(buffer) && tag_of(buffer)->kind == StorageTag::kParameters) continue;
      if (buffer.is_meta()) continue;  // materialize() fills it
      bool was_deferred = deferred::is_deferred(buffer);
      at::Tensor value = values.value(name, buffer).to(device);
      if (options.mixed_precision.buffer_dtype && at::isFloatingType(value.scalar_type()))
        value = value.to(*options.mixed_precision.buffer_dtype);
      if (was_deferred) set_key(buffer, false);
      if (!value.is_same(buffer)) become(buffer, value);
    }
  });
}

void give_names(Engine& model, std::vector<ModuleTree*> trees) {
  for (auto& [tensor, names] : names_of(trees)) {
    StorageTag* tag = tag_of(tensor);
    if (!tag || tag->kind != StorageTag::kParameters) continue;
    static_cast<Flat*>(tag->owner)->rename(tensor, names);
  }
  for (ModuleTree* tree : trees)
    for_each_module(*tree, [&](ModuleTree& node) {
      for (const auto& unit : model.units)
        if (!unit->tops.empty() && unit->tops.front() == node.identity) {
          node.unit = unit.get();
          if (!unit->root && !node.view.path.empty()) unit->name = node.view.path;
        }
    });
  for (ModuleTree* tree : trees)
    for_each_module(*tree, [&](ModuleTree& node) {
      std::set<Unit*> here;
      for (const auto& [name, tensor] : node.parameters)
        if (StorageTag* tag = tag_of(tensor); tag && tag->kind == StorageTag::kParameters)
          here.insert(&static_cast<Flat*>(tag->owner)->unit());
      for (Unit* unit : here) {
        auto known = std::find_if(unit->modules.begin(), unit->modules.end(), [&](const auto& m) {
          return m.module && m.module == node.module;
        });
        if (known == unit->modules.end())
          unit->modules.push_back({node.view.path, node.module});
        else
          known->path = node.view.path;
      }
    });
  for (size_t i = 0; i < model.units.size(); ++i) model.units[i]->id = static_cast<int>(i);
}

// Gives every uneven unit the even unit around it as its parent; a unit in no even unit gets the
// root.
void join_families(const ModuleTree& node, Unit* around) {
  if (node.unit && node.unit->uneven) {
    node.unit->parent = around;
    around->uneven_units.push_back(node.unit);
  } else if (node.unit) {
    around = node.unit;
  }
  for (const ModuleTree& child : node.children) join_families(child, around);
}

void make_families(Engine& model, const std::vector<ModuleTree*>& trees) {
  for (const auto& unit : model.units) unit->uneven_units.clear();
  if (std::none_of(model.units.begin(), model.units.end(),
                   [](const auto& unit) { return unit->uneven; }))
    return;
  for (ModuleTree* tree : trees) join_families(*tree, model.units.back().get());
}

// Models that own units beneath these modules (bottom-up use).
std::vector<std::shared_ptr<Model>> models_beneath(const std::vector<ModuleTree*>& trees) {
  std::vector<std::shared_ptr<Model>> found;
  for (ModuleTree* tree : trees)
    for_each_module(*tree, [&](ModuleTree& node) {
      for (const auto& [name, tensor] : node.parameters) {
        StorageTag* tag = tag_of(tensor);
        if (!tag || tag->kind != StorageTag::kParameters) continue;
        auto alive = static_cast<Flat*>(tag->owner)->unit().owner.lock();
        if (!alive) continue;
        if (std::find(found.begin(), found.end(), alive) == found.end()) found.push_back(alive);
      }
    });
  return found;
}

// A model is taken over whole or not at all: a unit has one owner.
void refuse_shared_modules(const std::vector<std::shared_ptr<Model>>& beneath,
                           const std::vector<ModuleTree*>& trees) {
  std::map<const c10::TensorImpl*, std::string> here;
  for (ModuleTree* tree : trees)
    for_each_module(*tree, [&](ModuleTree& node) {
      for (const auto& [name, tensor] : node.parameters)
        here.emplace(tensor.unsafeGetTensorImpl(), name);
    });
  for (const auto& other : beneath) {
    const Locked theirs(other);
    std::string shared, elsewhere;
    for (Flat* flat : theirs->flats())
      for (const Parameter& p : flat->parameters()) {
        auto known = here.find(p.handle.unsafeGetTensorImpl());
        std::string& place = known != here.end() ? shared : elsewhere;
        if (place.empty()) place = known != here.end() ? known->second : p.name();
      }
    if (!elsewhere.empty())
      throw Error(formatted("parameter \"{}\" belongs to another sharded model, which also has "
                            "\"{}\".",
                            shared, elsewhere),
                  "shard one module that holds both models, or give each its own copy.");
  }
}

void warn_of_large_root(const Engine& model) {
  int64_t all = 0, root = 0;
  for (const auto& unit : model.units) {
    all += unit->numel();
    if (unit->root) root += unit->numel();
  }
  if (model.units.size() > 1 && root * 2 > all && model.world().rank() == 0)
    log::warn(
        formatted("the root unit holds {} % of the parameters and stays gathered from "
                  "forward to backward; wrap more modules (sharded.describe() shows the "
                  "units).",
                  root * 100 / all));
}

std::shared_ptr<Model> shard_trees(std::shared_ptr<ModuleTree> holder,
                                   std::vector<ModuleTree*> trees, ShardOptions options) {
  World world = options.mesh ? options.mesh.world() : World::current();
  at::Device device = options.device.value_or(world.device());
  if (options.forward_prefetch < 0 || options.backward_prefetch < 0)
    throw Error(formatted("a prefetch depth is negative (forward_prefetch = {}, backward_prefetch "
                          "= {}).",
                          options.forward_prefetch, options.backward_prefetch),
                "use 0 for no prefetch.");
  std::vector<PlannedUnit> planned = plan_units(trees, options);
  auto beneath = models_beneath(trees);
  for (const auto& other : beneath) {
    const Locked theirs(other);
    for (const auto& unit : theirs->units)
      for (ModuleTree* tree : trees)
        if (std::find(unit->tops.begin(), unit->tops.end(), tree->identity) != unit->tops.end())
          throw Error(formatted("this module ({}) is sharded already.", tree->view.type),
                      "call fully_shard once per module, children before parents.");
  }
  refuse_shared_modules(beneath, trees);
  check_precisions(planned, options);
  compare_plans(world, planned);
  check_offload(options.offload);
  auto group = group_for(world, options, device);
  for (const PlannedUnit& unit : planned)  // throws before anything changes
    parts_kept(reshard_choice(unit, options), /*keeps=*/unit.root, *group);
  auto model = std::make_shared<Model>(world, device, options);
  for (const auto& other : beneath) model->take_over(other);
  InitialValues values(world, options.sync_module_states);
  std::vector<bool> offloaded = choose_offloaded(planned, options.offload);
  if (options.offload.any()) model->lock()->offload.begin();
  for (size_t i = 0; i < planned.size(); ++i) {
    PlannedUnit& plan = planned[i];
    if (plan.parameters.empty() && !plan.root) continue;
    auto unit = make_unit(plan, options, group, device, offloaded[i]);
    fill(unit, options.initialize, values);
    unit->apply_reshard_after_forward();
    model->add(unit);
  }
  for (ModuleTree* tree : trees) move_buffers(*tree, options, device, values);
  values.compare();
  model->seal();
  {
    const Locked engine = model->lock();
    engine->tree = std::move(holder);
    give_names(*engine, trees);
    make_families(*engine, trees);
    engine->gatherer.shards_written();
    warn_of_large_root(*engine);
  }
  if (world.rank() == 0)
    for (const std::string& warning : unmatched(trees, options.wrap)) log::warn(warning);
  registry::add(model);
  for (const auto& other : beneath) registry::unpark(other.get());
  // The users' handle. After the last copy is gone, the model lives as long as its module.
  return std::shared_ptr<Model>(model.get(), [model](Model*) { registry::park(model); });
}

}  // namespace

std::shared_ptr<Model> shard_modules(const std::vector<ModuleRef>& modules, ShardOptions options) {
  auto holder = std::make_shared<ModuleTree>();
  for (const ModuleRef& module : modules) {
    if (!module.get())
      throw Error("fully_shard was called with an empty module.", "construct the module first.");
    holder->children.push_back(tree_of(module.get()));
  }
  std::vector<ModuleTree*> trees;
  for (ModuleTree& tree : holder->children) trees.push_back(&tree);
  return shard_trees(holder, trees, std::move(options));
}

}  // namespace shard

Sharded fully_shard(std::initializer_list<ModuleRef> modules, ShardOptions options) {
  return Sharded(shard::shard_modules(modules, std::move(options)));
}

Sharded fully_shard(const torch::jit::Module& module, ShardOptions options) {
  if (torch::jit::getGraphExecutorOptimize()) {
    torch::jit::setGraphExecutorOptimize(false);
    log::info(
        "TorchScript's profiling executor is now off in this process "
        "(torch::jit::setGraphExecutorOptimize(false)): its own differentiation would read "
        "parameters that are not gathered.");
  }
  auto holder = std::make_shared<shard::ModuleTree>();
  holder->children.push_back(shard::tree_of(module));
  return Sharded(shard::shard_trees(holder, {&holder->children.front()}, std::move(options)));
}

bool is_sharded(const ModuleRef& module) {
  for (const auto& model : shard::registry::models_with_modules()) {
    const shard::Locked engine = model->lock();
    for (const auto& unit : engine->units)
      if (std::find(unit->tops.begin(), unit->tops.end(), module.get().get()) != unit->tops.end())
        return true;
  }
  return false;
}

Unit unit_of(const ModuleRef& module) {
  std::string known;
  for (const auto& model : shard::registry::models_with_modules()) {
    const shard::Locked engine = model->lock();
    for (const auto& unit : engine->units) {
      if (std::find(unit->tops.begin(), unit->tops.end(), module.get().get()) != unit->tops.end())
        return Unit(unit);
      if (known.size() < 200) known += (known.empty() ? "\"" : ", \"") + unit->name + "\"";
    }
  }
  throw Error("this module isn't a unit.", known.empty() ? "nothing has been sharded yet."
                                                         : formatted("the units are {}.", known));
}

}  // namespace fsdp
