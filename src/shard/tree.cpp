#include "shard/tree.h"

#include <c10/util/Type.h>
#include <torch/csrc/jit/api/module.h>

namespace fsdp::shard {
namespace {

// "fsdp::(anonymous namespace)::BlockImpl" -> "Block"; "__torch__.net.___torch_mangle_3.Block" too.
std::string short_type(std::string name) {
  name = name.substr(0, name.find('<'));
  name = name.substr(name.find_last_of(":.") + 1);
  if (name.size() > 4 && name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

}  // namespace

std::string join_path(const std::string& path, const std::string& step) {
  return path.empty() ? step : path + "." + step;
}

ModuleTree tree_of(const std::shared_ptr<torch::nn::Module>& module, const std::string& path) {
  ModuleTree tree;
  const torch::nn::Module& object = *module;
  tree.view = {path, short_type(c10::demangle(typeid(object).name())), module.get()};
  tree.module = module;
  tree.identity = module.get();
  for (const auto& entry : module->named_parameters(/*recurse=*/false))
    if (entry.value().defined())
      tree.parameters.emplace_back(join_path(path, entry.key()), entry.value());
  for (const auto& entry : module->named_buffers(/*recurse=*/false))
    if (entry.value().defined())
      tree.buffers.emplace_back(join_path(path, entry.key()), entry.value());
  for (const auto& entry : module->named_children())
    tree.children.push_back(tree_of(entry.value(), join_path(path, entry.key())));
  return tree;
}

ModuleTree tree_of(const torch::jit::Module& module, const std::string& path) {
  ModuleTree tree;
  std::string type = module.type()->name() ? module.type()->name()->qualifiedName() : "";
  tree.view = {path, short_type(type), nullptr};
  tree.identity = module._ivalue().get();
  for (const auto& entry : module.named_parameters(/*recurse=*/false))
    tree.parameters.emplace_back(join_path(path, entry.name), entry.value);
  for (const auto& entry : module.named_buffers(/*recurse=*/false))
    tree.buffers.emplace_back(join_path(path, entry.name), entry.value);
  for (const auto& entry : module.named_children())
    tree.children.push_back(tree_of(entry.value, join_path(path, entry.name)));
  return tree;
}

}  // namespace fsdp::shard
