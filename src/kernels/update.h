// Fused passes over flat shards: optimizer updates, and the sums that clipping and loss scaling
// need.
//
// Every tensor is one-dimensional and contiguous. Nothing here waits for a device: numbers computed
// on a device (clipping's factor, sums) stay there, and everything may be captured into a graph.
// Updates treat every element independently and alike, so a flat may be cut anywhere without
// changing a bit of the result.
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

// The tensors of one update, all of the same length. The states have the master's dtype (float32,
// float64, bfloat16 or float16), and so does the gradient, which may also be bfloat16 with a
// float32 master; 16-bit masters are computed in float32 and rounded once.
//
// A float32 master may be stored in two halves (split.h): `master` is then undefined, `low` is its
// bfloat16 half and `rest` the other. Results match those of a whole master bit for bit.
struct AdamWTensors {
  at::Tensor master;
  at::Tensor grad;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  at::Tensor low = {};     // undefined, or a copy of the master in another dtype, written with it
  at::Tensor rest = {};    // [numel] int16, if the master is split
  int64_t grad_begin = 0;  // `grad` may be longer: index of its first element to use
  int64_t group = 0;       // index into DeviceNumbers::rates
  int64_t count = 0;       // index into DeviceNumbers::counts
};

struct SGDTensors {
  at::Tensor master;
  at::Tensor grad;
  at::Tensor momentum_buffer;  // undefined when momentum is 0
  at::Tensor low = {};
  at::Tensor rest = {};
  int64_t grad_begin = 0;
  int64_t group = 0;
  int64_t count = 0;
};

// Numbers that an update reads when it runs, not when it is called, so that it can be captured into
// a graph. Both are on the tensors' device.
struct DeviceNumbers {
  at::Tensor rates;   // [groups, 2] float64: learning rate, weight decay
  at::Tensor counts;  // [n] float64: updates so far; the update adds 1 to those of its tensors.
                      // Tensors that share a count need masters of one dtype.
};

// One step of AdamW or SGD. `factor` (one float32 on the tensors' device, or undefined) is
// multiplied into the gradients first; if it isn't finite, nothing is written and nothing counted.
// The gradient is only read, except where LibTorch's operators do the work (on a device other than
// the CPU, without our kernels or with a 16-bit master): they leave it multiplied.
//
// `steps`: one for all tensors, or one per tensor. On a GPU a mixed list takes one launch per
// combination of dtypes and storage.
void adamw(std::span<const AdamWTensors> tensors, std::span<const AdamWStep> steps,
           const at::Tensor& factor);
void sgd(std::span<const SGDTensors> tensors, std::span<const SGDStep> steps,
         const at::Tensor& factor);
// The same with numbers on the device; `step` supplies the others.
void adamw(std::span<const AdamWTensors> tensors, const AdamWStep& step,
           const DeviceNumbers& numbers, const at::Tensor& factor);
void sgd(std::span<const SGDTensors> tensors, const SGDStep& step, const DeviceNumbers& numbers,
         const at::Tensor& factor);

inline void adamw(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const at::Tensor& low, const AdamWStep& step,
                  const at::Tensor& factor) {
  const AdamWTensors one{master, grad, exp_avg, exp_avg_sq, low};
  adamw(std::span(&one, 1), std::span(&step, 1), factor);
}

inline void sgd(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& momentum_buffer,
                const at::Tensor& low, const SGDStep& step, const at::Tensor& factor) {
  const SGDTensors one{master, grad, momentum_buffer, low};
  sgd(std::span(&one, 1), std::span(&step, 1), factor);
}

// The sum of |x|^p as one float64 (no dimensions) on the tensor's device; for an infinite p, the
// largest |x|. p must be above 0. A NaN anywhere makes it NaN. The number of threads doesn't change
// the bits. The CPU sums in float64, so a norm rounded to float32 practically never depends on how
// a flat is cut; other devices sum short rows in float32 and add those in float64, which leaves
// about float32's own error (and overflows where a single |x|^p does).
at::Tensor sum_of_powers(const at::Tensor& tensor, double p);
// The same for a list and p = 2: one pass on a GPU. At least one tensor; dtypes may differ.
at::Tensor sum_of_squares(std::span<const at::Tensor> tensors);

// norm: the square root of a sum of squares. factor: min(1, max_norm / (norm + 1e-6)), or NaN if
// the norm isn't finite, so that the update is skipped. Each is one float32 (no dimensions) on the
// device.
struct Clipping {
  at::Tensor norm;
  at::Tensor factor;
};
Clipping clip_factor(const at::Tensor& total, double max_norm);
Clipping clip_factor(std::span<const at::Tensor> tensors, double max_norm);  // in the same pass

// 0 exactly if every element is finite, otherwise a positive count (of such elements on the CPU, of
// rows with one elsewhere), as one float64 (no dimensions) on the tensor's device.
at::Tensor count_not_finite(const at::Tensor& tensor);

// The implementations that the functions above choose from, by device. `aten` works on any device,
// including the CPU.
namespace cpu {
// `width`: register width in bytes (cpu/widths.h), 0 for the default. Every width gives the same
// bits.
void adamw(const AdamWTensors& tensors, const AdamWStep& step, float factor, int width = 0);
void sgd(const SGDTensors& tensors, const SGDStep& step, float factor);
double sum_of_powers(const at::Tensor& tensor, double p);
int64_t count_not_finite(const at::Tensor& tensor);
}  // namespace cpu

namespace aten {
void adamw(std::span<const AdamWTensors> tensors, std::span<const AdamWStep> steps,
           const at::Tensor& factor);
void sgd(std::span<const SGDTensors> tensors, std::span<const SGDStep> steps,
         const at::Tensor& factor);
void adamw(std::span<const AdamWTensors> tensors, const AdamWStep& step,
           const DeviceNumbers& numbers, const at::Tensor& factor);
void sgd(std::span<const SGDTensors> tensors, const SGDStep& step, const DeviceNumbers& numbers,
         const at::Tensor& factor);
at::Tensor sum_of_powers(const at::Tensor& tensor, double p);
Clipping clip_factor(const at::Tensor& total, double max_norm);
at::Tensor count_not_finite(const at::Tensor& tensor);
}  // namespace aten

}  // namespace fsdp::kernels
