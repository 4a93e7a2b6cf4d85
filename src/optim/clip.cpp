// clip_grad_norm_ over shards: one number per rank, summed over the ranks in double, so that the
// norm doesn't depend on how the model is sharded. Nothing waits for the device.
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/format.h"
#include "fsdp/fully_shard.h"
#include "kernels/update.h"
#include "shard/gradients.h"
#include "shard/model.h"
#include "shard/offload.h"
#include "shard/unit.h"
#include "shard/update.h"

namespace fsdp {
namespace {

// This rank's gradients of the units of one group.
struct Share {
  shard::Group* group;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> powers;  // for gradients in host memory: sums of |x|^p, on the device
};

// A gradient in host memory was summed on the device before it left, unless it was changed since.
at::Tensor power_on_host(const shard::Flat& flat, double norm_type, at::Device device) {
  if (norm_type == 2.0 && flat.host->square_valid) return flat.host->square;
  flat.await_gradient();
  return kernels::sum_of_powers(flat.grad, norm_type).to(device);
}

std::vector<Share> shares_of(shard::Engine& model, at::Device device,
                             double norm_type) {  // in the order of the units
  std::vector<Share> shares;
  for (shard::Flat* flat : shard::trainable_flats(model)) {
    shard::Group* group = flat->unit().group.get();
    auto known = std::find_if(shares.begin(), shares.end(),
                              [&](const Share& share) { return share.group == group; });
    if (known == shares.end()) known = shares.insert(shares.end(), {group, {}, {}});
    if (!flat->grad.defined()) continue;
    if (shard::gradient_on_host(*flat))
      known->powers.push_back(power_on_host(*flat, norm_type, device));
    else
      known->gradients.push_back(flat->grad);
  }
  return shares;
}

at::Tensor own_total(const Share& share, double norm_type, at::Device device) {
  std::vector<at::Tensor> parts;
  if (norm_type == 2.0 && !share.gradients.empty())
    parts.push_back(kernels::sum_of_squares(share.gradients));
  else
    for (const at::Tensor& gradient : share.gradients)
      parts.push_back(kernels::sum_of_powers(gradient, norm_type));
  // The sum over ranks is in place, and the flat keeps its own value, so clone it.
  for (const at::Tensor& power : share.powers)
    parts.push_back(parts.empty() ? power.clone() : power);
  if (parts.empty()) return at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(device));
  at::Tensor total = parts.front();
  for (size_t i = 1; i < parts.size(); ++i)
    total = std::isinf(norm_type) ? at::maximum(total, parts[i]) : total + parts[i];
  return total;
}

// The total over all groups; each is summed over the ranks it is sharded over.
at::Tensor total_of(const std::vector<Share>& shares, double norm_type, at::Device device) {
  const bool largest = std::isinf(norm_type);
  at::Tensor total;
  for (const Share& share : shares) {
    at::Tensor part = own_total(share, norm_type, device);
    if (share.group->shard_size > 1)
      share.group->reduce.all_reduce(part, largest ? ReduceOp::MAX : ReduceOp::SUM,
                                     {.label = "norm of the gradients"});
    if (!total.defined())
      total = part;
    else
      total = largest ? at::maximum(total, part) : total + part;
  }
  return total.defined() ? total : own_total({}, norm_type, device);
}

kernels::Clipping clipping_of(shard::Engine& model, at::Device device, double max_norm,
                              double norm_type) {
  const auto shares = shares_of(model, device, norm_type);
  if (norm_type != 2.0) {
    at::Tensor total = total_of(shares, norm_type, device);
    if (!std::isinf(norm_type)) total = total.pow(1.0 / norm_type);
    return kernels::clip_factor(total * total, max_norm);
  }
  // If no other rank contributes, one pass computes the norm and its factor.
  std::vector<at::Tensor> gradients;
  bool alone = true;
  for (const Share& share : shares) {
    alone = alone && share.group->shard_size <= 1 && share.powers.empty();
    gradients.insert(gradients.end(), share.gradients.begin(), share.gradients.end());
  }
  if (alone && !gradients.empty()) return kernels::clip_factor(gradients, max_norm);
  return kernels::clip_factor(total_of(shares, norm_type, device), max_norm);
}

}  // namespace

at::Tensor Sharded::clip_grad_norm_(double max_norm, double norm_type) const {
  if (!(max_norm >= 0) || !(norm_type > 0))
    throw Error(formatted("clip_grad_norm_({:f}, {:f}): max_norm must be at least 0, and norm_type "
                          "positive.",
                          max_norm, norm_type),
                "clip_grad_norm_(1.0) is usual.");
  const auto model = shard::model_of(*this);
  const auto engine = model->lock();
  shard::Unseen unseen;
  shard::settle_gradients(*engine);
  const bool used = shard::updated_in_backward(*engine);
  if (used && !std::isinf(max_norm))
    throw Error("clip_grad_norm_: gradients were already used by an update in backward.",
                "call step_in_backward() only if nothing is clipped; max_norm = infinity returns "
                "the norm without clipping.");
  auto [norm, factor] = clipping_of(*engine, model->device(), max_norm, norm_type);
  if (!used) shard::scale_gradients(*engine, factor);
  return norm;
}

}  // namespace fsdp
