// From shards to full tensors and back: full_tensor, state dicts, summon_full_params, materialize.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <exception>
#include <sstream>

#include "base/format.h"
#include "fsdp/fully_shard.h"
#include "shard/background.h"
#include "shard/engine.h"
#include "shard/model.h"
#include "shard/rectangles.h"
#include "shard/reset.h"
#include "shard/tree.h"
#include "shard/update.h"

namespace fsdp {

using shard::Engine;
using shard::Flat;
using shard::Locked;
using shard::Parameter;
using shard::Unseen;

namespace {

void require_values(const shard::Unit& unit) {
  if (unit.meta)
    throw Error(unit.label() + " has no values yet.", "call sharded.materialize(device) first.");
}

template <typename Visit>
void for_each_parameter(Engine& model, Visit visit) {
  for (const auto& unit : model.units)
    for (const auto& flat : unit->flats)
      for (size_t i = 0; i < flat->parameters().size(); ++i) visit(*unit, *flat, i);
}

}  // namespace

// --- one parameter ---

ShardInfo Sharded::shard_of(const std::string& parameter) const {
  const Locked model = shard::lock(*this);
  model->reducer.settle_factor();
  auto [flat, i] = model->find(parameter);
  const Parameter& p = flat->parameters()[i];
  shard::Slice slice = flat->layout().slice(i, flat->rank());
  ShardInfo info;
  info.name = parameter;
  info.unit = flat->unit().name;
  info.global_shape = p.sizes;
  info.mesh = flat->unit().group->text;
  info.rectangles = shard::rectangles_of(p.sizes, p.order, slice.begin, slice.numel);
  bool rows = flat->layout().cut() != Cut::ELEMENT;
  info.placement = flat->unit().group->shard_size == 1 ? "Replicate()"
                   : p.sizes.empty() || !rows
                       ? (p.sizes.size() <= 1 ? "Shard(0)" : "Ragged")
                       : formatted("Shard({})", p.order.empty() ? 0 : p.order[0]);
  // Copies of bindings: clang before 16 can't capture them.
  auto shaped = [&, flat = flat, i = i](const at::Tensor& shard) {
    at::Tensor part = flat->part_of(i, shard).detach();
    if (info.rectangles.size() != 1) return part;
    std::vector<int64_t> in_memory, back(p.order.size());
    for (size_t d = 0; d < p.order.size(); ++d) {
      in_memory.push_back(info.rectangles[0].sizes[p.order[d]]);
      back[p.order[d]] = static_cast<int64_t>(d);
    }
    return part.view(in_memory).permute(back);
  };
  Unseen unseen;
  if (flat->shard.defined()) info.local = shaped(flat->read_master());
  flat->await_gradient();
  if (flat->grad.defined()) info.local_grad = shaped(flat->grad);
  return info;
}

at::Tensor Sharded::full_tensor(const std::string& parameter) const {
  const Locked model = shard::lock(*this);
  auto [flat, i] = model->find(parameter);
  require_values(flat->unit());
  Unseen unseen;
  return flat->view_of(i, model->gatherer.gather_shard(*flat, flat->read_master(), "full_tensor"))
      .clone();
}

at::Tensor Sharded::full_grad(const std::string& parameter) const {
  const Locked model = shard::lock(*this);
  model->reducer.forget_cleared();
  model->reducer.settle_factor();
  auto [flat, i] = model->find(parameter);
  if (!flat->grad.defined()) return {};
  flat->await_gradient();
  Unseen unseen;
  return flat->view_of(i, model->gatherer.gather_shard(*flat, flat->grad, "full_grad")).clone();
}

// --- state dicts ---

StateTensor::StateTensor(const at::Tensor& whole)
    : StateTensor(whole.sizes().vec(), whole.scalar_type(),
                  {{{std::vector<int64_t>(whole.dim(), 0), whole.sizes().vec()}, whole}}) {}

StateTensor::StateTensor(std::vector<int64_t> all, at::ScalarType type,
                         std::vector<StateShard> parts)
    : sizes(std::move(all)), dtype(type), shards(std::move(parts)) {}

const at::Tensor& StateTensor::full() const {
  if (shards.size() != 1 || shards.front().rectangle.sizes != sizes)
    throw Error("a tensor of a sharded state dict isn't whole.",
                "make the state dict with StateDictType::FULL_STATE_DICT.");
  return shards.front().values;
}

StateDict Sharded::full_state_dict(bool rank0_only, bool offload_to_cpu) const {
  const Locked model = shard::lock(*this);
  Unseen unseen;
  bool keep = !rank0_only || model->world().rank() == 0;
  StateDict state;
  Flat* gathered = nullptr;  // a flat's parameters are mostly consecutive
  at::Tensor full;
  auto add = [&](const std::string& name, at::Tensor value) {
    if (keep) state.insert_or_assign(name, offload_to_cpu ? value.cpu() : value);
  };
  shard::for_each_module(*model->tree, [&](const shard::ModuleTree& node) {
    for (const auto& [name, tensor] : node.parameters) {
      shard::StorageTag* tag = shard::tag_of(tensor);
      if (!tag || tag->kind != shard::StorageTag::kParameters) {
        add(name, tensor.detach().clone());
        continue;
      }
      Flat& flat = *static_cast<Flat*>(tag->owner);
      require_values(flat.unit());
      if (&flat != gathered)
        full = model->gatherer.gather_shard(flat, flat.read_master(), "full_state_dict");
      gathered = &flat;
      if (keep) add(name, flat.view_of(flat.index_of(tensor), full).clone());
    }
    for (const auto& [name, tensor] : node.buffers) add(name, tensor.detach().clone());
  });
  return state;
}

std::map<std::string, ShardInfo> Sharded::shards() const {
  const Locked model = shard::lock(*this);
  std::map<std::string, ShardInfo> state;
  for_each_parameter(*model, [&](shard::Unit&, Flat& flat, size_t i) {
    const std::string& name = flat.parameters()[i].name();
    state.emplace(name, shard_of(name));
  });
  return state;
}

void Sharded::load_full_state_dict(const StateDict& state, bool strict) const {
  const Locked model = shard::lock(*this);
  std::string missing, unknown;
  auto find = [&](const std::string& name, at::IntArrayRef sizes) -> at::Tensor {
    auto entry = state.find(name);
    if (entry == state.end()) {
      if (missing.size() < 200) missing += (missing.empty() ? "\"" : ", \"") + name + "\"";
      return {};
    }
    const at::Tensor& value = entry->second.full();
    if (value.sizes() != sizes) {
      std::stringstream text;
      text << "\"" << name << "\" has shape " << value.sizes() << " in the state dict and " << sizes
           << " in the model.";
      throw Error(text.str(), "load a state dict of a model with the same configuration.");
    }
    return value;
  };
  // All names and shapes are checked before anything is written.
  std::vector<std::pair<at::Tensor, at::Tensor>> found;  // the module's tensor, its new value
  shard::for_each_module(*model->tree, [&](const shard::ModuleTree& node) {
    for (const auto* tensors : {&node.parameters, &node.buffers})
      for (const auto& [name, tensor] : *tensors) {
        at::Tensor value = find(name, tensor.sizes());
        if (value.defined()) found.emplace_back(tensor, value);
      }
  });
  if (strict && !missing.empty())
    throw Error(formatted("the state dict has no {}.", missing),
                "load_full_state_dict(state, /*strict=*/false) leaves them unchanged.");
  if (strict) {
    for (const auto& [name, value] : state) {
      bool known = false;
      shard::for_each_module(*model->tree, [&, &name = name](const shard::ModuleTree& node) {
        for (const auto* tensors : {&node.parameters, &node.buffers})
          for (const auto& entry : *tensors) known |= entry.first == name;
      });
      if (!known && unknown.size() < 200)
        unknown += (unknown.empty() ? "\"" : ", \"") + name + "\"";
    }
    if (!unknown.empty())
      throw Error(formatted("the model has no {}.", unknown),
                  "load_full_state_dict(state, /*strict=*/false) ignores them.");
  }
  Unseen unseen;
  model->gatherer.reshard_all();
  model->gatherer.synchronize_readers("load_full_state_dict");
  shard::before_change(*model);
  for (auto& [tensor, value] : found) {
    shard::StorageTag* tag = shard::tag_of(tensor);
    if (!tag || tag->kind != shard::StorageTag::kParameters) {
      tensor.copy_(value);
      continue;
    }
    Flat& flat = *static_cast<Flat*>(tag->owner);
    flat.keep_part(flat.index_of(tensor), value.to(flat.master_dtype()), flat.edit_master());
    if (missing.empty()) flat.unit().meta = false;
  }
  for (const auto& unit : model->units) model->gatherer.changed(*unit);
}

// --- summon_full_params ---

FullParams::FullParams(std::shared_ptr<shard::Model> model, SummonOptions options)
    : model_(std::move(model)), options_(options), exceptions_(std::uncaught_exceptions()) {
  const Locked engine = model_->lock();
  bool keep = !options_.rank0_only || engine->world().rank() == 0;
  for (const auto& unit : engine->units) require_values(*unit);
  for (const auto& unit : engine->units) {
    engine->gatherer.pin(*unit, /*writable=*/true);
    for (const auto& flat : unit->flats)
      for (const Parameter& p : flat->parameters())
        for (const std::string& name : p.names) {
          if (!keep) continue;
          Unseen unseen;
          values_[name] = options_.offload_to_cpu ? p.handle.detach().cpu().clone() : p.handle;
        }
    if (options_.offload_to_cpu || !keep) engine->gatherer.unpin(*unit);
  }
  engine->masters.summon();
}

FullParams::~FullParams() noexcept(false) {
  if (!model_) return;
  const Locked model = model_->lock();
  Unseen unseen;
  model->masters.dismiss();
  bool unwinding = std::uncaught_exceptions() > exceptions_;
  bool write = options_.writeback && !unwinding;
  struct Written {
    Flat* flat;
    size_t parameter;
    at::Tensor value;
  };
  std::vector<Written> written;
  if (write) {
    // With rank0_only the other ranks have no values, so rank 0 broadcasts its own.
    for_each_parameter(*model, [&](shard::Unit& unit, Flat& flat, size_t i) {
      const Parameter& p = flat.parameters()[i];
      at::Tensor value = values_.count(p.name()) ? values_[p.name()] : at::Tensor();
      bool changed = options_.offload_to_cpu || (value.defined() && flat.was_written(i));
      if (options_.rank0_only && model->world().size() > 1) {
        at::Tensor sent = value.defined()
                              ? value.detach().to(model->device()).contiguous()
                              : at::empty(p.sizes, flat.shard.options().device(model->device()));
        if (sent.numel() > 0) model->world().comm().broadcast(sent, 0, {.label = p.name()});
        value = sent;
        changed = true;
      }
      if (changed) written.push_back({&flat, i, value.detach().clone()});
    });
    model->gatherer.synchronize_readers("summon_full_params");
    shard::before_change(*model);
  }
  for (const auto& unit : model->units) model->gatherer.unpin(*unit);
  for (auto& [flat, i, value] : written) {
    // Elements that weren't written keep the master's precision.
    at::Tensor master = flat->edit_master();
    at::Tensor before = flat->part_of(i, flat->shard).to(master.device());
    at::Tensor part = flat->part_of(i, master);
    at::Tensor fresh = at::empty_like(master);
    flat->keep_part(i, value.to(fresh.device()), fresh);
    at::Tensor after = flat->part_of(i, fresh);
    part.copy_(at::where(after.to(flat->param_dtype()) == before, part, after));
  }
  if (write)
    for (const auto& unit : model->units) model->gatherer.changed(*unit);
}

FullParams Sharded::summon_full_params(SummonOptions options) const {
  return FullParams(shard::model_of(*this), options);
}

// --- averages of weights ---

namespace {

// The flats and their parameters, as one line each.
std::vector<std::string> shapes_of(const Engine& model) {
  std::vector<std::string> shapes;
  for (const Flat* flat : model.flats()) {
    std::stringstream text;
    text << "unit \"" << flat->unit().name << "\" (" << flat->unit().group->text << ")";
    for (const Parameter& p : flat->parameters())
      text << ", \"" << p.name() << "\" " << at::IntArrayRef(p.sizes);
    shapes.push_back(text.str());
  }
  return shapes;
}

}  // namespace

void Sharded::lerp_parameters(const Sharded& other, double weight) const {
  const auto mine = shapes_of(*shard::lock(*this)), theirs = shapes_of(*shard::lock(other));
  const auto [here, there] = std::mismatch(mine.begin(), mine.end(), theirs.begin(), theirs.end());
  if (here != mine.end() || there != theirs.end())
    throw Error(formatted("lerp_parameters: this model has {}, and the other {}.",
                          here != mine.end() ? *here : "nothing more",
                          there != theirs.end() ? *there : "nothing more"),
                "build both from the same code, and shard both with the same options.");
  for (const auto& unit : shard::lock(other)->units) require_values(*unit);
  const auto update = [&](const auto& change) {
    const Locked model = shard::lock(*this);
    Unseen unseen;
    change(*model);
  };
  update([](Engine& model) {
    model.reducer.settle_factor();
    shard::begin_update(model);
  });
  for (size_t i = 0; i < mine.size(); ++i) {
    // One lock at a time (model.h).
    const at::Tensor value = shard::lock(other)->flats()[i]->read_master();
    update([&](Engine& model) {
      at::Tensor master = model.flats()[i]->edit_master();
      if (at::isFloatingType(master.scalar_type()))
        master.lerp_(value.to(master.options()), weight);
      model.flats()[i]->settle_master();
    });
  }
  update([](Engine& model) { shard::end_update(model, /*shards_written=*/true); });
}

// --- models built on the meta device ---

namespace shard {
namespace {

// Gives values to a unit that was built on the meta device: `init` writes them module by module, or
// else the modules' own reset_parameters() does.
void give_values(Engine& model, Unit& unit, const std::function<void(torch::nn::Module&)>& init) {
  at::NoGradGuard no_grad;
  // Full tensors in the master's dtype, for the module's own code to write to.
  std::vector<at::Tensor> fulls;
  for (const auto& flat : unit.flats) {
    fulls.push_back(
        at::zeros({flat->layout().full_numel()}, flat->master_options().device(model.device())));
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      set_key(flat->parameters()[i].handle, false);
      become(flat->parameters()[i].handle, flat->view_of(i, fulls.back()));
    }
  }
  auto bind = [&] {
    for (const auto& flat : unit.flats)
      for (size_t i = 0; i < flat->parameters().size(); ++i) flat->bind(i);
  };
  try {
    for (const OwnedModule& owned : unit.modules) {
      if (!owned.module)
        throw Error(formatted("unit \"{}\": a TorchScript module can't be initialised.", unit.name),
                    "load its values with load_full_state_dict().");
      for (const auto& buffer : owned.module->named_buffers(false))
        if (buffer.value().is_meta())
          become(buffer.value(), at::zeros(buffer.value().sizes(),
                                           buffer.value().options().device(model.device())));
      if (init)
        init(*owned.module);
      else
        reset_parameters(*owned.module, owned.path);
    }
  } catch (...) {
    bind();
    throw;
  }
  Unseen unseen;
  for (size_t f = 0; f < unit.flats.size(); ++f) {
    Flat& flat = *unit.flats[f];
    for (size_t i = 0; i < flat.parameters().size(); ++i)
      flat.keep_part(i, flat.view_of(i, fulls[f]), flat.edit_master());
  }
  bind();
  unit.meta = false;
  model.gatherer.changed(unit);
}

}  // namespace
}  // namespace shard

void Sharded::materialize(at::Device device,
                          const std::function<void(torch::nn::Module&)>& init) const {
  const Locked model = shard::lock(*this);
  if (device.type() != model->device().type())
    throw Error(formatted("materialize on {}: the model was sharded on {}.", device.str(),
                          model->device().str()),
                "pass the device to fully_shard: .device = …");
  model->gatherer.reshard_all();
  model->gatherer.synchronize_readers("materialize");
  for (const auto& unit : model->units)
    if (unit->meta) shard::give_values(*model, *unit, init);
  // Modules without parameters of their own may have buffers.
  shard::for_each_module(*model->tree, [&](const shard::ModuleTree& node) {
    for (const auto& [name, buffer] : node.buffers)
      if (buffer.is_meta())
        shard::become(buffer, at::zeros(buffer.sizes(), buffer.options().device(device)));
  });
}

}  // namespace fsdp
