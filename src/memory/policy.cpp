// Chooses the modules that become regions: walks the module tree and watches every parameter in it.
#include <algorithm>
#include <map>

#include "base/format.h"
#include "base/log.h"
#include "fsdp/error.h"
#include "fsdp/recompute.h"
#include "memory/regions.h"
#include "shard/contents.h"
#include "shard/model.h"
#include "shard/tree.h"
#include "shard/unit.h"

namespace fsdp {
namespace memory {
namespace {

using shard::ModuleTree;
using Modules = std::vector<std::shared_ptr<Chosen>>;

class Choice {
 public:
  explicit Choice(const RecomputePolicy& policy) : policy_(policy) {}

  // Parameters of `tree` outside of any chosen module belong to `inside`, the module around it.
  void visit(const ModuleTree& tree, const std::shared_ptr<Chosen>& inside, bool root) {
    std::shared_ptr<Chosen> module = inside;
    if (!module && !root) module = decide(tree);
    for (const auto& [name, parameter] : tree.parameters) {
      Parameter& known = parameters_[parameter.unsafeGetTensorImpl()];
      known.tensor = parameter;
      if (module &&
          std::find(known.modules.begin(), known.modules.end(), module) == known.modules.end())
        known.modules.push_back(module);
    }
    for (const ModuleTree& child : tree.children) visit(child, module, false);
  }

  void whole(const ModuleTree& tree) {
    if (found_ > 0) return;
    std::shared_ptr<Chosen> module = decide(tree);
    if (!module) return;
    for (auto& [impl, parameter] : parameters_) parameter.modules = {module};
  }

  void apply() const {
    for (const auto& [number, module] : chosen_)
      if (number >= found_ - policy_.keep_last()) module->kept = true;
    for (const auto& [impl, parameter] : parameters_) {
      watch(parameter.tensor, parameter.modules);
      shard::StorageTag* tag = shard::tag_of(parameter.tensor);
      if (tag && tag->kind == shard::StorageTag::kParameters)
        static_cast<shard::Flat*>(tag->owner)->unit().watched = true;
      shard::set_key(parameter.tensor, true);
    }
  }

  int found() const { return found_; }

 private:
  struct Parameter {
    at::Tensor tensor;
    Modules modules;
  };

  std::shared_ptr<Chosen> decide(const ModuleTree& tree) {
    ModuleView view = tree.view;
    view.numel = 0;
    shard::for_each_module(tree, [&](const ModuleTree& module) {
      for (const auto& [name, parameter] : module.parameters) view.numel += parameter.numel();
    });
    view.remaining = view.numel;
    RecomputePolicy::Decision mode = policy_(view);
    if (!mode) return nullptr;
    if (view.numel == 0) {
      log::info(
          formatted("recompute: module \"{}\" has no parameters, so its start can't be detected; "
                    "it counts as part of the module that runs before it.",
                    view.path));
      return nullptr;
    }
    const int number = found_++;
    if (number % policy_.every() != 0) return nullptr;
    auto chosen = std::make_shared<Chosen>();
    chosen_.emplace_back(number, chosen);
    chosen->path = view.path.empty() ? view.type : view.path;
    chosen->mode = *mode;
    return chosen;
  }

  const RecomputePolicy& policy_;
  std::map<const c10::TensorImpl*, Parameter> parameters_;
  std::vector<std::pair<int, std::shared_ptr<Chosen>>> chosen_;  // with their index among all
  int found_ = 0;
};

void apply(const ModuleTree& tree, const RecomputePolicy& policy) {
  Choice choice(policy);
  choice.visit(tree, nullptr, /*root=*/true);
  choice.whole(tree);
  if (choice.found() > 0 && choice.found() <= policy.keep_last())
    throw Error(formatted("apply_activation_checkpointing: the policy matches {} modules, and "
                          "keep_last {} leaves none of them to recompute.",
                          choice.found(), policy.keep_last()),
                "use a smaller keep_last.");
  if (choice.found() == 0)
    throw Error("apply_activation_checkpointing: the policy matches no module of the model.",
                "print sharded.describe() to see its modules; see wrap.h for policies.");
  choice.apply();
}

void remove(const ModuleTree& tree) {
  shard::for_each_module(tree, [](const ModuleTree& module) {
    for (const auto& [name, parameter] : module.parameters) {
      unwatch(parameter);
      shard::StorageTag* tag = shard::tag_of(parameter);
      if (!tag) shard::set_key(parameter, false);
      if (!tag || tag->kind != shard::StorageTag::kParameters) continue;
      shard::Unit& unit = static_cast<shard::Flat*>(tag->owner)->unit();
      unit.watched = false;
      if (unit.state == shard::Unit::State::kReady)
        shard::set_key(parameter, unit.keyed_when_ready());
    }
  });
}

// The module tree of a sharded model at the time of fully_shard.
const ModuleTree& tree_of(const Sharded& sharded) {
  const ModuleTree* tree = shard::tree_of(*shard::lock(sharded));
  if (!tree)
    throw Error("this handle no longer knows its module.", "use the handle from fully_shard.");
  return *tree;
}

}  // namespace
}  // namespace memory

RecomputePolicy::RecomputePolicy(WrapPolicy modules, RecomputeOptions options)
    : decide_([modules = std::move(modules), options](const ModuleView& view) {
        return modules(view) ? Decision(options.mode) : std::nullopt;
      }),
      every_(options.every),
      keep_last_(options.keep_last) {
  if (every_ < 1)
    throw Error(formatted("RecomputeOptions::every is {}; it must be at least 1.", every_),
                "set 1 to recompute every module, 2 for every second.");
  if (keep_last_ < 0)
    throw Error(
        formatted("RecomputeOptions::keep_last is {}; it must not be negative.", keep_last_),
        "set 0 to recompute all modules.");
}

void apply_activation_checkpointing(const Sharded& model, const RecomputePolicy& policy) {
  memory::apply(memory::tree_of(model), policy);
}

void apply_activation_checkpointing(const ModuleRef& model, const RecomputePolicy& policy) {
  memory::apply(shard::tree_of(model.get()), policy);
}

void remove_activation_checkpointing(const Sharded& model) {
  memory::remove(memory::tree_of(model));
}

void remove_activation_checkpointing(const ModuleRef& model) {
  memory::remove(shard::tree_of(model.get()));
}

RecomputeScope::RecomputeScope(Recompute mode) : depth_(memory::open_scope(mode)) {}

RecomputeScope::~RecomputeScope() {
  memory::close_scope(depth_);
}

}  // namespace fsdp
