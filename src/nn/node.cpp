#include "nn/node.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>

#include "fsdp/error.h"

namespace fsdp::nn {
namespace {

// Whether this backward names the tensors whose gradients it wants (torch::autograd::grad(),
// backward(inputs)). Gradients then go through autograd, which returns or drops them.
bool gradients_are_named() {
  const auto* named = torch::autograd::get_current_graph_task_exec_info();
  return named && !named->empty();
}

}  // namespace

// --- gradients of parameters ---

at::Tensor Opened::close() {
  if (!route) return place.gradient;
  route->close();
  return {};
}

Target::Target(const at::Tensor& parameter) {
  if (!parameter.defined() || !parameter.requires_grad()) return;
  sizes_ = parameter.sizes().vec();
  options_ = at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device());
  route_ = shard::route_of(parameter);
  if (route_) route_->expect();
}

Opened Target::open() const {
  if (route_ && !gradients_are_named()) return {route_->open(), route_};
  return {{at::empty(sizes_, options_), /*accumulate=*/false}, {}};
}

// --- nodes ---

Tensors Node::apply(Tensors&& gradients) {
  if (at::GradMode::is_enabled())
    throw Error(name() + " has no second derivative.",
                "call backward without create_graph, or use torch's own operators (torch::nn) "
                "where a second derivative is needed.");
  if (!std::any_of(gradients.begin(), gradients.end(), [](const auto& g) { return g.defined(); }))
    return Tensors(num_outputs());
  std::lock_guard lock(mutex_);
  c10::impl::ExcludeDispatchKeyGuard as_given(c10::autocast_dispatch_keyset);  // as in forward
  return backward(gradients);
}

void Node::release_variables() {
  std::lock_guard lock(mutex_);
  for (auto& saved : saved_) saved.reset_data();
}

void Node::save(const Tensors& tensors) {
  saved_.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) saved_.emplace_back(tensor, /*is_output=*/false);
}

Tensors Node::saved() {
  Tensors tensors;
  tensors.reserve(saved_.size());
  for (const auto& saved : saved_) tensors.push_back(saved.unpack());
  return tensors;
}

void Node::returns(at::Tensor& output) {
  torch::autograd::create_gradient_edge(output, getptr());
}

// --- tensors ---

bool has_kernels(const at::Tensor& tensor) {
  at::ScalarType type = tensor.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf ||
         (type == at::kDouble && tensor.is_cpu());
}

at::Tensor like_weight(const at::Tensor& x, const at::Tensor& weight) {
  bool cast = x.scalar_type() != weight.scalar_type() && x.is_floating_point() &&
              weight.is_floating_point();
  return cast ? x.to(weight.scalar_type()) : x;
}

at::Tensor as_rows(const at::Tensor& tensor) {
  at::Tensor whole = tensor.contiguous();
  shard::ViewsOnly views;
  return whole.view({-1, tensor.size(-1)});
}

}  // namespace fsdp::nn
