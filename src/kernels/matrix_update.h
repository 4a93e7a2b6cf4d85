// The elementwise passes of optimizers that need whole matrices: what comes before their exchange
// between ranks, and what comes after it.
//
// As in update.h: every tensor is flat and contiguous, nothing waits for a device, and everything
// may be captured into a graph. If `factor` (one float32 on the tensors' device, or undefined)
// isn't finite, no state and no master is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace fsdp::kernels {

struct MomentumTensors {
  at::Tensor grad;         // may be longer: see grad_begin
  at::Tensor momentum;     // [n] in the master's dtype
  at::Tensor direction;    // [n] written: what the update is made from
  int64_t grad_begin = 0;  // index of the first element of `grad` to use
};

struct MomentumStep {
  double momentum = 0.95;
  bool nesterov = true;
  bool maximize = false;
};

// momentum += (grad · factor − momentum) · (1 − step.momentum), and the direction is the momentum,
// or with Nesterov the gradient moved towards it as far as the momentum was kept.
void momentum(std::span<const MomentumTensors> tensors, const MomentumStep& step,
              const at::Tensor& factor);

struct AppliedTensors {
  at::Tensor master;  // [n]; undefined if split
  at::Tensor low;     // as in AdamWTensors
  at::Tensor rest;
  at::Tensor update;  // [n]
  double lr = 0, weight_decay = 0;
  at::Tensor rates;  // [2] float64 on the device, instead of the two numbers
};

// master = master · (1 − lr · weight_decay) − lr · update.
void apply_update(std::span<const AppliedTensors> tensors, const at::Tensor& factor);

}  // namespace fsdp::kernels
