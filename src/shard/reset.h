// Calls a module's reset_parameters. It is virtual nowhere in LibTorch, so the types are named.
#pragma once

#include <torch/nn/module.h>

#include <string>

namespace fsdp::shard {

// An Error for a type that is not known and has parameters of its own.
void reset_parameters(torch::nn::Module& module, const std::string& path);

}  // namespace fsdp::shard
