// Cross-entropy: of given logits, and fused with a linear that computes the logits in chunks.
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <optional>

#include "fsdp/error.h"
#include "fsdp/nn/functional.h"
#include "kernels/ops.h"
#include "nn/products.h"

namespace fsdp::nn {
namespace {

// Logits per chunk: 128 MiB in bf16. At least kRows rows, because each chunk reads and writes the
// float32 gradient of the weight once, which takes a GPU as long as the product of about 500 rows.
constexpr int64_t kLogits = int64_t{1} << 26;
constexpr int64_t kRows = 2048;

at::Tensor checked_targets(const at::Tensor& targets, const at::Tensor& rows) {
  if (targets.scalar_type() != at::kLong ||
      targets.sizes() != rows.sizes().slice(0, rows.dim() - 1))
    throw Error(
        "the targets of a cross-entropy don't match its input: they must be int64, one per row.",
        "class probabilities aren't supported; convert other integers with .to(at::kLong).");
  return targets.contiguous().view({-1});
}

// 1 / the number of targets that aren't ignored; on the device, without waiting for it.
at::Tensor mean_scale(const at::Tensor& targets, int64_t ignore_index) {
  return targets.ne(ignore_index).sum().to(at::kFloat).reciprocal();
}

at::Tensor plain_cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                               Reduction reduction, int64_t ignore_index) {
  auto how = reduction == Reduction::kMean  ? at::Reduction::Mean
             : reduction == Reduction::kSum ? at::Reduction::Sum
                                            : at::Reduction::None;
  at::Tensor loss =
      at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), targets, {}, how, ignore_index);
  if (reduction == Reduction::kNone) loss = loss.view(logits.sizes().slice(0, logits.dim() - 1));
  return loss.to(at::kFloat);
}

// Input: logits. Output: losses, one per row. Saved: logits, targets, log-sum-exp of each row.
struct CrossEntropyNode : Node {
  int64_t ignore_index = -100;

  std::string name() const override { return "fsdp::cross_entropy"; }

  Tensors backward(const Tensors& gradients) override {
    Tensors kept = saved();
    at::Tensor grad = gradients[0].to(at::kFloat).contiguous().view({-1});
    at::Tensor rows = as_rows(kept[0]);
    return {kernels::cross_entropy_backward(grad, rows, kept[1], kept[2], ignore_index)
                .view(kept[0].sizes())};
  }
};

// Inputs: hidden, weight. Output: the loss. Saved: the gradients of both for the sum of all losses,
// and the factor to multiply them by. Dividing by the number of rows earlier, before the loss is
// scaled, would lose most of a float16 gradient.
struct LinearCrossEntropyNode : Node {
  Target weight;

  std::string name() const override { return "fsdp::linear_cross_entropy"; }

  Tensors backward(const Tensors& gradients) override {
    Tensors made = saved();
    at::Tensor scale = gradients[0].to(at::kFloat);
    if (made[2].defined()) scale = scale * made[2];
    Tensors result(2);
    if (wants(0)) {
      result[0] = at::empty(made[0].sizes(), made[0].options());
      kernels::scale_into(result[0], made[0], scale, /*accumulate=*/false);
    }
    if (wants(1)) {
      Opened opened = weight.open();
      kernels::scale_into(opened.place.gradient, made[1], scale, opened.place.accumulate);
      result[1] = opened.close();
    }
    return result;
  }
};

struct Gradients {
  at::Tensor hidden;  // [rows, dim]; undefined: not needed
  at::Tensor weight;  // [vocab, dim] float32; undefined: not needed
};

// Returns the sum of all losses and writes its gradients to `wanted`. hidden [rows, dim], targets
// [rows]
at::Tensor chunked(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                   int64_t chunk, int64_t ignore_index, const Gradients& wanted) {
  int64_t rows = hidden.size(0), vocab = weight.size(0);
  at::Tensor once = at::ones({}, hidden.options().dtype(at::kFloat));
  at::Tensor losses = at::empty({rows}, hidden.options().dtype(at::kFloat));
  at::Tensor room = at::empty({std::min(chunk, rows), vocab}, hidden.options());
  if (rows == 0 && wanted.weight.defined()) wanted.weight.zero_();
  for (int64_t first = 0; first < rows; first += chunk) {
    int64_t count = std::min(chunk, rows - first);
    at::Tensor h = hidden.narrow(0, first, count), t = targets.narrow(0, first, count);
    at::Tensor logits = room.narrow(0, 0, count);
    at::mm_out(logits, h, weight.t());
    if (!wanted.hidden.defined() && !wanted.weight.defined()) {
      losses.narrow(0, first, count)
          .copy_(std::get<0>(kernels::cross_entropy(logits, t, ignore_index)));
      continue;
    }
    losses.narrow(0, first, count).copy_(kernels::cross_entropy_(logits, t, once, ignore_index));
    if (wanted.hidden.defined()) {
      at::Tensor part = wanted.hidden.narrow(0, first, count);
      at::mm_out(part, logits, weight);
    }
    if (wanted.weight.defined())
      product_into({wanted.weight, /*accumulate=*/first > 0}, logits.t(), h);
  }
  return losses.sum();
}

// Inputs: hidden, weight. Output: losses, one per row. Saved: both, targets, log-sum-exp of each
// row. Backward computes the logits again, because it depends on the gradient of each row.
struct LinearCrossEntropyRowsNode : Node {
  int64_t ignore_index = -100, chunk = 0;
  Target weight;

  std::string name() const override { return "fsdp::linear_cross_entropy"; }

  Tensors backward(const Tensors& gradients) override {
    const Tensors kept = saved();
    const at::Tensor hidden = as_rows(kept[0]);
    const at::Tensor grad = gradients[0].to(at::kFloat).contiguous().view({-1});
    Tensors result(2);
    if (wants(0)) result[0] = at::empty(kept[0].sizes(), kept[0].options());
    std::optional<Opened> opened;
    if (wants(1)) opened.emplace(weight.open());
    for (int64_t first = 0; first < hidden.size(0); first += chunk) {
      const int64_t count = std::min(chunk, hidden.size(0) - first);
      const at::Tensor h = hidden.narrow(0, first, count);
      const at::Tensor logits = kernels::cross_entropy_backward(
          grad.narrow(0, first, count), at::mm(h, kept[1].t()), kept[2].narrow(0, first, count),
          kept[3].narrow(0, first, count), ignore_index);
      if (wants(0)) {
        at::Tensor part = as_rows(result[0]).narrow(0, first, count);
        at::mm_out(part, logits, kept[1]);
      }
      if (!opened) continue;
      product_into(opened->place, logits.t(), h);
      opened->place.accumulate = true;
    }
    if (opened) result[1] = opened->close();
    return result;
  }
};

// The loss of each row.
at::Tensor rows_of_losses(const at::Tensor& hidden, const at::Tensor& weight,
                          const at::Tensor& targets, int64_t chunk, int64_t ignore_index) {
  std::vector<at::Tensor> losses, sums;
  {
    Unrecorded unrecorded;
    const at::Tensor rows = as_rows(hidden);
    for (int64_t first = 0; first < rows.size(0); first += chunk) {
      const int64_t count = std::min(chunk, rows.size(0) - first);
      auto [loss, sum] = kernels::cross_entropy(at::mm(rows.narrow(0, first, count), weight.t()),
                                                targets.narrow(0, first, count), ignore_index);
      losses.push_back(loss);
      sums.push_back(sum);
    }
  }
  at::Tensor out = at::empty({0}, hidden.options().dtype(at::kFloat)), log_sum = out;
  {
    Unrecorded unrecorded;
    if (!losses.empty()) {
      out = at::cat(losses);
      log_sum = at::cat(sums);
    }
    out = out.view(hidden.sizes().slice(0, hidden.dim() - 1));
  }
  if (auto node = record<LinearCrossEntropyRowsNode>({hidden, weight})) {
    node->ignore_index = ignore_index;
    node->chunk = chunk;
    node->weight = Target(weight);
    node->save({hidden, weight, targets, log_sum});
    node->returns(out);
  }
  return out;
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& given, const at::Tensor& targets,
                         const CrossEntropyOptions& options) {
  at::Tensor flat = checked_targets(targets, given);
  if (!has_kernels(given) || given.scalar_type() == at::kDouble)
    return plain_cross_entropy(given, flat, options.reduction, options.ignore_index);
  at::Tensor logits = given.contiguous(), losses, log_sum;
  {
    Unrecorded unrecorded;
    std::tie(losses, log_sum) = kernels::cross_entropy(as_rows(logits), flat, options.ignore_index);
    losses = losses.view(targets.sizes());
  }
  if (auto node = record<CrossEntropyNode>({logits})) {
    node->ignore_index = options.ignore_index;
    node->save({logits, flat, log_sum});
    node->returns(losses);
  }
  if (options.reduction == Reduction::kNone) return losses;
  if (options.reduction == Reduction::kSum) return losses.sum();
  return losses.sum() * mean_scale(flat, options.ignore_index);
}

at::Tensor linear_cross_entropy(const at::Tensor& given, const at::Tensor& weight,
                                const at::Tensor& targets,
                                const LinearCrossEntropyOptions& options) {
  at::Tensor flat = checked_targets(targets, given);
  at::Tensor hidden = like_weight(given, weight);
  bool known = has_kernels(hidden) && hidden.scalar_type() != at::kDouble &&
               hidden.scalar_type() == weight.scalar_type();
  if (!known)
    return plain_cross_entropy(nn::linear(hidden, weight), flat, options.reduction,
                               options.ignore_index);
  hidden = hidden.contiguous();
  int64_t chunk = options.chunk;
  if (chunk <= 0) chunk = std::max(kRows, kLogits / std::max<int64_t>(1, weight.size(0)));
  if (options.reduction == Reduction::kNone)
    return rows_of_losses(hidden, weight, flat, chunk, options.ignore_index);

  auto node = record<LinearCrossEntropyNode>({hidden, weight});
  Gradients made;
  at::Tensor loss, scale;
  {
    Unrecorded unrecorded;
    if (node && node->will_want(0)) made.hidden = at::empty(hidden.sizes(), hidden.options());
    if (node && node->will_want(1))
      made.weight = at::empty(weight.sizes(), hidden.options().dtype(at::kFloat));
    Gradients rows{made.hidden.defined() ? as_rows(made.hidden) : at::Tensor(), made.weight};
    loss = chunked(as_rows(hidden), weight, flat, chunk, options.ignore_index, rows);
    if (options.reduction == Reduction::kMean) {
      scale = mean_scale(flat, options.ignore_index);
      loss.mul_(scale);
    }
  }
  if (node) {
    node->weight = Target(weight);
    node->save({made.hidden, made.weight, scale});
    node->returns(loss);
  }
  return loss;
}

}  // namespace fsdp::nn
