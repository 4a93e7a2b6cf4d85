// Fused passes over flat shards: optimizer updates, and what clipping and loss scaling must know of
// gradients.
//
// Every tensor is one-dimensional and contiguous. Nothing here waits for a device: numbers that
// come from a device (clipping's factor, sums) stay there. Updates treat each element alone and
// alike, so a flat may be cut anywhere without changing a bit of the result.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace fsdp::kernels {

struct AdamWStep {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;  // decoupled: the master shrinks by lr * weight_decay
  int64_t step = 1;           // number of this update, counted from 1
  bool maximize = false;
};

struct SGDStep {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;  // added to the gradient, as torch::optim::SGD does
  bool nesterov = false;
  bool first = false;  // the momentum buffer holds nothing yet; it is only written
  bool maximize = false;
};

// The memory of one update, all of the same length. `grad` and the states have the master's dtype
// (float32, float64, bfloat16 or float16); 16-bit ones are computed in float32 and rounded once.
struct AdamWTensors {
  at::Tensor master;
  at::Tensor grad;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  at::Tensor low;  // undefined, or a copy of the master in another dtype, written with it
};

struct SGDTensors {
  at::Tensor master;
  at::Tensor grad;
  at::Tensor momentum_buffer;  // undefined when momentum is 0
  at::Tensor low;
};

// One step of AdamW or SGD. `factor` (one float32 on the tensors' device, or undefined) is
// multiplied into the gradients first. The gradient is only read on CPU; elsewhere LibTorch's fused
// operators leave it multiplied with `factor` when there is one. With lists, every tensor of a kind
// has the same dtype and device: a GPU then takes one launch for many small pieces.
void adamw(std::span<const AdamWTensors> tensors, const AdamWStep& step, const at::Tensor& factor);
void sgd(std::span<const SGDTensors> tensors, const SGDStep& step, const at::Tensor& factor);

inline void adamw(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const at::Tensor& low, const AdamWStep& step,
                  const at::Tensor& factor) {
  const AdamWTensors one{master, grad, exp_avg, exp_avg_sq, low};
  adamw(std::span(&one, 1), step, factor);
}

inline void sgd(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& momentum_buffer,
                const at::Tensor& low, const SGDStep& step, const at::Tensor& factor) {
  const SGDTensors one{master, grad, momentum_buffer, low};
  sgd(std::span(&one, 1), step, factor);
}

// The sum of |x|^p as one float64 (no dimensions) on the tensor's device; for an infinite p the
// largest |x|. p must be above 0. A NaN anywhere makes it NaN. The same bits for any number of
// threads. On CPU it is summed in float64, so a norm that is rounded to float32 practically never
// depends on how a flat is cut; elsewhere in rows of float32 that are added in float64, which
// leaves about float32's own error.
at::Tensor sum_of_powers(const at::Tensor& tensor, double p);

// 0 exactly when every element is finite, else a positive count (on CPU of elements, elsewhere of
// rows that hold one), as one float64 (no dimensions) on the tensor's device.
at::Tensor count_not_finite(const at::Tensor& tensor);

// The implementations behind the functions above, which choose by device. `aten` works on any
// device, CPU too.
namespace cpu {
void adamw(const AdamWTensors& tensors, const AdamWStep& step, float factor);
void sgd(const SGDTensors& tensors, const SGDStep& step, float factor);
double sum_of_powers(const at::Tensor& tensor, double p);
int64_t count_not_finite(const at::Tensor& tensor);
}  // namespace cpu

namespace aten {
void adamw(std::span<const AdamWTensors> tensors, const AdamWStep& step, const at::Tensor& factor);
void sgd(std::span<const SGDTensors> tensors, const SGDStep& step, const at::Tensor& factor);
at::Tensor sum_of_powers(const at::Tensor& tensor, double p);
at::Tensor count_not_finite(const at::Tensor& tensor);
}  // namespace aten

}  // namespace fsdp::kernels
