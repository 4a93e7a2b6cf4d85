// The base of this room's autograd nodes: how they are recorded, what they save, and where they
// write the gradients of parameters.
//
//   at::Tensor out = …;                                // computed under Unrecorded
//   if (auto node = record<MyNode>({x, weight})) {     // null: no gradient is needed
//     node->weight = Target(weight);
//     node->save({x, weight});
//     node->returns(out);
//   }
//
// Nodes don't derive from torch::autograd::Function because they have members, and know at
// recording time which gradients are needed.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <vector>

#include "shard/gradient_route.h"
#include "shard/tape_hook.h"

namespace fsdp::nn {

using Tensors = std::vector<at::Tensor>;

// Forward runs under this guard: no graph, and results that aren't views for autograd. Operators
// still gather the sharded parameters they read. Layers compute in the dtype of their weights even
// under autocast, since backward doesn't know autocast's choice.
struct Unrecorded {
  shard::GraphWanted wanted;  // before grad mode is turned off
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard as_given{c10::autocast_dispatch_keyset};
};

// A gradient while it is written: to place.gradient, added to its contents if place.accumulate.
struct Opened {
  shard::GradientPlace place;
  c10::intrusive_ptr<shard::GradientRoute> route;
  at::Tensor close();  // returns the gradient for autograd; undefined if it was written in place
};

// The destination of a parameter's gradient; a member of a node.
class Target {
 public:
  Target() = default;
  // Tells the parameter's unit to expect a gradient. `parameter` may be undefined.
  explicit Target(const at::Tensor& parameter);
  Opened open() const;

 private:
  std::vector<int64_t> sizes_;
  at::TensorOptions options_;
  c10::intrusive_ptr<shard::GradientRoute> route_;  // null: the gradient goes to autograd
};

class Node : public torch::autograd::Node {
 public:
  Tensors apply(Tensors&& gradients) final;
  void release_variables() override;

  // For recording. Save the node's own outputs as tensor_data(), or the node keeps itself alive.
  void save(const Tensors& tensors);
  void returns(at::Tensor& output);
  bool will_want(size_t input) const { return should_compute_output(input); }

 protected:
  // `gradients` of the outputs, undefined for unused outputs; at least one is defined. Returns the
  // gradients of the inputs.
  virtual Tensors backward(const Tensors& gradients) = 0;
  Tensors saved();  // gathers saved parameters
  bool wants(size_t input) const { return task_should_compute_output(input); }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
};

// The node of an operation on `inputs` (some may be undefined); null if none requires a gradient.
template <typename T>
std::shared_ptr<T> record(const Tensors& inputs) {
  if (!at::GradMode::is_enabled() || !torch::autograd::any_variable_requires_grad(inputs))
    return nullptr;
  std::shared_ptr<T> node(new T, torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  return node;
}

// Whether src/kernels supports its dtype and device.
bool has_kernels(const at::Tensor& tensor);
// `x` in the weight's floating-point dtype.
at::Tensor like_weight(const at::Tensor& x, const at::Tensor& weight);
// A contiguous [rows, last dimension].
at::Tensor as_rows(const at::Tensor& tensor);

}  // namespace fsdp::nn
