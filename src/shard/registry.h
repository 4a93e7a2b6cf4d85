// The sharded models of this process, for LibTorch's process-wide hooks: the autograd engine and
// the operators' fallback. Modules don't know their units; lookups by module go through here.
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
// Keeps a model without handles alive as long as its module: bottom-up sharding calls
// fully_shard(block) and drops the result.
void park(std::shared_ptr<Model> model);
void unpark(const Model* model);
bool empty();  // cheap: called for every saved tensor
std::vector<std::shared_ptr<Model>> models();
// Those whose module still exists. A parked model outlives its module until the next fully_shard,
// and a new module may get the address of the old one.
std::vector<std::shared_ptr<Model>> models_with_modules();

}  // namespace registry
}  // namespace fsdp::shard
