// Chooses the implementation by device, after checking the tensors.
#include "kernels/update.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "kernels/cuda_updates.h"

namespace fsdp::kernels {
namespace {

using at::ScalarType;

// --- checks ---

// The tensor that all tensors of an update must match: the master, or a half of it.
template <typename Tensors>
const at::Tensor& master_of(const Tensors& t) {
  return t.rest.defined() ? t.rest : t.master;
}

template <typename Tensors>
ScalarType dtype_of(const Tensors& t) {
  return t.rest.defined() ? ScalarType::Float : t.master.scalar_type();
}

bool fits(const at::Tensor& tensor, const at::Tensor& master) {
  return tensor.defined() && tensor.dim() == 1 && tensor.is_contiguous() &&
         tensor.numel() == master.numel() && tensor.device() == master.device();
}

[[noreturn]] void refuse(const char* who, const char* what, const at::Tensor& master,
                         ScalarType type) {
  throw Error(
      formatted("{}: {} doesn't match the master ({} elements of {} on {}).", who, what,
                master.numel(), toString(type), master.device().str()),
      "all tensors of an update must be flat, contiguous, on one device and of one length; the "
      "states have the master's dtype, and so does the gradient (or bfloat16 with a float32 "
      "master).");
}

template <typename Tensors>
void check_common(const char* who, const Tensors& t) {
  const at::Tensor& master = master_of(t);
  if (!master.defined())
    throw Error(std::string(who) + ": there is no master.",
                "pass a master, or both of its halves.");
  const ScalarType type = dtype_of(t);
  const auto& grad = t.grad;
  if (!grad.defined() || grad.dim() != 1 || !grad.is_contiguous() ||
      grad.device() != master.device() || t.grad_begin < 0 ||
      grad.numel() < t.grad_begin + master.numel() ||
      (grad.scalar_type() != type &&
       (type != ScalarType::Float || grad.scalar_type() != ScalarType::BFloat16)))
    refuse(who, "the gradient", master, type);
  if (t.low.defined() && !fits(t.low, master))
    refuse(who, "the copy in another dtype", master, type);
  if (t.rest.defined() &&
      (t.master.defined() || !t.low.defined() || t.low.scalar_type() != ScalarType::BFloat16 ||
       t.rest.scalar_type() != ScalarType::Short || !fits(t.rest, t.rest)))
    throw Error(std::string(who) +
                    ": a split master is a bfloat16 half in `low`, an int16 half in "
                    "`rest`, and no `master`.",
                "see kernels/split.h.");
}

template <typename Tensors>
void check_state(const char* who, const char* what, const Tensors& t, const at::Tensor& state) {
  if (!fits(state, master_of(t)) || state.scalar_type() != dtype_of(t))
    refuse(who, what, master_of(t), dtype_of(t));
}

void check(const AdamWTensors& t, const AdamWStep&) {
  check_common("adamw", t);
  check_state("adamw", "exp_avg", t, t.exp_avg);
  check_state("adamw", "exp_avg_sq", t, t.exp_avg_sq);
}

void check(const SGDTensors& t, const SGDStep& step) {
  check_common("sgd", t);
  if (step.momentum != 0) check_state("sgd", "the momentum buffer", t, t.momentum_buffer);
}

template <typename Tensors>
void check(const Tensors& t, const DeviceNumbers& numbers) {
  const auto good = [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.scalar_type() == ScalarType::Double &&
           tensor.is_contiguous() && tensor.device() == master_of(t).device();
  };
  if (good(numbers.rates) && good(numbers.counts) && numbers.rates.dim() == 2 &&
      numbers.rates.size(1) == 2 && numbers.counts.dim() == 1 && t.group >= 0 &&
      t.group < numbers.rates.size(0) && t.count >= 0 && t.count < numbers.counts.size(0))
    return;
  throw Error("an update's numbers don't fit its tensors.",
              "rates must be [groups, 2] and counts [n], float64 on the tensors' device.");
}

void check_list(size_t tensors, size_t steps) {
  if (steps != 1 && steps != tensors)
    throw Error(formatted("an update of {} tensors was given {} steps.", tensors, steps),
                "pass one for all, or one per tensor.");
}

void check(const char* who, const at::Tensor& tensor) {
  if (at::isFloatingType(tensor.scalar_type()) && tensor.dim() == 1 && tensor.is_contiguous())
    return;
  throw Error(formatted("{}: expected a flat, contiguous, floating-point tensor, not {} with {} "
                        "dimensions.",
                        who, toString(tensor.scalar_type()), tensor.dim()),
              "pass tensor.flatten().");
}

// --- the choice ---

bool on_cpu(const at::Tensor& tensor) {
  return tensor.device().is_cpu();
}

float host_value(const at::Tensor& factor) {
  return factor.defined() ? factor.item<float>() : 1.0f;
}

bool is_short(ScalarType type) {
  return type == ScalarType::BFloat16 || type == ScalarType::Half;
}

// Whether the CUDA kernels support it: float32 masters, whole or split.
template <typename Tensors>
bool ours(const Tensors& t) {
  return t.rest.defined() || (t.master.scalar_type() == ScalarType::Float &&
                              (!t.low.defined() || is_short(t.low.scalar_type())));
}

bool all_summable(std::span<const at::Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.scalar_type() == ScalarType::Float || is_short(tensor.scalar_type());
  });
}

void update_cpu(const AdamWTensors& t, const AdamWStep& step, float factor) {
  cpu::adamw(t, step, factor);
}

void update_cpu(const SGDTensors& t, const SGDStep& step, float factor) {
  cpu::sgd(t, step, factor);
}

// `on_gpu(tensors, steps)` is the table's function, `aten(tensors, steps)` LibTorch's.
template <typename Tensors, typename Step, typename OnGpu, typename Aten>
void choose(std::span<const Tensors> tensors, std::span<const Step> steps, const OnGpu& on_gpu,
            const Aten& aten) {
  if (master_of(tensors.front()).is_meta()) return;  // a dry run: nothing to compute
  const CudaUpdates* table = cuda_updates(master_of(tensors.front()).device());
  if (!table) return aten(tensors, steps);
  if (std::all_of(tensors.begin(), tensors.end(), ours<Tensors>))
    return on_gpu(*table, tensors, steps);
  std::vector<Tensors> mine, others;
  std::vector<Step> my_steps, other_steps;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool taken = ours(tensors[i]);
    (taken ? mine : others).push_back(tensors[i]);
    if (steps.size() > 1) (taken ? my_steps : other_steps).push_back(steps[i]);
  }
  const auto of = [&](const std::vector<Step>& list) {
    return steps.size() > 1 ? std::span<const Step>(list) : steps;
  };
  if (!mine.empty()) on_gpu(*table, std::span<const Tensors>(mine), of(my_steps));
  aten(std::span<const Tensors>(others), of(other_steps));
}

// Sets a step from the numbers, after the count has gone up.
void tell(AdamWStep& step, double lr, double weight_decay, double count) {
  step.lr = lr, step.weight_decay = weight_decay, step.step = static_cast<int64_t>(count);
}

void tell(SGDStep& step, double lr, double weight_decay, double count) {
  step.lr = lr, step.weight_decay = weight_decay, step.first = count == 1;
}

template <typename Tensors, typename Step>
void update_cpu(std::span<const Tensors> tensors, Step step, const DeviceNumbers& numbers,
                float factor) {
  const double* rates = numbers.rates.template const_data_ptr<double>();
  double* counts = numbers.counts.template mutable_data_ptr<double>();
  std::vector<bool> counted(numbers.counts.numel());
  for (const auto& t : tensors) {
    if (!counted[t.count]) ++counts[t.count];
    counted[t.count] = true;
    tell(step, rates[2 * t.group], rates[2 * t.group + 1], counts[t.count]);
    update_cpu(t, step, factor);
  }
}

template <typename Tensors, typename Step, typename OnGpu, typename Aten>
void update(std::span<const Tensors> tensors, std::span<const Step> steps, const at::Tensor& factor,
            const OnGpu& on_gpu, const Aten& aten) {
  if (tensors.empty()) return;
  check_list(tensors.size(), steps.size());
  const auto step_of = [&](size_t i) -> const Step& { return steps[steps.size() > 1 ? i : 0]; };
  for (size_t i = 0; i < tensors.size(); ++i) check(tensors[i], step_of(i));
  if (!on_cpu(master_of(tensors.front()))) return choose(tensors, steps, on_gpu, aten);
  const float scale = host_value(factor);
  if (!std::isfinite(scale)) return;
  for (size_t i = 0; i < tensors.size(); ++i) update_cpu(tensors[i], step_of(i), scale);
}

template <typename Tensors, typename Step, typename OnGpu, typename Aten>
void update(std::span<const Tensors> tensors, const Step& step, const DeviceNumbers& numbers,
            const at::Tensor& factor, const OnGpu& on_gpu, const Aten& aten) {
  if (tensors.empty()) return;
  for (const auto& t : tensors) {
    check(t, step);
    check(t, numbers);
  }
  if (!on_cpu(master_of(tensors.front())))
    return choose(tensors, std::span<const Step>(&step, 1), on_gpu, aten);
  const float scale = host_value(factor);
  if (std::isfinite(scale)) update_cpu(tensors, step, numbers, scale);
}

}  // namespace

void adamw(std::span<const AdamWTensors> tensors, std::span<const AdamWStep> steps,
           const at::Tensor& factor) {
  update(
      tensors, steps, factor,
      [&](const CudaUpdates& cuda, auto some, auto their) {
        cuda.adamw(some, their, nullptr, factor);
      },
      [&](auto some, auto their) { aten::adamw(some, their, factor); });
}

void sgd(std::span<const SGDTensors> tensors, std::span<const SGDStep> steps,
         const at::Tensor& factor) {
  update(
      tensors, steps, factor,
      [&](const CudaUpdates& cuda, auto some, auto their) {
        cuda.sgd(some, their, nullptr, factor);
      },
      [&](auto some, auto their) { aten::sgd(some, their, factor); });
}

void adamw(std::span<const AdamWTensors> tensors, const AdamWStep& step,
           const DeviceNumbers& numbers, const at::Tensor& factor) {
  update(
      tensors, step, numbers, factor,
      [&](const CudaUpdates& cuda, auto some, auto one) {
        cuda.adamw(some, one, &numbers, factor);
      },
      [&](auto some, auto) { aten::adamw(some, step, numbers, factor); });
}

void sgd(std::span<const SGDTensors> tensors, const SGDStep& step, const DeviceNumbers& numbers,
         const at::Tensor& factor) {
  update(
      tensors, step, numbers, factor,
      [&](const CudaUpdates& cuda, auto some, auto one) { cuda.sgd(some, one, &numbers, factor); },
      [&](auto some, auto) { aten::sgd(some, step, numbers, factor); });
}

at::Tensor sum_of_powers(const at::Tensor& tensor, double p) {
  check("sum_of_powers", tensor);
  if (!(p > 0))
    throw Error(formatted("sum_of_powers: p = {:f} isn't above 0.", p),
                "pass 2, 1, infinity or any other positive number.");
  if (on_cpu(tensor)) return at::scalar_tensor(cpu::sum_of_powers(tensor, p), ScalarType::Double);
  if (p == 2) return sum_of_squares(std::span(&tensor, 1));
  return aten::sum_of_powers(tensor, p);
}

at::Tensor sum_of_squares(std::span<const at::Tensor> tensors) {
  for (const auto& tensor : tensors) check("sum_of_squares", tensor);
  if (on_cpu(tensors.front())) {
    double total = 0;
    for (const auto& tensor : tensors) total += cpu::sum_of_powers(tensor, 2);
    return at::scalar_tensor(total, ScalarType::Double);
  }
  if (tensors.front().is_meta()) return at::empty({}, tensors.front().options().dtype(at::kDouble));
  const CudaUpdates* table = cuda_updates(tensors.front().device());
  if (table && all_summable(tensors)) return table->sum_of_squares(tensors);
  at::Tensor total = aten::sum_of_powers(tensors.front(), 2);
  for (const auto& tensor : tensors.subspan(1)) total += aten::sum_of_powers(tensor, 2);
  return total;
}

Clipping clip_factor(const at::Tensor& total, double max_norm) {
  const CudaUpdates* table = cuda_updates(total.device());
  return table ? table->clip_factor(total, max_norm) : aten::clip_factor(total, max_norm);
}

Clipping clip_factor(std::span<const at::Tensor> tensors, double max_norm) {
  const CudaUpdates* table = cuda_updates(tensors.front().device());
  if (!table || !all_summable(tensors)) return clip_factor(sum_of_squares(tensors), max_norm);
  for (const auto& tensor : tensors) check("clip_factor", tensor);
  return table->clip(tensors, max_norm);
}

at::Tensor count_not_finite(const at::Tensor& tensor) {
  check("count_not_finite", tensor);
  if (!on_cpu(tensor)) return aten::count_not_finite(tensor);
  return at::scalar_tensor(static_cast<double>(cpu::count_not_finite(tensor)), ScalarType::Double);
}

}  // namespace fsdp::kernels
