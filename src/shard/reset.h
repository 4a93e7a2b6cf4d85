// Calls a module's reset_parameters, which isn't virtual in LibTorch: each type is handled by name.
#pragma once

#include <torch/nn/module.h>

#include <string>

namespace fsdp::shard {

// An Error for an unknown type with parameters of its own.
void reset_parameters(torch::nn::Module& module, const std::string& path);

}  // namespace fsdp::shard
