// SGD: turns the pieces of an update into calls of the fused kernel.
#include "base/format.h"
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
          "0 turns it off; 0.9 is usual.");
  if (options_.nesterov && (options_.momentum == 0 || options_.dampening != 0))
    throw Error(formatted("SGD: nesterov with momentum = {} and dampening = {}.", options_.momentum,
                          options_.dampening),
                "Nesterov momentum needs a momentum above 0 and dampening = 0.");
}

std::function<void()> SGD::prepare(const Update& what) const {
  kernels::SGDStep shared{.momentum = options_.momentum,
                          .dampening = options_.dampening,
                          .nesterov = options_.nesterov,
                          .maximize = options_.maximize};
  std::vector<kernels::SGDTensors> tensors;
  std::vector<kernels::SGDStep> steps;
  tensors.reserve(what.pieces.size());
  steps.reserve(what.pieces.size());
  for (const auto& piece : what.pieces) {
    tensors.push_back({.master = piece.master,
                       .grad = piece.grad,
                       .momentum_buffer = piece.states.empty() ? at::Tensor() : piece.states[0],
                       .low = piece.low,
                       .rest = piece.rest,
                       .grad_begin = piece.begin,
                       .group = static_cast<int64_t>(piece.group),
                       .count = piece.count});
    shared.lr = groups()[piece.group].lr;
    shared.weight_decay = groups()[piece.group].weight_decay;
    shared.first = piece.step == 1;
    steps.push_back(shared);
  }
  if (what.rates.defined())
    return [tensors = std::move(tensors), shared,
            device = kernels::DeviceNumbers{what.rates, what.counts},
            factor = what.factor] { kernels::sgd(tensors, shared, device, factor); };
  return [tensors = std::move(tensors), steps = std::move(steps), factor = what.factor] {
    kernels::sgd(tensors, steps, factor);
  };
}

}  // namespace fsdp
