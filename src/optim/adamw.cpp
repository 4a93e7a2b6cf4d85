#include "fsdp/optim.h"
#include "kernels/update.h"
#include "optim/require.h"

namespace fsdp {

using optim::require;

AdamW::AdamW(const Sharded& sharded, AdamWOptions options)
    : Optimizer(sharded, options.groups, options.lr, options.weight_decay,
                {"exp_avg", "exp_avg_sq"}),
      options_(std::move(options)) {
  const auto [beta1, beta2] = options_.betas;
  require(beta1 >= 0 && beta1 < 1, "AdamW", "betas.first", beta1, "in [0, 1)", "0.9 is usual.");
  require(beta2 >= 0 && beta2 < 1, "AdamW", "betas.second", beta2, "in [0, 1)",
          "0.95 and 0.999 are usual.");
  require(options_.eps >= 0, "AdamW", "eps", options_.eps, "0 or more", "1e-8 is usual.");
}

void AdamW::update(const Group& group, int64_t step, const std::vector<Piece>& pieces,
                   const at::Tensor& factor) {
  std::vector<kernels::AdamWTensors> tensors;
  tensors.reserve(pieces.size());
  for (const auto& piece : pieces)
    tensors.push_back({piece.master, piece.grad, piece.states[0], piece.states[1], piece.low});
  kernels::adamw(tensors,
                 {.lr = group.lr,
                  .beta1 = options_.betas.first,
                  .beta2 = options_.betas.second,
                  .eps = options_.eps,
                  .weight_decay = group.weight_decay,
                  .step = step,
                  .maximize = options_.maximize},
                 factor);
}

}  // namespace fsdp
