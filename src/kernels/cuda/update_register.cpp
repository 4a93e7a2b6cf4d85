// The optimizer's CUDA kernels behind kernels/update.h: turns tensors into pointers, groups pieces
// by storage, and launches on the current stream. Loading this module registers the table.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cuda/update.h"
#include "kernels/cuda/wire_register.h"
#include "kernels/cuda_updates.h"

namespace fsdp::kernels {
namespace {

using at::ScalarType;

// The device of a call, and its current stream.
struct Queue {
  explicit Queue(const at::Tensor& tensor)
      : guard(tensor.device()), stream(at::cuda::getCurrentCUDAStream().stream()) {}
  c10::cuda::CUDAGuard guard;
  cudaStream_t stream;
};

cuda::Dtype state_dtype(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return cuda::Dtype::kBFloat16;
    case ScalarType::Half:
      return cuda::Dtype::kFloat16;
    default:
      return cuda::Dtype::kFloat32;
  }
}

const float* pointer(const at::Tensor& factor) {
  return factor.defined() ? factor.const_data_ptr<float>() : nullptr;
}

// --- lists ---

template <typename Tensors>
cuda::UpdateStorage storage_of(const Tensors& t) {
  const bool split = t.rest.defined();
  return {split, state_dtype(t.grad), !split && t.low.defined(),
          t.low.defined() ? state_dtype(t.low) : cuda::Dtype::kBFloat16};
}

bool same(const cuda::UpdateStorage& a, const cuda::UpdateStorage& b) {
  return a.split == b.split && a.grad == b.grad && a.has_low == b.has_low &&
         (!a.has_low || a.low == b.low);
}

template <typename Tensors>
cuda::UpdatePiece piece_of(const Tensors& t) {
  cuda::UpdatePiece piece;
  const bool split = t.rest.defined();
  piece.master = (split ? t.low : t.master).data_ptr();
  if (split)
    piece.low = t.rest.data_ptr();
  else if (t.low.defined())
    piece.low = t.low.data_ptr();
  piece.grad =
      static_cast<const char*>(t.grad.const_data_ptr()) + t.grad_begin * t.grad.element_size();
  piece.numel = (split ? t.low : t.master).numel();
  piece.group = static_cast<int32_t>(t.group);
  piece.count = static_cast<int32_t>(t.count);
  return piece;
}

void add_states(cuda::UpdatePiece& piece, const AdamWTensors& t) {
  piece.first = t.exp_avg.mutable_data_ptr<float>();
  piece.second = t.exp_avg_sq.mutable_data_ptr<float>();
}

void add_states(cuda::UpdatePiece& piece, const SGDTensors& t) {
  if (t.momentum_buffer.defined()) piece.first = t.momentum_buffer.mutable_data_ptr<float>();
}

void add_numbers(cuda::UpdatePiece& piece, const AdamWStep& step) {
  const auto count = static_cast<double>(step.step);
  piece.numbers[0] = static_cast<float>(1 - step.lr * step.weight_decay);
  piece.numbers[1] = static_cast<float>(step.lr / (1 - std::pow(step.beta1, count)));
  piece.numbers[2] = static_cast<float>(1 / std::sqrt(1 - std::pow(step.beta2, count)));
}

void add_numbers(cuda::UpdatePiece& piece, const SGDStep& step) {
  piece.numbers[0] = static_cast<float>(step.lr);
  piece.numbers[1] = static_cast<float>(step.weight_decay);
  piece.numbers[2] = step.first ? 1.0f : 0.0f;
}

// Calls launch(pieces, storage) once per kind of storage among the tensors.
template <typename Tensors, typename Step, typename Launch>
void launch_alike(std::span<const Tensors> tensors, std::span<const Step> steps,
                  const Launch& launch) {
  std::vector<cuda::UpdateStorage> storages;
  std::vector<std::vector<cuda::UpdatePiece>> lists;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto storage = storage_of(tensors[i]);
    const auto known = std::find_if(storages.begin(), storages.end(),
                                    [&](const auto& s) { return same(s, storage); });
    const auto at = static_cast<size_t>(known - storages.begin());
    if (at == storages.size()) {
      storages.push_back(storage);
      lists.emplace_back().reserve(tensors.size());
    }
    auto& piece = lists[at].emplace_back(piece_of(tensors[i]));
    add_states(piece, tensors[i]);
    add_numbers(piece, steps[steps.size() > 1 ? i : 0]);
  }
  for (size_t i = 0; i < lists.size(); ++i) launch(lists[i], storages[i]);
}

// The counts that the tensors use, each once.
template <typename Tensors>
std::vector<int32_t> counts_of(std::span<const Tensors> tensors) {
  std::vector<int32_t> which;
  which.reserve(tensors.size());
  for (const auto& t : tensors) which.push_back(static_cast<int32_t>(t.count));
  std::sort(which.begin(), which.end());
  which.erase(std::unique(which.begin(), which.end()), which.end());
  return which;
}

// --- updates ---

void adamw(std::span<const AdamWTensors> tensors, std::span<const AdamWStep> steps,
           const DeviceNumbers* numbers, const at::Tensor& factor) {
  const Queue queue(tensors.front().exp_avg);
  const AdamWStep& shared = steps.front();
  cuda::AdamWLaunch launch;
  launch.beta1 = static_cast<float>(shared.beta1);
  launch.one_minus_beta1 = static_cast<float>(1 - shared.beta1);
  launch.beta2 = static_cast<float>(shared.beta2);
  launch.one_minus_beta2 = static_cast<float>(1 - shared.beta2);
  launch.eps = static_cast<float>(shared.eps);
  launch.maximize = shared.maximize;
  launch.factor = pointer(factor);
  at::Tensor corrections;
  if (numbers) {
    const auto which = counts_of(tensors);
    corrections = at::empty({numbers->counts.size(0), 2}, numbers->counts.options());
    cuda::advance(numbers->counts.mutable_data_ptr<double>(), which.data(),
                  static_cast<int64_t>(which.size()), corrections.mutable_data_ptr<double>(),
                  shared.beta1, shared.beta2, launch.factor, queue.stream);
    launch.rates = numbers->rates.const_data_ptr<double>();
    launch.corrections = corrections.const_data_ptr<double>();
  }
  launch_alike(tensors, steps, [&](const auto& pieces, const cuda::UpdateStorage& storage) {
    cuda::adamw(pieces.data(), static_cast<int64_t>(pieces.size()), storage, launch, queue.stream);
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void sgd(std::span<const SGDTensors> tensors, std::span<const SGDStep> steps,
         const DeviceNumbers* numbers, const at::Tensor& factor) {
  const Queue queue(tensors.front().grad);
  const SGDStep& shared = steps.front();
  cuda::SGDLaunch launch;
  launch.momentum = static_cast<float>(shared.momentum);
  launch.one_minus_dampening = static_cast<float>(1 - shared.dampening);
  launch.nesterov = shared.nesterov;
  launch.maximize = shared.maximize;
  launch.factor = pointer(factor);
  if (numbers) {
    const auto which = counts_of(tensors);
    cuda::advance(numbers->counts.mutable_data_ptr<double>(), which.data(),
                  static_cast<int64_t>(which.size()), nullptr, 0, 0, launch.factor, queue.stream);
    launch.rates = numbers->rates.const_data_ptr<double>();
    launch.counts = numbers->counts.const_data_ptr<double>();
  }
  launch_alike(tensors, steps, [&](const auto& pieces, const cuda::UpdateStorage& storage) {
    cuda::sgd(pieces.data(), static_cast<int64_t>(pieces.size()), storage, launch, queue.stream);
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// --- the global norm ---

void sum(std::span<const at::Tensor> tensors, const cuda::NormResult& result, cudaStream_t stream) {
  std::vector<cuda::SumPiece> pieces;
  pieces.reserve(tensors.size());
  for (const auto& tensor : tensors)
    pieces.push_back({tensor.const_data_ptr(), tensor.numel(), state_dtype(tensor)});
  const auto count = static_cast<int64_t>(pieces.size());
  const auto partials = at::empty({cuda::sum_partials(pieces.data(), count)},
                                  tensors.front().options().dtype(ScalarType::Double));
  cuda::sum_of_squares(pieces.data(), count, partials.mutable_data_ptr<double>(), result, stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor sum_of_squares(std::span<const at::Tensor> tensors) {
  const Queue queue(tensors.front());
  auto total = at::empty({}, tensors.front().options().dtype(ScalarType::Double));
  cuda::NormResult result;
  result.total = total.mutable_data_ptr<double>();
  sum(tensors, result, queue.stream);
  return total;
}

Clipping empty_clipping(const at::Tensor& like) {
  const auto options = like.options().dtype(ScalarType::Float);
  return {at::empty({}, options), at::empty({}, options)};
}

cuda::NormResult result_of(const Clipping& clipping, double max_norm) {
  cuda::NormResult result;
  result.norm = clipping.norm.mutable_data_ptr<float>();
  result.factor = clipping.factor.mutable_data_ptr<float>();
  result.max_norm = static_cast<float>(max_norm);
  return result;
}

Clipping clip(std::span<const at::Tensor> tensors, double max_norm) {
  const Queue queue(tensors.front());
  auto clipping = empty_clipping(tensors.front());
  sum(tensors, result_of(clipping, max_norm), queue.stream);
  return clipping;
}

Clipping clip_factor(const at::Tensor& total, double max_norm) {
  const Queue queue(total);
  auto clipping = empty_clipping(total);
  cuda::clip_factor(total.const_data_ptr<double>(), result_of(clipping, max_norm), queue.stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return clipping;
}

// --- split masters ---

void split_float(const at::Tensor& whole, const at::Tensor& high, const at::Tensor& rest) {
  const Queue queue(whole);
  cuda::split_float(whole.const_data_ptr<float>(), high.data_ptr(),
                    rest.mutable_data_ptr<int16_t>(), whole.numel(), queue.stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor join_float(const at::Tensor& high, const at::Tensor& rest) {
  const Queue queue(high);
  auto whole = at::empty({high.numel()}, high.options().dtype(ScalarType::Float));
  cuda::join_float(high.const_data_ptr(), rest.const_data_ptr<int16_t>(),
                   whole.mutable_data_ptr<float>(), high.numel(), queue.stream);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return whole;
}

constexpr CudaUpdates kTable{
    .adamw = adamw,
    .sgd = sgd,
    .sum_of_squares = sum_of_squares,
    .clip = clip,
    .clip_factor = clip_factor,
    .split_float = split_float,
    .join_float = join_float,
    .encode_wire = on_gpu::encode_wire,
    .sum_wire = on_gpu::sum_wire,
};

[[maybe_unused]] const bool handed_in = (set_cuda_updates(&kTable), true);

}  // namespace
}  // namespace fsdp::kernels
