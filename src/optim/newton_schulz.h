// Newton–Schulz: brings the singular values of matrices near 1 with products alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "fsdp/muon.h"

namespace fsdp::optim {

// A step: X ← aX + (bA + cA²)X with A = XXᵀ, which maps a singular value s to as + bs³ + cs⁵.
struct Quintic {
  double a, b, c;
};

std::vector<Quintic> quintics(NewtonSchulz kind, int steps);

// matrices [n, rows, cols] of any sizes, in their dtype, each divided by its norm (at least `eps`)
// first; the result is multiplied by `scale`.
at::Tensor orthogonalized(const at::Tensor& matrices, std::span<const Quintic> steps, double eps,
                          double scale);

}  // namespace fsdp::optim
