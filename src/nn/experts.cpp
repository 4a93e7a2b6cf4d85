// The products of tokens with the experts that they were sent to, and the router's logits.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/nn/moe.h"
#include "kernels/groups.h"
#include "kernels/ops.h"
#include "nn/moe.h"
#include "nn/products.h"

namespace fsdp::nn {
namespace {

at::ScalarType router_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Inputs: x, weight. Saved: x if the gradient of the weight is needed, the weight if that of x is.
struct RouterNode : Node {
  Target weight;
  std::vector<int64_t> sizes;  // of x
  at::ScalarType type = at::kFloat;

  std::string name() const override { return "fsdp::router_logits"; }

  Tensors backward(const Tensors& gradients) override {
    const at::Tensor grad = gradients[0].contiguous();
    const Tensors kept = saved();
    Tensors result(2);
    if (wants(0)) result[0] = at::mm(grad, kept[1].to(grad.scalar_type())).to(type).view(sizes);
    if (wants(1)) {
      Opened opened = weight.open();
      product_into(opened.place, grad.t(), as_rows(kept[0]).to(grad.scalar_type()));
      result[1] = opened.close();
    }
    return result;
  }
};

// --- experts ---

// The rows of all tokens, one for each choice, sorted by expert.
at::Tensor sorted_rows(const at::Tensor& x, const at::Tensor& order, int64_t top_k) {
  return x.index_select(0, order.div(top_k, "floor"));
}

// The sum of each token's rows.
at::Tensor sums_of_tokens(const at::Tensor& rows, const at::Tensor& place, int64_t top_k) {
  return rows.index_select(0, place).view({-1, top_k, rows.size(1)}).sum(1);
}

// Inputs: x, gate_up, down, the weights of choices. The weights multiply what the down projections
// read, so their outputs are neither kept nor computed again. Saved: x, the outputs of gate_up,
// both parameters, the weights, order, place and ends.
struct ExpertsNode : Node {
  Target gate_up, down;
  int64_t top_k = 0;
  std::vector<int64_t> sizes;  // of x

  std::string name() const override { return "fsdp::mix_experts"; }

  Tensors backward(const Tensors& gradients) override {
    const Tensors kept = saved();
    const at::Tensor &packed = kept[1], &order = kept[5], &place = kept[6], &ends = kept[7];
    const at::Tensor grad = sorted_rows(as_rows(gradients[0]), order, top_k);
    const at::Tensor weights = kept[4].flatten().index_select(0, order).unsqueeze(1);
    const at::Tensor factor = weights.to(packed.scalar_type());
    Tensors result(4);
    at::Tensor to_packed, hidden;
    if (wants(0) || wants(1) || wants(3)) {
      const at::Tensor to_scaled = kernels::grouped_mm(grad, kept[3], ends, /*backward=*/true);
      std::tie(to_packed, hidden) =
          kernels::swiglu_backward(to_scaled * factor, packed, /*want_out=*/true);
      if (wants(3))
        result[3] = (to_scaled.to(weights.scalar_type()) * hidden)
                        .sum(1)
                        .index_select(0, place)
                        .view(kept[4].sizes());
    } else {
      hidden = kernels::swiglu(packed);
    }
    if (wants(2)) result[2] = write(down, grad, hidden * factor, ends);
    if (wants(1))
      result[1] = write(gate_up, to_packed, sorted_rows(as_rows(kept[0]), order, top_k), ends);
    if (wants(0))
      result[0] = sums_of_tokens(kernels::grouped_mm(to_packed, kept[2], ends, /*backward=*/true),
                                 place, top_k)
                      .view(sizes);
    return result;
  }

 private:
  static at::Tensor write(const Target& target, const at::Tensor& grad, const at::Tensor& x,
                          const at::Tensor& ends) {
    Opened opened = target.open();
    kernels::grouped_mm_into(opened.place.gradient, grad, x, ends, opened.place.accumulate);
    return opened.close();
  }
};

void check_experts(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down) {
  const bool fits = gate_up.dim() == 3 && down.dim() == 3 && gate_up.size(0) == down.size(0) &&
                    gate_up.size(2) == x.size(-1) && down.size(1) == x.size(-1) &&
                    gate_up.size(1) == 2 * down.size(2);
  if (!fits)
    throw Error(formatted("experts can't read tokens of {}.", x.size(-1)),
                "gate_up is [experts, 2 · width, dim], down [experts, dim, width].");
  if (!has_kernels(gate_up) || down.scalar_type() != gate_up.scalar_type())
    throw Error(formatted("experts can't compute in {} on {}.", toString(gate_up.scalar_type()),
                          gate_up.device().str()),
                "use float32, bfloat16 or float16.");
}

}  // namespace

at::Tensor router_logits(const at::Tensor& x, const at::Tensor& weight) {
  at::Tensor logits;
  {
    Unrecorded unrecorded;
    const at::ScalarType type = router_type(x);
    logits = at::mm(as_rows(x).to(type), weight.to(type).t());
  }
  if (auto node = record<RouterNode>({x, weight})) {
    node->weight = Target(weight);
    node->sizes = x.sizes().vec();
    node->type = x.scalar_type();
    node->save({node->will_want(1) ? x : at::Tensor(), node->will_want(0) ? weight : at::Tensor()});
    node->returns(logits);
  }
  return logits;
}

void sort_by_expert(Routing& routing, int64_t experts) {
  const at::NoGradGuard no_grad;
  at::Tensor sorted;
  std::tie(sorted, routing.order) =
      at::sort(routing.chosen.flatten(), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const auto numbers = routing.chosen.options();
  routing.place = at::empty_like(routing.order)
                      .scatter_(0, routing.order, at::arange(routing.order.numel(), numbers));
  routing.ends = at::searchsorted(sorted, at::arange(experts, numbers), /*out_int32=*/true,
                                  /*right=*/true);
}

at::Tensor mix_experts(const at::Tensor& given, const at::Tensor& gate_up, const at::Tensor& down,
                       const Routing& routing) {
  const at::Tensor x = like_weight(given, gate_up).contiguous();
  check_experts(x, gate_up, down);
  const int64_t top_k = routing.chosen.size(1);
  at::Tensor packed, out;
  {
    Unrecorded unrecorded;
    packed = kernels::grouped_mm(sorted_rows(as_rows(x), routing.order, top_k), gate_up,
                                 routing.ends, /*backward=*/false);
    const at::Tensor factor =
        routing.weights.flatten().index_select(0, routing.order).unsqueeze(1).to(x.scalar_type());
    const at::Tensor hidden = kernels::swiglu(packed).mul_(factor);
    out = sums_of_tokens(kernels::grouped_mm(hidden, down, routing.ends, /*backward=*/false),
                         routing.place, top_k);
    shard::ViewsOnly views;
    out = out.view(x.sizes());
  }
  if (auto node = record<ExpertsNode>({x, gate_up, down, routing.weights})) {
    node->gate_up = Target(gate_up);
    node->down = Target(down);
    node->top_k = top_k;
    node->sizes = x.sizes().vec();
    const bool into = node->will_want(0) || node->will_want(1) || node->will_want(3);
    node->save({node->will_want(1) ? x : at::Tensor(), packed,
                node->will_want(0) ? gate_up : at::Tensor(), into ? down : at::Tensor(),
                routing.weights, routing.order, routing.place, routing.ends});
    node->returns(out);
  }
  return out;
}

}  // namespace fsdp::nn
