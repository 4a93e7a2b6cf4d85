// The sharded models of this process, for what LibTorch has only one of: the autograd engine and
// the operators' fallback. Modules know nothing of their units; who asks by module finds them here.
#pragma once

#include <functional>
#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp::shard {

class Model;
class Unit;

namespace registry {

void add(const std::shared_ptr<Model>& model);
void remove(const Model* model);
// Keeps a model whose handle is gone for as long as its module lives: fully_shard(block) without
// keeping the result is how models are sharded bottom-up.
void park(std::shared_ptr<Model> model);
void unpark(const Model* model);
bool empty();  // cheap: asked for every saved tensor
std::vector<std::shared_ptr<Model>> models();

}  // namespace registry
}  // namespace fsdp::shard
