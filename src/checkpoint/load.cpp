// load: finds each tensor of a model in the checkpoint, checks everything, then reads.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <functional>
#include <set>

#include "base/format.h"
#include "base/log.h"
#include "checkpoint/files_needed.h"
#include "checkpoint/mismatch.h"
#include "checkpoint/same_model.h"
#include "checkpoint/source.h"
#include "checkpoint/stream.h"
#include "checkpoint/together.h"
#include "fsdp/checkpoint.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "optim/states.h"
#include "shard/contents.h"
#include "shard/deferred.h"
#include "shard/on_disk.h"
#include "shard/tensor_access.h"

namespace fsdp::checkpoint {
namespace {

// Finds tensors by name and collects mismatches.
class Matching {
 public:
  Matching(Source& source, const Chosen& only) : source_(source), only_(only) {}

  // Whether a parameter is to be loaded.
  bool wants(const std::string& name) const { return !only_ || only_(name); }

  // The name, out of a tensor's several names, under which the checkpoint holds it; "" if it
  // doesn't or the shape differs.
  std::string find(const std::string& prefix, const std::vector<std::string>& names,
                   const std::vector<int64_t>& sizes, bool may_be_missing) {
    std::string found;
    for (const auto& name : names) {
      const auto* entry = source_.tensor(prefix + name);
      if (!entry) continue;
      used_.insert(prefix + name);
      if (entry->sizes != sizes)
        note(formatted("\"{}{}\" has shape {} in the checkpoint and {} in the model", prefix, name,
                       shape_text(entry->sizes), shape_text(sizes)),
             prefix + name);
      else if (found.empty())
        found = prefix + name;
    }
    const bool known = std::any_of(names.begin(), names.end(), [&](const auto& name) {
      return source_.tensor(prefix + name) != nullptr;
    });
    if (!known && !may_be_missing)
      note(formatted("\"{}{}\" is in the model but not in the checkpoint", prefix, names.front()),
           prefix + names.front());
    return found;
  }

  void use(const std::string& name) { used_.insert(name); }

  // Notes what the checkpoint has below `prefix` that wasn't used.
  void note_unused(const std::string& prefix, const std::string& whose) {
    for (const auto& [name, entry] : source_.metadata().tensors)
      if (name.starts_with(prefix) && !used_.contains(name) && wants(name.substr(prefix.size())))
        note(formatted("\"{}\" is in the checkpoint but not in the {}", name, whose), name);
  }

  void note(const std::string& problem, const std::string& name) {
    problems_.push_back(problem);
    skipped_.push_back(name);
  }

  // The names that didn't match; with `strict`, an Error that shows the first of them.
  std::vector<std::string> finish(bool strict) const {
    if (problems_.empty() || !strict) return skipped_;
    throw_mismatch(source_.dir().string(), problems_);
  }

 private:
  Source& source_;
  const Chosen& only_;
  std::set<std::string> used_;
  std::vector<std::string> problems_, skipped_;
};

// A prefix that is missing entirely is a different mistake from single missing tensors.
void require_prefix(const Source& source, const std::string& prefix, const std::string& hint) {
  const auto begins = [&](const auto& entry) { return entry.first.starts_with(prefix); };
  const auto& metadata = source.metadata();
  if (std::any_of(metadata.tensors.begin(), metadata.tensors.end(), begins) ||
      std::any_of(metadata.values.begin(), metadata.values.end(), begins))
    return;
  const std::string first = metadata.tensors.empty() ? "nothing" : metadata.tensors.begin()->first;
  throw Error(formatted("{}: has no tensor named \"{}…\"; the first tensor is \"{}\".",
                        source.dir(), prefix, first),
              hint);
}

constexpr const char* kModelHint =
    "in Python, save {\"model\": model's state_dict, \"optim\": optimizer's state_dict}.";
constexpr const char* kOptimizerHint =
    "load it with .optimizer = false to start with fresh optimizer states.";

// How the rows of a parameter are made of the checkpoint's; nullopt: they are read as they are.
std::optional<MadeOfRows> made_of(const Source& source, const LoadOptions& options,
                                  const std::vector<std::string>& names,
                                  const std::vector<int64_t>& sizes) {
  if (!options.made_of) return std::nullopt;
  for (const auto& name : names)
    if (const auto* entry = source.tensor("model." + name); entry && entry->sizes == sizes)
      return std::nullopt;
  return options.made_of(names.front());
}

// The sizes that the checkpoint must have.
std::vector<int64_t> stored_sizes(const std::vector<int64_t>& sizes,
                                  const std::optional<MadeOfRows>& made) {
  return made ? std::vector{sizes[0], made->columns} : sizes;
}

// What is read for a part of a parameter.
Rectangle rectangle_read(const Part& part, const std::optional<MadeOfRows>& made) {
  if (!made) return part.rectangle;
  return {{part.rectangle.offsets[0], 0}, {part.rectangle.sizes[0], made->columns}};
}

void read_into(Source& source, const std::string& name, const Part& part,
               const std::optional<MadeOfRows>& made) {
  if (!made) return source.read(name, part);
  const Rectangle all = rectangle_read(part, made);
  const int64_t rows = all.sizes[0], columns = made->columns;
  const int64_t step = std::clamp<int64_t>(kPieceBytes / (4 * columns), 1, rows);
  const at::Tensor numbers = at::empty({step, columns}, at::TensorOptions().dtype(at::kFloat));
  for (int64_t at = 0; at < rows; at += step) {
    const int64_t count = std::min(step, rows - at);
    const Part piece{{{all.offsets[0] + at, 0}, {count, columns}}, numbers.narrow(0, 0, count)};
    source.read(name, piece);
    part.memory.narrow(0, at, count)
        .copy_(
            made->make(piece.memory).narrow(1, part.rectangle.offsets[1], part.rectangle.sizes[1]));
  }
}

// --- a sharded model ---

// What the checkpoint has for one flat. Each flat is read completely before the next one: until
// then its master may be a copy, and its state on disk is held in memory.
struct FlatFill {
  struct Found {
    size_t parameter;
    std::optional<size_t> slot;  // of its state; nullopt: its values
    std::string name;
    std::optional<MadeOfRows> made;
  };
  std::vector<Found> found;
  // Per parameter; empty: the optimizer doesn't update it, or isn't loaded.
  std::vector<int64_t> steps;
};

struct ShardedPlan {
  std::map<shard::Flat*, FlatFill> flats;
  std::set<shard::Unit*> incomplete;  // units that don't get all of their values
  std::vector<std::pair<std::string, at::Tensor>> replicated;
  std::vector<std::string> skipped;
};

// Plans to read `found` into a parameter. An Error if the checkpoint lacks a part of it.
void add(ShardedPlan& plan, Source& source, const ShardedParameter& to, std::optional<size_t> slot,
         const std::string& found, const std::optional<MadeOfRows>& made = {}) {
  plan.flats[to.flat].found.push_back({to.index, slot, found, made});
  for (const auto& part : parts_of(*to.flat, to.index, to.flat->part_of(to.index, to.flat->shard)))
    source.check(found, rectangle_read(part, made));
}

int64_t read_steps(Source& source, const std::string& name) {
  const at::Tensor step = source.read_whole(name);
  const double value = step.numel() == 1 ? step.item().toDouble() : -1;
  if (!(value >= 0) || value > 1e15)
    throw Error(formatted("{}: \"{}\" isn't a valid number of updates.", source.dir(), name),
                "the checkpoint is damaged; load another one.");
  return static_cast<int64_t>(value);
}

void plan_states(ShardedPlan& plan, Matching& matching, Source& source, shard::Engine& model,
                 const Optimizer& optimizer) {
  require_prefix(source, "optim.", kOptimizerHint);
  for (const auto& sharded : sharded_parameters(model)) {
    const auto& p = sharded.parameter();
    if (!p.handle.requires_grad()) continue;
    auto& all_steps = plan.flats[sharded.flat].steps;
    all_steps.resize(sharded.flat->parameters().size());
    int64_t& steps = all_steps[sharded.index];
    bool any = false;
    const auto& states = optim::states_of(optimizer).names(*sharded.flat, sharded.index);
    for (size_t slot = 0; slot < states.size(); ++slot) {
      std::vector<std::string> names;
      for (const auto& name : p.names) names.push_back(name + "." + states[slot]);
      const auto found = matching.find("optim.state.", names, p.sizes, /*may_be_missing=*/true);
      if (found.empty()) continue;
      any = true;
      add(plan, source, sharded, slot, found);
    }
    for (const auto& name : p.names) {
      const std::string step = "optim.state." + name + ".step";
      if (!source.tensor(step)) continue;
      matching.use(step);
      steps = std::max(steps, read_steps(source, step));
    }
    // torch's SGD doesn't count updates; all that matters is whether there was a first one.
    if (any && steps == 0) steps = 1;
  }
  matching.note_unused("optim.state.", "optimizer");
}

void plan_values(ShardedPlan& plan, Matching& matching, Source& source, shard::Engine& model,
                 const LoadOptions& options) {
  require_prefix(source, "model.", kModelHint);
  for (const auto& sharded : sharded_parameters(model)) {
    const auto& p = sharded.parameter();
    if (!matching.wants(p.name())) {
      plan.incomplete.insert(&sharded.flat->unit());
      continue;
    }
    const auto made = made_of(source, options, p.names, p.sizes);
    const auto found = matching.find("model.", p.names, stored_sizes(p.sizes, made), false);
    if (found.empty()) {
      plan.incomplete.insert(&sharded.flat->unit());
      continue;
    }
    add(plan, source, sharded, std::nullopt, found, made);
  }
  for (const auto& [name, tensor] : replicated_tensors(model)) {
    if (!matching.wants(name)) continue;
    const auto found = matching.find("model.", {name}, tensor.sizes().vec(), false);
    if (found.empty()) continue;
    source.check(found, whole(tensor).rectangle);
    plan.replicated.emplace_back(found, tensor);
  }
  matching.note_unused("model.", "model");
}

ShardedPlan make_plan(Source& source, shard::Engine& model, const Optimizer* optimizer,
                      const LoadOptions& options) {
  ShardedPlan plan;
  Matching matching(source, options.only);
  if (options.model)
    plan_values(plan, matching, source, model, options);
  else
    for (const auto& unit : shard::units_of(model)) plan.incomplete.insert(unit.get());
  if (optimizer && options.optimizer) plan_states(plan, matching, source, model, *optimizer);
  plan.skipped = matching.finish(options.strict);
  return plan;
}

// Restores the optimizer's states; zero if the checkpoint has none.
void read_flat(Source& source, shard::Flat& flat, const FlatFill& fill, Optimizer* optimizer) {
  const at::Tensor master = flat.edit_master();
  std::vector<at::Tensor> slots;
  const bool updated = std::any_of(fill.steps.begin(), fill.steps.end(), std::identity());
  if (!fill.steps.empty() && (updated || !optim::states_of(*optimizer).slots(flat).empty()))
    slots = optim::states_of(*optimizer).restore(flat, fill.steps);
  for (const auto& slot : slots) slot.zero_();
  for (const auto& found : fill.found) {
    const at::Tensor mine =
        found.slot ? optim::states_of(*optimizer)
                         .part(flat, found.parameter, *found.slot, slots.at(*found.slot))
                   : flat.part_of(found.parameter, master);
    for (const auto& part : parts_of(flat, found.parameter, mine))
      read_into(source, found.name, part, found.made);
  }
}

void read_model(Source& source, const ShardedPlan& plan, shard::Engine& model,
                Optimizer* optimizer) {
  for (const auto& unit : shard::units_of(model)) {
    for (const auto& flat : unit->flats)
      if (const auto fill = plan.flats.find(flat.get()); fill != plan.flats.end())
        read_flat(source, *flat, fill->second, optimizer);
    shard::loaded(model, *unit);
    for (const auto& flat : unit->flats) shard::put_away(*flat);
    if (!plan.incomplete.contains(unit.get())) unit->meta = false;
  }
  for (const auto& [name, tensor] : plan.replicated) {
    if (tensor.is_meta())
      shard::become(tensor,
                    at::zeros(tensor.sizes(), tensor.options().device(shard::device_of(model))));
    source.read(name, whole(tensor));
  }
}

}  // namespace

std::set<std::string> files_needed(const std::filesystem::path& dir, const Sharded& sharded,
                                   const Optimizer* optimizer, const LoadOptions& options) {
  const auto model = shard::model_of(sharded);
  const auto engine = model->lock();
  shard::Unseen unseen;
  Source source(dir);
  std::set<std::string> files;
  source.only_note_files(&files);
  make_plan(source, *engine, optimizer, options);
  const std::string own = formatted("extra.rank{}.", model->world().rank());
  for (const auto& [name, entry] : source.metadata().tensors)
    if (name.starts_with(own))
      for (const auto& chunk : entry.chunks) files.insert(chunk.place.file);
  for (const auto& [name, place] : source.metadata().values)
    if (name.starts_with(own)) files.insert(place.file);
  return files;
}

Loaded load(const std::filesystem::path& dir, const Sharded& sharded, Optimizer* optimizer,
            const LoadOptions& options) {
  const auto model = shard::model_of(sharded);
  const World& world = model->world();
  const std::string label = "loading the checkpoint " + dir.filename().string();
  const auto engine = model->lock();
  require_same_model(model, optimizer, "checkpoint::load");
  shard::Unseen unseen;

  // A link may change while ranks read it, so rank 0 resolves it for all.
  std::error_code problem;
  const auto target =
      by_collectives(world).from_first(label, std::filesystem::read_symlink(dir, problem).string());
  const auto place = target.empty() ? dir : dir.parent_path() / target;
  std::optional<Source> source;
  ShardedPlan plan;
  Loaded loaded;
  together(world, label, [&] {
    source.emplace(place);
    plan = make_plan(*source, *engine, optimizer, options);
    loaded.skipped = plan.skipped;
    auto extras = read_extras(*source, world.rank(), &loaded.skipped);
    loaded.extra = std::move(extras.run);
    loaded.per_rank = std::move(extras.rank);
  });

  if (source->is_unchecked() && world.rank() == 0)
    log::info(formatted(
        "{} has no sums (Python writes none), so damage to its bytes would not be noticed.", place));
  shard::begin_load(*engine, "checkpoint::load");
  try {
    together(world, label + ": data", [&] { read_model(*source, plan, *engine, optimizer); });
  } catch (...) {
    for (const auto& unit : shard::units_of(*engine)) {
      try {
        shard::loaded(*engine, *unit);  // some of it may have been read
        for (const auto& flat : unit->flats) shard::put_away(*flat);
      } catch (const std::exception&) {  // the first failure is reported
      }
    }
    throw;
  }
  return loaded;
}

// --- a plain module ---

namespace {

struct Named {
  at::Tensor tensor;
  std::vector<std::string> names;  // the checkpoint may have it under any of them
};

std::vector<Named> tensors_of(torch::nn::Module& module) {
  std::vector<Named> tensors;
  std::map<const void*, size_t> known;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (shard::tag_of(tensor) && !shard::deferred::is_deferred(tensor))
      throw Error(formatted("\"{}\" has no memory of its own to load into.", name),
                  "use checkpoint::load(dir, sharded, optimizer) for a sharded model.");
    const auto [place, fresh] = known.emplace(tensor.unsafeGetTensorImpl(), tensors.size());
    if (fresh) tensors.push_back({tensor, {}});
    tensors[place->second].names.push_back(name);
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return tensors;
}

// Memory for a tensor that has none: deferred, or on the meta device.
bool lacks_memory(const at::Tensor& tensor) {
  return tensor.is_meta() || shard::deferred::is_deferred(tensor);
}

at::Tensor memory_for(const at::Tensor& tensor) {
  const auto device = tensor.is_meta() ? at::Device(at::kCPU) : tensor.device();
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
}

}  // namespace

Loaded load(const std::filesystem::path& dir, torch::nn::Module& module,
            const LoadOptions& options) {
  shard::Unseen unseen;
  at::NoGradGuard no_grad;
  Source source(dir);
  Matching matching(source, options.only);
  require_prefix(source, "model.", kModelHint);
  struct Fill {
    std::string name;
    Part part;
    std::optional<MadeOfRows> made;
  };
  std::vector<Fill> fills;
  std::vector<std::pair<at::Tensor, at::Tensor>> fresh;  // a tensor and its future memory
  for (const auto& [tensor, names] : tensors_of(module)) {
    if (!matching.wants(names.front())) continue;
    const std::vector<int64_t> sizes = tensor.sizes().vec();
    const auto made = made_of(source, options, names, sizes);
    const auto found = matching.find("model.", names, stored_sizes(sizes, made), false);
    if (found.empty()) continue;
    at::Tensor memory = tensor;
    if (lacks_memory(tensor)) fresh.emplace_back(tensor, memory = memory_for(tensor));
    fills.push_back({found, whole(memory), made});
  }
  matching.note_unused("model.", "module");
  Loaded loaded;
  loaded.skipped = matching.finish(options.strict);
  for (const auto& [name, part, made] : fills) source.check(name, rectangle_read(part, made));
  auto extras = read_extras(source, 0, &loaded.skipped);
  loaded.extra = std::move(extras.run);
  loaded.per_rank = std::move(extras.rank);
  for (const auto& [name, part, made] : fills) read_into(source, name, part, made);
  for (const auto& [tensor, memory] : fresh) {
    shard::set_key(tensor, false);
    shard::become(tensor, memory);
  }
  return loaded;
}

}  // namespace fsdp::checkpoint
