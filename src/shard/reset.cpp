#include "shard/reset.h"

#include <torch/nn/modules.h>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::shard {
namespace {

template <typename... Modules>
bool reset_if(torch::nn::Module& module) {
  auto one = [&](auto* type) {
    auto* known = dynamic_cast<std::remove_pointer_t<decltype(type)>*>(&module);
    if (known) known->reset_parameters();
    return known != nullptr;
  };
  return (one(static_cast<Modules*>(nullptr)) || ...);
}

}  // namespace

void reset_parameters(torch::nn::Module& module, const std::string& path) {
  using namespace torch::nn;
  bool done =
      reset_if<LinearImpl, BilinearImpl, EmbeddingImpl, EmbeddingBagImpl, LayerNormImpl,
               GroupNormImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl,
               InstanceNorm2dImpl, InstanceNorm3dImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl,
               ConvTranspose1dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl, RNNImpl, LSTMImpl,
               GRUImpl, RNNCellImpl, LSTMCellImpl, GRUCellImpl>(module);
  if (auto* attention = dynamic_cast<MultiheadAttentionImpl*>(&module)) {
    attention->_reset_parameters();
    done = true;
  }
  if (auto* prelu = dynamic_cast<PReLUImpl*>(&module)) {
    torch::nn::init::constant_(prelu->weight, prelu->options.init());
    done = true;
  }
  if (done || module.parameters(/*recurse=*/false).empty()) return;
  throw Error(formatted("module \"{}\" ({}) has parameters of its own and no known "
                        "reset_parameters.",
                        path, module.name()),
              "pass materialize() a function that fills a module's own parameters, or use "
              "fsdp::deferred_init instead of the meta device.");
}

}  // namespace fsdp::shard
