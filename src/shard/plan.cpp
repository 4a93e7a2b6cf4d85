#include "shard/plan.h"

#include <algorithm>
#include <cctype>
#include <unordered_map>

#include "base/format.h"
#include "base/nearest.h"
#include "fsdp/error.h"

namespace fsdp::shard {
namespace {

struct Seen {
  Parameter parameter;
  int places = 0;  // number of modules that have it
};

class Planner {
 public:
  Planner(const std::vector<ModuleTree*>& trees, const ShardOptions& options) : options_(options) {
    for (const at::Tensor& tensor : options.ignored_parameters)
      ignored_.insert(tensor.unsafeGetTensorImpl());
    for (ModuleTree* tree : trees)
      for_each_module(*tree, [&](ModuleTree& node) {
        const auto is = [&](const char* kind) {
          return node.view.type.find(kind) != std::string::npos;
        };
        for (const auto& [name, tensor] : node.parameters) {
          if (!wanted(tensor)) continue;
          Seen& seen = seen_[tensor.unsafeGetTensorImpl()];
          seen.parameter.handle = tensor;
          seen.parameter.names.push_back(name);
          seen.parameter.is_norm |= is("Norm");
          seen.parameter.is_batch_norm |= is("BatchNorm") || is("InstanceNorm");
          seen.parameter.is_embedding |= is("Embedding");
          seen.parameter.is_convolution |= is("Conv1d") || is("Conv2d") || is("Conv3d");
          ++seen.places;
        }
      });
  }

  void root(const std::vector<ModuleTree*>& trees) {
    std::vector<Seen*> left;
    for (ModuleTree* tree : trees)
      for (Seen* seen : descend(*tree, /*top=*/true)) left.push_back(seen);
    PlannedUnit unit{.name = trees.size() == 1 ? "root" : "", .root = true, .tops = trees};
    for (ModuleTree* tree : trees)
      if (trees.size() > 1) unit.name += (unit.name.empty() ? "" : " + ") + tree->view.type;
    take(left, unit, /*everything=*/true);
    units.push_back(std::move(unit));
  }

  std::vector<PlannedUnit> units;

 private:
  bool wanted(const at::Tensor& tensor) const {
    StorageTag* tag = tag_of(tensor);
    return !ignored_.count(tensor.unsafeGetTensorImpl()) &&
           !(tag && tag->kind == StorageTag::kParameters);
  }

  // Children first, so that the innermost module the policy selects gets the parameter. Returns the
  // parameters no unit has taken, once per place.
  std::vector<Seen*> descend(ModuleTree& node, bool top) {
    std::vector<Seen*> left;
    node.view.numel = 0;
    for (const auto& [name, tensor] : node.parameters) {
      node.view.numel += tensor.numel();
      if (wanted(tensor)) left.push_back(&seen_[tensor.unsafeGetTensorImpl()]);
    }
    for (ModuleTree& child : node.children) {
      for (Seen* seen : descend(child, /*top=*/false)) left.push_back(seen);
      node.view.numel += child.view.numel;
    }
    node.view.remaining = 0;
    for (Seen* seen : left) node.view.remaining += seen->parameter.handle.numel();
    if (top || left.empty()) return left;
    if (auto decision = options_.wrap(node.view)) {
      PlannedUnit unit{.name = node.view.path, .options = *decision, .tops = {&node}};
      left = take(left, unit, /*everything=*/false);
      if (!unit.parameters.empty()) units.push_back(std::move(unit));
    }
    return left;
  }

  // Moves parameters into the unit; returns those that are also used outside of it.
  std::vector<Seen*> take(const std::vector<Seen*>& candidates, PlannedUnit& unit,
                          bool everything) {
    std::unordered_map<Seen*, int> inside;
    for (Seen* seen : candidates) ++inside[seen];
    std::vector<Seen*> shared;
    std::unordered_set<Seen*> taken;
    for (Seen* seen : candidates) {
      if (!everything && inside[seen] < seen->places) {
        shared.push_back(seen);
      } else if (taken.insert(seen).second) {
        unit.parameters.push_back(seen->parameter);
      }
    }
    return shared;
  }

  const ShardOptions& options_;
  std::unordered_set<c10::TensorImpl*> ignored_;
  std::unordered_map<c10::TensorImpl*, Seen> seen_;
};

}  // namespace

std::vector<PlannedUnit> plan_units(std::vector<ModuleTree*> trees, const ShardOptions& options) {
  Planner planner(trees, options);
  planner.root(trees);
  std::unordered_map<const void*, std::string> storages;
  for (PlannedUnit& unit : planner.units)
    for (Parameter& p : unit.parameters) {
      describe_memory(p);
      if (!p.handle.has_storage() || p.handle.layout() != at::kStrided)
        throw Error(formatted("parameter \"{}\" is not a dense tensor.", p.name()),
                    "leave it out with .ignored_parameters.");
      if (p.handle.is_complex())
        throw Error(formatted("parameter \"{}\" is complex ({}), which can't be sharded.", p.name(),
                              c10::toString(p.handle.scalar_type())),
                    "register at::view_as_real(parameter) and take at::view_as_complex() of it in "
                    "forward, or leave it out with .ignored_parameters.");
      if (p.handle.is_meta()) continue;
      auto [known, fresh] = storages.emplace(p.handle.storage().unsafeGetStorageImpl(), p.name());
      if (!fresh && p.handle.numel() > 0)
        throw Error(formatted("parameters \"{}\" and \"{}\" are views of one memory.",
                              known->second, p.name()),
                    "register the whole tensor as a parameter and take views in forward.");
    }
  return std::move(planner.units);
}

namespace {

// "blocks.*.norm" for "blocks.3.norm".
std::string numbers_as_stars(const std::string& path) {
  std::string out;
  for (size_t i = 0; i < path.size();) {
    size_t end = std::min(path.find('.', i), path.size());
    const bool number = end > i && std::all_of(path.begin() + static_cast<int64_t>(i),
                                               path.begin() + static_cast<int64_t>(end),
                                               [](unsigned char c) { return std::isdigit(c); });
    out += (out.empty() ? "" : ".") + (number ? std::string("*") : path.substr(i, end - i));
    i = end + 1;
  }
  return out;
}

}  // namespace

std::vector<std::string> unmatched(const std::vector<ModuleTree*>& trees,
                                   const WrapPolicy& policy) {
  std::vector<std::string> warnings;
  for (const WrapPolicy::Wanted& wanted : policy.wanted()) {
    bool found = false;
    std::vector<std::string> there;  // each kind once: "blocks.*", not every block
    for (ModuleTree* tree : trees)
      for_each_module(*tree, [&](const ModuleTree& node) {
        if (&node == tree) return;
        found |= wanted.matches(node.view);
        std::string name = wanted.is_type ? node.view.type : numbers_as_stars(node.view.path);
        if (node.view.numel > 0 && std::find(there.begin(), there.end(), name) == there.end())
          there.push_back(name);
      });
    if (found) continue;
    std::string near = nearest_word(there, wanted.text), all;
    for (const std::string& name : there)
      if (all.size() < 200) all += (all.empty() ? "\"" : ", \"") + name + "\"";
    warnings.push_back(formatted("the wrap policy's {} \"{}\" matches no module{} There are {}.",
                                 wanted.is_type ? "type" : "pattern", wanted.text,
                                 near.empty() ? "." : formatted("; did you mean \"{}\"?", near),
                                 all.empty() ? "no modules with parameters inside it" : all));
  }
  return warnings;
}

std::vector<std::pair<at::Tensor, std::vector<std::string>>> names_of(
    const std::vector<ModuleTree*>& trees) {
  std::vector<std::pair<at::Tensor, std::vector<std::string>>> all;
  std::unordered_map<c10::TensorImpl*, size_t> index;
  for (ModuleTree* tree : trees)
    for_each_module(*tree, [&](ModuleTree& node) {
      for (const auto& [name, tensor] : node.parameters) {
        auto [at, fresh] = index.emplace(tensor.unsafeGetTensorImpl(), all.size());
        if (fresh) all.push_back({tensor, {}});
        all[at->second].second.push_back(name);
      }
    });
  return all;
}

}  // namespace fsdp::shard
