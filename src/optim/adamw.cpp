// AdamW: turns the pieces of an update into calls of the fused kernel.
#include "fsdp/optim.h"
#include "kernels/update.h"
#include "optim/elementwise.h"
#include "optim/require.h"

namespace fsdp {

using optim::require;

void optim::check_adamw(const char* who, std::pair<double, double> betas, double eps) {
  const auto [beta1, beta2] = betas;
  require(beta1 >= 0 && beta1 < 1, who, "betas.first", beta1, "in [0, 1)", "0.9 is usual.");
  require(beta2 >= 0 && beta2 < 1, who, "betas.second", beta2, "in [0, 1)",
          "0.95 or 0.999 is usual.");
  require(eps >= 0, who, "eps", eps, "0 or more", "1e-8 is usual.");
}

AdamW::AdamW(const Sharded& sharded, AdamWOptions options)
    : Optimizer(sharded, options.groups, options.lr, options.weight_decay,
                {"exp_avg", "exp_avg_sq"}),
      options_(std::move(options)) {
  optim::check_adamw("AdamW", options_.betas, options_.eps);
}

std::function<void()> AdamW::prepare(const Update& what) const {
  return optim::adamw_work(what, groups(),
                           {.beta1 = options_.betas.first,
                            .beta2 = options_.betas.second,
                            .eps = options_.eps,
                            .maximize = options_.maximize});
}

std::function<void()> optim::adamw_work(const Optimizer::Update& what,
                                        const std::vector<Optimizer::Group>& groups,
                                        kernels::AdamWStep shared) {
  std::vector<kernels::AdamWTensors> tensors;
  std::vector<kernels::AdamWStep> steps;
  tensors.reserve(what.pieces.size());
  steps.reserve(what.pieces.size());
  for (const auto& piece : what.pieces) {
    tensors.push_back({.master = piece.master,
                       .grad = piece.grad,
                       .exp_avg = piece.states[0],
                       .exp_avg_sq = piece.states[1],
                       .low = piece.low,
                       .rest = piece.rest,
                       .grad_begin = piece.begin,
                       .group = static_cast<int64_t>(piece.group),
                       .count = piece.count});
    shared.lr = groups[piece.group].lr;
    shared.weight_decay = groups[piece.group].weight_decay;
    shared.step = piece.step;
    steps.push_back(shared);
  }
  if (what.rates.defined())
    return [tensors = std::move(tensors), shared,
            device = kernels::DeviceNumbers{what.rates, what.counts},
            factor = what.factor] { kernels::adamw(tensors, shared, device, factor); };
  return [tensors = std::move(tensors), steps = std::move(steps), factor = what.factor] {
    kernels::adamw(tensors, steps, factor);
  };
}

}  // namespace fsdp
