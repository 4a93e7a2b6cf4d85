#include "fsdp/optim.h"
#include "kernels/update.h"
#include "optim/require.h"

namespace fsdp {

using optim::require;

SGD::SGD(const Sharded& sharded, SGDOptions options)
    : Optimizer(sharded, options.groups, options.lr, options.weight_decay,
                options.momentum == 0 ? std::vector<std::string>{}
                                      : std::vector<std::string>{"momentum_buffer"}),
      options_(std::move(options)) {
  require(options_.momentum >= 0, "SGD", "momentum", options_.momentum, "0 or more",
          "0 switches it off; 0.9 is usual.");
  if (options_.nesterov && (options_.momentum == 0 || options_.dampening != 0))
    throw Error(fmt::format("SGD: nesterov with momentum = {} and dampening = {}.",
                            options_.momentum, options_.dampening),
                "Nesterov's momentum needs a momentum above 0 and no dampening.");
}

void SGD::update(const Group& group, int64_t step, const std::vector<Piece>& pieces,
                 const at::Tensor& factor) {
  std::vector<kernels::SGDTensors> tensors;
  tensors.reserve(pieces.size());
  for (const auto& piece : pieces)
    tensors.push_back({piece.master, piece.grad,
                       piece.states.empty() ? at::Tensor() : piece.states[0], piece.low});
  kernels::sgd(tensors,
               {.lr = group.lr,
                .momentum = options_.momentum,
                .dampening = options_.dampening,
                .weight_decay = group.weight_decay,
                .nesterov = options_.nesterov,
                .first = step == 1,
                .maximize = options_.maximize},
               factor);
}

}  // namespace fsdp
