#include "optim/newton_schulz.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>

namespace fsdp::optim {
namespace {

// Those of torch.optim.Muon.
constexpr Quintic kQuintic = {3.4445, -4.7750, 2.0315};

// Each is the best for the interval that its predecessors leave of [1e-3, 1] (arXiv 2505.16932).
constexpr Quintic kPolarExpress[] = {{8.28721201814563, -23.595886519098837, 17.300387312530933},
                                     {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
                                     {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
                                     {3.3184196573706015, -2.488488024314874, 0.51004894012372},
                                     {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
                                     {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
                                     {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
                                     {1.875, -1.25, 0.375}};

// The steps are made for singular values of at most 1, which rounding may exceed.
constexpr double kRoom = 1.01;

constexpr int64_t kLeastHalf = 512;  // rows; products of fewer cost as much by halves

// out ← beta · out + alpha · x · xᵀ for symmetric `out`. The blocks above the diagonal are computed
// once and copied below it: 5/8 of the operations where rows can be halved twice.
void add_symmetric(const at::Tensor& out, const at::Tensor& x, double beta, double alpha) {
  const int64_t rows = x.size(1), half = rows / 2;
  at::Tensor whole = out;
  if (half < kLeastHalf) {
    at::baddbmm_out(whole, out, x, x.mT(), beta, alpha);
    return;
  }
  const auto part = [&](int64_t row, int64_t column) {
    const auto begin = [&](int64_t which) { return which == 0 ? 0 : half; };
    const auto size = [&](int64_t which) { return which == 0 ? half : rows - half; };
    return out.narrow(1, begin(row), size(row)).narrow(2, begin(column), size(column));
  };
  const at::Tensor upper = x.narrow(1, 0, half), lower = x.narrow(1, half, rows - half);
  add_symmetric(part(0, 0), upper, beta, alpha);
  add_symmetric(part(1, 1), lower, beta, alpha);
  at::Tensor corner = part(0, 1);
  at::baddbmm_out(corner, corner, upper, lower.mT(), beta, alpha);
  part(1, 0).copy_(corner.mT());
}

}  // namespace

std::vector<Quintic> quintics(NewtonSchulz kind, int steps) {
  const auto count = static_cast<size_t>(steps);
  if (kind == NewtonSchulz::QUINTIC) return std::vector<Quintic>(count, kQuintic);
  std::vector<Quintic> list;
  for (size_t i = 0; i < count; ++i) {
    const size_t last = std::size(kPolarExpress) - 1;
    const auto [a, b, c] = kPolarExpress[std::min(i, last)];
    const double room = i < last ? kRoom : 1;
    list.push_back({a / room, b / (room * room * room), c / (room * room * room * room * room)});
  }
  return list;
}

at::Tensor orthogonalized(const at::Tensor& matrices, std::span<const Quintic> steps, double eps,
                          double scale) {
  const bool tall = matrices.size(1) > matrices.size(2);
  const auto type = matrices.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor norms = at::linalg_vector_norm(matrices, 2, at::IntArrayRef{1, 2},
                                                  /*keepdim=*/true, type);
  at::Tensor x = matrices.div(norms.clamp_min(eps)).to(matrices.scalar_type());
  if (tall) x = x.mT();
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto [a, b, c] = steps[i];
    const double factor = i + 1 == steps.size() ? scale : 1;
    const at::Tensor gram = at::empty({x.size(0), x.size(1), x.size(1)}, x.options());
    add_symmetric(gram, x, 0, 1);
    const at::Tensor polynomial = gram.clone();
    add_symmetric(polynomial, gram, b, c);
    x = at::baddbmm(x, polynomial, x, factor * a, factor);
  }
  if (steps.empty()) x = x * scale;
  return tall ? x.mT() : x;
}

}  // namespace fsdp::optim
