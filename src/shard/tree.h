// ModuleTree: a module and its submodules, in one form for the C++ frontend and TorchScript.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/wrap.h"

namespace torch::jit {
struct Module;
}

namespace fsdp::shard {

class Unit;

struct ModuleTree {
  ModuleView view;
  std::shared_ptr<torch::nn::Module> module;                            // null for TorchScript
  const void* identity = nullptr;                                       // of the module object
  std::vector<std::pair<std::string, at::Tensor>> parameters, buffers;  // its own, by full name
  std::vector<ModuleTree> children;
  Unit* unit = nullptr;  // the unit this module is the top of, or null
};

ModuleTree tree_of(const std::shared_ptr<torch::nn::Module>& module, const std::string& path = "");
ModuleTree tree_of(const torch::jit::Module& module, const std::string& path = "");

std::string join_path(const std::string& path, const std::string& step);

template <typename Tree, typename Visit>
void for_each_module(Tree& tree, Visit visit) {
  visit(tree);
  for (auto& child : tree.children) for_each_module(child, visit);
}

}  // namespace fsdp::shard
