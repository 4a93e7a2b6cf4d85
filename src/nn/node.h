// What the autograd nodes of this room share: how they are recorded, what they keep, and where they
// write the gradients of parameters.
//
//   at::Tensor out = …;                                // computed under Unrecorded
//   if (auto node = record<MyNode>({x, weight})) {     // null: no gradient is wanted
//     node->weight = Target(weight);
//     node->save({x, weight});
//     node->returns(out);
//   }
//
// Nodes are written by hand and not derived from torch::autograd::Function because they have
// members, and know when they are recorded which gradients are wanted.
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

// Forward runs under this: no graph, and results that are no views, whatever made them. Sharded
// parameters are still gathered when an operator reads them. Layers compute in the type of their
// weights, also where autocast would choose another: backward knows of no such choice.
struct Unrecorded {
  shard::GraphWanted wanted;  // as of before
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard as_given{c10::autocast_dispatch_keyset};
};

// A gradient while it is written: into place.gradient, added to what is there if place.accumulate.
struct Opened {
  shard::Place place;
  c10::intrusive_ptr<shard::GradientRoute> route;
  at::Tensor close();  // returns what autograd is handed: nothing if it is in its place
};

// Where the gradient of a parameter goes, as a node keeps it.
class Target {
 public:
  Target() = default;
  // Tells the parameter's unit that a gradient is to come. May be undefined.
  explicit Target(const at::Tensor& parameter);
  Opened open() const;

 private:
  std::vector<int64_t> sizes_;
  at::TensorOptions options_;
  c10::intrusive_ptr<shard::GradientRoute> route_;  // null: autograd gets it
};

class Node : public torch::autograd::Node {
 public:
  Tensors apply(Tensors&& gradients) final;
  void release_variables() override;

  // While it is recorded. What is one of the node's own results is saved as its tensor_data():
  // the node would keep itself alive otherwise.
  void save(const Tensors& tensors);
  void returns(at::Tensor& output);
  bool will_want(size_t input) const { return should_compute_output(input); }

 protected:
  // `gradients` of the outputs, undefined where an output was not used, but not all of them.
  // Returns those of the inputs.
  virtual Tensors backward(const Tensors& gradients) = 0;
  Tensors saved();  // gathers
  bool wants(size_t input) const { return task_should_compute_output(input); }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
};

// The node of an operation on `inputs` (some may be undefined); null if none wants a gradient.
template <typename T>
std::shared_ptr<T> record(const Tensors& inputs) {
  if (!at::GradMode::is_enabled() || !torch::autograd::any_variable_requires_grad(inputs))
    return nullptr;
  std::shared_ptr<T> node(new T, torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  return node;
}

// Whether src/kernels has operators for it.
bool has_kernels(const at::Tensor& tensor);
// In the weight's floating-point type.
at::Tensor like_weight(const at::Tensor& x, const at::Tensor& weight);
// [rows, last dimension], contiguous.
at::Tensor as_rows(const at::Tensor& tensor);

}  // namespace fsdp::nn
