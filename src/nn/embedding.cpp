// The embedding: its gradient goes directly into the buffer its unit is reduced from.
#include <ATen/ops/embedding.h>

#include "fsdp/nn/functional.h"
#include "kernels/ops.h"
#include "nn/node.h"

namespace fsdp::nn {
namespace {

// Input: the weight. Saved: only ids, so backward gathers nothing.
struct EmbeddingNode : Node {
  Target weight;
  int64_t padding_idx = -1;

  std::string name() const override { return "fsdp::embedding"; }

  Tensors backward(const Tensors& gradients) override {
    at::Tensor ids = saved()[0];
    Opened opened = weight.open();
    kernels::embedding_backward(as_rows(gradients[0]), ids.contiguous().view({-1}),
                                opened.place.gradient, padding_idx, opened.place.accumulate);
    return {opened.close()};
  }
};

}  // namespace

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& weight,
                     std::optional<int64_t> padding_idx) {
  int64_t padding = padding_idx.value_or(-1);
  if (padding_idx && padding < 0) padding += weight.size(0);
  if (!has_kernels(weight) || ids.scalar_type() != at::kLong)
    return at::embedding(weight, ids, padding);
  at::Tensor out;
  {
    Unrecorded unrecorded;
    out = at::embedding(weight, ids);
  }
  if (auto node = record<EmbeddingNode>({weight})) {
    node->weight = Target(weight);
    node->padding_idx = padding;
    node->save({ids});
    node->returns(out);
  }
  return out;
}

}  // namespace fsdp::nn
