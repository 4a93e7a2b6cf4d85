// Muon: momentum on the shards, Newton–Schulz on the owners, AdamW for what isn't a matrix.
#include "fsdp/muon.h"

#include <algorithm>
#include <cmath>

#include "kernels/matrix_update.h"
#include "optim/elementwise.h"
#include "optim/newton_schulz.h"
#include "optim/require.h"

namespace fsdp {

using optim::require;

namespace {

constexpr double kLikeAdamW = 0.2;  // root mean square of AdamW's updates

}  // namespace

Muon::Muon(const Sharded& sharded, MuonOptions options)
    : MatrixOptimizer(
          sharded, {.matrices = options.matrices,
                    .lr = options.lr,
                    .weight_decay = options.weight_decay,
                    .matrix_states = {"momentum_buffer"},
                    .others = {.lr = options.adamw.lr, .weight_decay = options.adamw.weight_decay},
                    .other_groups = options.adamw.groups,
                    .other_states = {"exp_avg", "exp_avg_sq"}}),
      options_(std::move(options)) {
  require(options_.momentum >= 0 && options_.momentum < 1, "Muon", "momentum", options_.momentum,
          "in [0, 1)", "0.95 is usual.");
  require(options_.steps >= 1 && options_.steps <= 100, "Muon", "steps", options_.steps,
          "between 1 and 100", "5 is usual.");
  require(options_.eps >= 0, "Muon", "eps", options_.eps, "0 or more", "1e-7 is usual.");
  optim::check_adamw("Muon: adamw", options_.adamw.betas, options_.adamw.eps);
}

std::function<void()> Muon::prepare(const Update& what) const {
  return optim::adamw_work(what, groups(),
                           {.beta1 = options_.adamw.betas.first,
                            .beta2 = options_.adamw.betas.second,
                            .eps = options_.adamw.eps,
                            .maximize = options_.maximize});
}

std::function<void()> Muon::prepare_directions(const Update& what,
                                               const std::vector<at::Tensor>& directions) const {
  std::vector<kernels::MomentumTensors> tensors;
  for (size_t i = 0; i < what.pieces.size(); ++i) {
    const Piece& piece = what.pieces[i];
    tensors.push_back({piece.grad, piece.states[0], directions[i], piece.begin});
  }
  const kernels::MomentumStep step{options_.momentum, options_.nesterov, options_.maximize};
  return [tensors = std::move(tensors), step, factor = what.factor] {
    kernels::momentum(tensors, step, factor);
  };
}

at::Tensor Muon::updates_of(const at::Tensor& directions) const {
  const auto larger = static_cast<double>(std::max(directions.size(1), directions.size(2)));
  return optim::orthogonalized(directions, optim::quintics(options_.newton_schulz, options_.steps),
                               options_.eps, kLikeAdamW * std::sqrt(larger));
}

}  // namespace fsdp
