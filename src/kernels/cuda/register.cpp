// The operators of kernels/ops.h for CUDA tensors: each checks its tensors, allocates the results
// and calls launch.h once on the current stream. Loaded with libfsdp_cuda.so.
//
// Nothing here waits for the device, and all memory comes from LibTorch's allocator, so every
// operator may be captured into a graph.
#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "base/format.h"
#include "fsdp/error.h"
#include "kernels/cuda/fp8_operators.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/quantised.h"
#include "kernels/outputs.h"
#include "kernels/quantised.h"

namespace fsdp::kernels {
namespace {

using at::Tensor;
using cuda::Dtype;
using Optional = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;

Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::ScalarType::Float:
      return Dtype::kFloat32;
    case at::ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case at::ScalarType::Half:
      return Dtype::kFloat16;
    default:
      throw Error(formatted("a CUDA kernel got {}.", toString(tensor.scalar_type())),
                  "convert to float32, bfloat16 or float16.");
  }
}

const void* read(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

void* write(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

const void* read(const Optional& tensor) {
  return tensor ? read(*tensor) : nullptr;
}

const float* read_floats(const Tensor& tensor) {
  return static_cast<const float*>(read(tensor));
}

float* write_floats(const Tensor& tensor) {
  return static_cast<float*>(write(tensor));
}

const int64_t* read_ids(const Tensor& tensor) {
  return static_cast<const int64_t*>(read(tensor));
}

// Calls `launch(stream)` on the current stream of the tensor's device.
template <class Launch>
void on_device(const Tensor& tensor, Launch launch) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  launch(c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// One block handles a row, and a grid has fewer than 2^31 blocks; kernels also count tokens in 32
// bits.
void check_rows(int64_t rows) {
  if (rows <= INT32_MAX) return;
  throw Error(formatted("a CUDA kernel got {} rows.", rows),
              "split the tensor into pieces of fewer than 2^31 rows.");
}

// One float32 for the largest magnitude of a result.
Tensor one_amax(const Tensor& like) {
  return at::empty({1}, like.options().dtype(at::ScalarType::Float));
}

// --- normalisation ---

struct Normalised {
  Tensor out, sum, mean, rstd;
};

Normalised forward(const Tensor& x, const Optional& residual, const Tensor& weight,
                   const Optional& bias, double eps, const RowSizes& size, bool centered) {
  check_rows(size.rows);
  const bool adds = residual && residual->defined();
  Normalised result{empty_contiguous(x), empty_if(adds, x), {}, empty_rows(x)};
  if (centered) result.mean = empty_rows(x);
  cuda::NormForward norm;
  norm.x = read(x);
  norm.residual = read(residual);
  norm.weight = read(weight);
  norm.bias = read(bias);
  norm.out = write(result.out);
  norm.sum = adds ? write(result.sum) : nullptr;
  norm.mean = write_floats(result.mean);
  norm.rstd = write_floats(result.rstd);
  norm.rows = size.rows;
  norm.dim = size.dim;
  norm.eps = static_cast<float>(eps);
  norm.dtype = dtype_of(x);
  on_device(x, [&](cudaStream_t stream) {
    centered ? cuda::layer_norm(norm, stream) : cuda::rms_norm(norm, stream);
  });
  return result;
}

std::tuple<Tensor, Tensor, Tensor> rms_norm(const Tensor& x, const Optional& residual,
                                            const Tensor& weight, double eps) {
  const RowSizes size = check_rms_norm(x, residual, weight, eps);
  Normalised result = forward(x, residual, weight, {}, eps, size, false);
  return {std::move(result.out), std::move(result.sum), std::move(result.rstd)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Optional& residual,
                                                      const Tensor& weight, const Optional& bias,
                                                      double eps) {
  const RowSizes size = check_layer_norm(x, residual, weight, bias, eps);
  Normalised result = forward(x, residual, weight, bias, eps, size, true);
  return {std::move(result.out), std::move(result.sum), std::move(result.mean),
          std::move(result.rstd)};
}

// A parameter's gradient, and scratch for it.
struct Wanted {
  void* grad = nullptr;
  Dtype dtype = Dtype::kFloat32;
  Tensor partials;
};

Wanted wanted(const Optional& grad, const Tensor& x, const RowSizes& size) {
  if (!grad || !grad->defined()) return {};
  return {write(*grad), dtype_of(*grad),
          at::empty({cuda::norm_partials(size.rows, size.dim), size.dim},
                    x.options().dtype(at::ScalarType::Float))};
}

Two backward(const Tensor& grad, const Optional& grad_sum, const Tensor& x, const Tensor& mean,
             const Tensor& rstd, const Tensor& weight, const Optional& bias,
             const Optional& grad_weight, const Optional& grad_bias, bool accumulate, bool want_out,
             const RowSizes& size, bool centered, Tensor* amax = nullptr) {
  check_rows(size.rows);
  Tensor grad_x = empty_contiguous(x), out = empty_if(want_out, x);
  const Wanted of_weight = wanted(grad_weight, x, size), of_bias = wanted(grad_bias, x, size);
  cuda::NormBackward norm;
  norm.grad = read(grad);
  norm.grad_sum = read(grad_sum);
  norm.x = read(x);
  norm.mean = read_floats(mean);
  norm.rstd = read_floats(rstd);
  norm.weight = read(weight);
  norm.bias = read(bias);
  norm.grad_x = write(grad_x);
  norm.out = want_out ? write(out) : nullptr;
  norm.grad_weight = of_weight.grad;
  norm.grad_bias = of_bias.grad;
  norm.weight_partials = write_floats(of_weight.partials);
  norm.bias_partials = write_floats(of_bias.partials);
  norm.rows = size.rows;
  norm.dim = size.dim;
  norm.dtype = dtype_of(x);
  norm.grad_weight_dtype = of_weight.dtype;
  norm.grad_bias_dtype = of_bias.dtype;
  norm.accumulate = accumulate;
  if (amax) {
    *amax = cuda::finds_amax(norm) ? one_amax(x) : at::empty({0}, x.options().dtype(at::kFloat));
    norm.amax = amax->numel() > 0 ? write_floats(*amax) : nullptr;
  }
  on_device(x, [&](cudaStream_t stream) {
    centered ? cuda::layer_norm_backward(norm, stream) : cuda::rms_norm_backward(norm, stream);
  });
  return {std::move(grad_x), std::move(out)};
}

Two rms_norm_backward(const Tensor& grad, const Optional& grad_sum, const Tensor& x,
                      const Tensor& rstd, const Tensor& weight, const Optional& grad_weight,
                      bool accumulate, bool want_out) {
  const RowSizes size =
      check_rms_norm_backward(grad, grad_sum, x, rstd, weight, grad_weight, accumulate, want_out);
  return backward(grad, grad_sum, x, {}, rstd, weight, {}, grad_weight, {}, accumulate, want_out,
                  size, false);
}

std::tuple<Tensor, Tensor, Tensor> fp8_rms_norm_backward(const Tensor& grad,
                                                         const Optional& grad_sum, const Tensor& x,
                                                         const Tensor& rstd, const Tensor& weight,
                                                         const Optional& grad_weight,
                                                         bool accumulate, bool want_out) {
  const RowSizes size =
      check_rms_norm_backward(grad, grad_sum, x, rstd, weight, grad_weight, accumulate, want_out);
  Tensor amax;
  auto [grad_x, out] = backward(grad, grad_sum, x, {}, rstd, weight, {}, grad_weight, {},
                                accumulate, want_out, size, false, &amax);
  return {std::move(grad_x), std::move(out), std::move(amax)};
}

Two layer_norm_backward(const Tensor& grad, const Optional& grad_sum, const Tensor& x,
                        const Tensor& mean, const Tensor& rstd, const Tensor& weight,
                        const Optional& bias, const Optional& grad_weight,
                        const Optional& grad_bias, bool accumulate, bool want_out) {
  const RowSizes size = check_layer_norm_backward(grad, grad_sum, x, mean, rstd, weight, bias,
                                                  grad_weight, grad_bias, accumulate, want_out);
  return backward(grad, grad_sum, x, mean, rstd, weight, bias, grad_weight, grad_bias, accumulate,
                  want_out, size, true);
}

// --- rotary positions ---

cuda::RopeTable table_of(const Tensor& cos, const Tensor& sin, const RopeSizes& size) {
  cuda::RopeTable table;
  table.cos = read(cos);
  table.sin = read(sin);
  table.batch_stride = size.cos_batch;
  table.float32 = cos.scalar_type() == at::ScalarType::Float;
  return table;
}

void rope_(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t heads, bool inverse) {
  const RopeSizes size = check_rope_(x, cos, sin, heads, inverse);
  check_rows(size.batch * size.tokens);
  cuda::Rope rope;
  rope.x = write(x);
  rope.batch_stride = x.stride(0);
  rope.token_stride = x.stride(1);
  rope.table = table_of(cos, sin, size);
  rope.batch = size.batch;
  rope.tokens = size.tokens;
  rope.heads = size.heads;
  rope.head_dim = size.head_dim;
  rope.inverse = inverse;
  rope.dtype = dtype_of(x);
  on_device(x, [&](cudaStream_t stream) { cuda::rope(rope, stream); });
}

cuda::HeadsView view_of(const Tensor& heads) {  // [batch, heads, tokens, head_dim]
  return {read(heads), heads.stride(0), heads.stride(1), heads.stride(2)};
}

Tensor rope_pack_to(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                    const Tensor& sin, const Tensor& amax) {
  const RopeSizes size = check_rope_pack(q, k, v, cos, sin);
  check_rows(size.batch * size.tokens);
  Tensor out = empty_packed(q, size);
  cuda::RopePack rope;
  rope.q = view_of(q);
  rope.k = view_of(k);
  rope.v = view_of(v);
  rope.out = write(out);
  rope.amax = write_floats(amax);
  rope.table = table_of(cos, sin, size);
  rope.batch = size.batch;
  rope.tokens = size.tokens;
  rope.heads = size.heads;
  rope.kv_heads = size.kv_heads;
  rope.head_dim = size.head_dim;
  rope.dtype = dtype_of(q);
  on_device(q, [&](cudaStream_t stream) { cuda::rope_pack(rope, stream); });
  return out;
}

Tensor rope_pack(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                 const Tensor& sin) {
  return rope_pack_to(q, k, v, cos, sin, {});
}

Two fp8_rope_pack(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                  const Tensor& sin) {
  Tensor amax = one_amax(q);
  return {rope_pack_to(q, k, v, cos, sin, amax), amax};
}

// --- activations ---

Tensor swiglu(const Tensor& gate_up) {
  const RowSizes size = check_swiglu(gate_up);
  Tensor out = empty_columns(gate_up, size.dim);
  on_device(gate_up, [&](cudaStream_t stream) {
    cuda::swiglu(read(gate_up), write(out), size.rows, size.dim, dtype_of(gate_up), stream);
  });
  return out;
}

Two swiglu_backward_to(const Tensor& grad, const Tensor& gate_up, bool want_out,
                       const Tensor& amax) {
  const RowSizes size = check_swiglu_backward(grad, gate_up, want_out);
  Tensor grad_gate_up = empty_contiguous(gate_up), out = empty_if(want_out, grad);
  on_device(gate_up, [&](cudaStream_t stream) {
    cuda::swiglu_backward(read(grad), read(gate_up), write(grad_gate_up),
                          want_out ? write(out) : nullptr, write_floats(amax), size.rows, size.dim,
                          dtype_of(gate_up), stream);
  });
  return {std::move(grad_gate_up), std::move(out)};
}

Two swiglu_backward(const Tensor& grad, const Tensor& gate_up, bool want_out) {
  return swiglu_backward_to(grad, gate_up, want_out, {});
}

Two fp8_swiglu_backward(const Tensor& grad, const Tensor& gate_up) {
  Tensor amax = one_amax(grad);
  return {std::get<0>(swiglu_backward_to(grad, gate_up, false, amax)), amax};
}

Tensor gelu(const Tensor& x, bool tanh) {
  const int64_t numel = check_gelu(x, tanh);
  Tensor out = empty_contiguous(x);
  on_device(x, [&](cudaStream_t stream) {
    cuda::gelu(read(x), write(out), numel, tanh, dtype_of(x), stream);
  });
  return out;
}

Two gelu_backward(const Tensor& grad, const Tensor& x, bool tanh, bool want_out) {
  const int64_t numel = check_gelu_backward(grad, x, tanh, want_out);
  Tensor grad_x = empty_contiguous(x), out = empty_if(want_out, x);
  on_device(x, [&](cudaStream_t stream) {
    cuda::gelu_backward(read(grad), read(x), write(grad_x), want_out ? write(out) : nullptr, numel,
                        tanh, dtype_of(x), stream);
  });
  return {std::move(grad_x), std::move(out)};
}

// --- loss and embedding ---

cuda::CrossEntropy loss_of(const Tensor& logits, const Tensor& targets, const Tensor& losses,
                           const LogitSizes& size, int64_t ignore_index) {
  check_rows(size.rows);
  cuda::CrossEntropy loss;
  loss.logits = read(logits);
  loss.row_stride = size.row_stride;
  loss.targets = read_ids(targets);
  loss.losses = write_floats(losses);
  loss.rows = size.rows;
  loss.vocab = size.vocab;
  loss.ignore_index = ignore_index;
  loss.dtype = dtype_of(logits);
  return loss;
}

Two cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index) {
  const LogitSizes size = check_cross_entropy(logits, targets, ignore_index);
  Tensor losses = empty_rows(logits), log_sum = empty_rows(logits);
  cuda::CrossEntropy loss = loss_of(logits, targets, losses, size, ignore_index);
  loss.log_sum = write_floats(log_sum);
  on_device(logits, [&](cudaStream_t stream) { cuda::cross_entropy(loss, stream); });
  return {std::move(losses), std::move(log_sum)};
}

Tensor cross_entropy_(const Tensor& logits, const Tensor& targets, const Tensor& scale,
                      int64_t ignore_index) {
  const LogitSizes size = check_cross_entropy_(logits, targets, scale, ignore_index);
  Tensor losses = empty_rows(logits);
  cuda::CrossEntropy loss = loss_of(logits, targets, losses, size, ignore_index);
  loss.gradient = write(logits);
  loss.scale = read_floats(scale);
  on_device(logits, [&](cudaStream_t stream) { cuda::cross_entropy(loss, stream); });
  return losses;
}

Tensor cross_entropy_backward(const Tensor& grad, const Tensor& logits, const Tensor& targets,
                              const Tensor& log_sum, int64_t ignore_index) {
  const LogitSizes size =
      check_cross_entropy_backward(grad, logits, targets, log_sum, ignore_index);
  check_rows(size.rows);
  Tensor grad_logits = empty_contiguous(logits);
  cuda::CrossEntropyBackward loss;
  loss.grad = read_floats(grad);
  loss.logits = read(logits);
  loss.row_stride = size.row_stride;
  loss.targets = read_ids(targets);
  loss.log_sum = read_floats(log_sum);
  loss.grad_logits = write(grad_logits);
  loss.rows = size.rows;
  loss.vocab = size.vocab;
  loss.ignore_index = ignore_index;
  loss.dtype = dtype_of(logits);
  on_device(logits, [&](cudaStream_t stream) { cuda::cross_entropy_backward(loss, stream); });
  return grad_logits;
}

void embedding_backward(const Tensor& grad, const Tensor& ids, const Tensor& grad_weight,
                        int64_t padding_idx, bool accumulate) {
  const RowSizes size = check_embedding_backward(grad, ids, grad_weight, padding_idx, accumulate);
  check_rows(size.rows);
  cuda::EmbeddingBackward embedding;
  embedding.grad = read(grad);
  embedding.ids = read_ids(ids);
  embedding.grad_weight = write(grad_weight);
  embedding.rows = size.rows;
  embedding.dim = size.dim;
  embedding.vocab = grad_weight.size(0);
  embedding.padding_idx = padding_idx;
  embedding.dtype = dtype_of(grad);
  embedding.grad_weight_dtype = dtype_of(grad_weight);
  embedding.accumulate = accumulate;
  Tensor sorted, order, partials;  // kept until the kernels are launched
  if (size.rows > cuda::kUnsortedRows) {
    std::tie(sorted, order) = at::sort(ids.view(-1), /*stable=*/true, /*dim=*/0, false);
    partials = at::empty({cuda::embedding_partials(size.rows), size.dim},
                         grad.options().dtype(at::ScalarType::Float));
    embedding.ids = read_ids(sorted);
    embedding.order = read_ids(order);
    embedding.partials = write_floats(partials);
  }
  on_device(grad, [&](cudaStream_t stream) { cuda::embedding_backward(embedding, stream); });
}

void fill_random_(const Tensor& out, bool normal, double a, double b, int64_t key, int64_t first) {
  check_fill_random_(out, normal, a, b, key, first);
  const bool whole = out.scalar_type() == at::ScalarType::Double;
  const Tensor target =
      whole ? at::empty(out.sizes(), out.options().dtype(at::ScalarType::Float)) : out;
  cuda::FillRandom fill;
  fill.out = write(target);
  fill.numel = target.numel();
  fill.first = first;
  fill.key = static_cast<uint64_t>(key);
  fill.normal = normal;
  fill.a = static_cast<float>(a);
  fill.b = static_cast<float>(normal ? b : b - a);
  fill.dtype = dtype_of(target);
  on_device(target, [&](cudaStream_t stream) { cuda::fill_random(fill, stream); });
  if (whole) out.copy_(target);
}

void scale_into(const Tensor& target, const Tensor& source, const Optional& scale,
                bool accumulate) {
  const int64_t numel = check_scale_into(target, source, scale, accumulate);
  on_device(target, [&](cudaStream_t stream) {
    cuda::scale_into(write(target), dtype_of(target), read(source), dtype_of(source),
                     static_cast<const float*>(read(scale)), accumulate, numel, stream);
  });
}

Tensor dequantise_rows(const Tensor& bytes, int64_t quant, at::ScalarType type) {
  const quantised::Row row = check_quantised(bytes, quant, type);
  const Tensor numbers =
      at::empty({bytes.size(0), row.blocks * quantised::kBlock}, bytes.options().dtype(type));
  if (numbers.numel() == 0) return numbers;
  on_device(bytes, [&](cudaStream_t stream) {
    cuda::dequantise(static_cast<const uint8_t*>(read(bytes)), write(numbers), dtype_of(numbers),
                     bytes.size(0), row, stream);
  });
  return numbers;
}

}  // namespace

TORCH_LIBRARY_IMPL(fsdp, CUDA, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("layer_norm", layer_norm);
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("layer_norm_backward", layer_norm_backward);
  m.impl("rope_", rope_);
  m.impl("rope_pack", rope_pack);
  m.impl("swiglu", swiglu);
  m.impl("swiglu_backward", swiglu_backward);
  m.impl("gelu", gelu);
  m.impl("gelu_backward", gelu_backward);
  m.impl("cross_entropy", cross_entropy);
  m.impl("cross_entropy_", cross_entropy_);
  m.impl("cross_entropy_backward", cross_entropy_backward);
  m.impl("embedding_backward", embedding_backward);
  m.impl("fill_random_", fill_random_);
  m.impl("scale_into", scale_into);
  m.impl("dequantise", dequantise_rows);
  m.impl("fp8_amax", fp8_amax);
  m.impl("fp8_cast", fp8_cast);
  m.impl("fp8_quantise", fp8_quantise);
  m.impl("fp8_rms_norm", fp8_rms_norm);
  m.impl("fp8_rms_norm_backward", fp8_rms_norm_backward);
  m.impl("fp8_swiglu_backward", fp8_swiglu_backward);
  m.impl("fp8_rope_pack", fp8_rope_pack);
}

}  // namespace fsdp::kernels
