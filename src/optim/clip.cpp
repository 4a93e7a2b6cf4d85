// clip_grad_norm_ over shards: one number a rank, summed over the ranks in double, so that the norm
// does not depend on how the model is cut. Nothing waits for a device.
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <map>

#include "fsdp/fully_shard.h"
#include "kernels/update.h"
#include "shard/model.h"

namespace fsdp {
namespace {

// Adds up what one rank has of each group; groups whose shards are spread are summed over them.
at::Tensor total_of_powers(shard::Model& model, double norm_type) {
  bool largest = std::isinf(norm_type);
  auto join = [&](const at::Tensor& a, const at::Tensor& b) {
    return largest ? at::maximum(a, b) : a + b;
  };
  auto zero = [&] {
    return at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(model.device));
  };
  std::vector<std::pair<shard::Group*, at::Tensor>> groups;  // in the order of the units
  for (shard::Flat* flat : model.flats()) {
    if (!flat->trainable()) continue;
    shard::Group* group = flat->unit().group.get();
    at::Tensor own =
        flat->grad.defined() ? kernels::sum_of_powers(flat->grad, norm_type) : at::Tensor();
    auto known = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& entry) { return entry.first == group; });
    if (known == groups.end()) known = groups.insert(groups.end(), {group, zero()});
    if (own.defined()) known->second = join(known->second, own);
  }
  at::Tensor total = zero();
  for (auto& [group, part] : groups) {
    if (group->shard_size > 1)
      group->reduce.all_reduce(part, largest ? ReduceOp::MAX : ReduceOp::SUM,
                               {.label = "the norm of the gradients"});
    total = join(total, part);
  }
  return total;
}

}  // namespace

at::Tensor Sharded::clip_grad_norm_(double max_norm, double norm_type) const {
  if (!(max_norm >= 0) || !(norm_type > 0))
    throw Error("clip_grad_norm_(" + std::to_string(max_norm) + ", " + std::to_string(norm_type) +
                    "): the norm and its type must be positive.",
                "write clip_grad_norm_(1.0) for the usual clipping.");
  auto model = shard::live(model_);
  std::lock_guard lock(model->mutex);
  shard::Unseen unseen;
  model->forget_cleared_gradients();
  model->settle_factor();
  at::Tensor total = total_of_powers(*model, norm_type);
  if (norm_type == 2.0)
    total = total.sqrt();
  else if (!std::isinf(norm_type))
    total = total.pow(1.0 / norm_type);
  at::Tensor norm = total.to(at::kFloat);
  model->factor = (max_norm / (norm + 1e-6)).clamp_max(1.0);
  // An optimizer of ours multiplies while it updates; others read the gradients themselves.
  if (model->optimizers.empty() || model->masters_handed_out) model->settle_factor();
  return norm;
}

}  // namespace fsdp
