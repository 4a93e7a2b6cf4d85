#include "nn/exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "kernels/operators.h"
#include "nn/context_operators.h"
#include "nn/node.h"

namespace fsdp::nn {
namespace {

at::Tensor exchange(const at::Tensor& parts, const Communicator& comm) {
  static const auto op =
      kernels::find_operator<at::Tensor(const at::Tensor&, const ChannelPointer&)>(
          "fsdp::exchange");
  kernels::OperatorCall call(parts);
  return op.call(parts, c10::make_intrusive<Channel>(comm));
}

int64_t width_of(const at::Tensor& x, int64_t share) {
  return x.size(1) / share * x.size(3);
}

// Runs `copy` for the columns of each tensor, side by side in the last dimension of `packed`, as
// [.., heads, width]. A tensor has 1 / share of its heads there.
template <typename Copy>
void for_each_of(const Tensors& tensors, int64_t share, const at::Tensor& packed, Copy copy) {
  int64_t first = 0;
  for (const at::Tensor& x : tensors) {
    const int64_t width = width_of(x, share);
    copy(x, packed.narrow(-1, first, width).unflatten(-1, {-1, x.size(3)}));
    first += width;
  }
}

int64_t all_widths(const Tensors& tensors, int64_t share) {
  int64_t all = 0;
  for (const at::Tensor& x : tensors) all += width_of(x, share);
  return all;
}

Tensors to_heads(const Tensors& parts, const Communicator& comm) {
  const int64_t ranks = comm.size(), batch = parts[0].size(0), tokens = parts[0].size(2);
  at::Tensor sent = at::empty({ranks, batch, tokens, all_widths(parts, ranks)}, parts[0].options());
  for_each_of(parts, ranks, sent, [&](const at::Tensor& x, at::Tensor to) {
    to.copy_(x.unflatten(1, {ranks, -1}).permute({1, 0, 3, 2, 4}));
  });
  // [ranks, batch, tokens, width] → [batch, ranks · tokens, width], without a copy for one sequence
  const at::Tensor whole =
      exchange(sent, comm).transpose(0, 1).reshape({batch, ranks * tokens, sent.size(3)});
  Tensors wholes;
  for_each_of(parts, ranks, whole, [&](const at::Tensor&, const at::Tensor& from) {
    wholes.push_back(from.transpose(1, 2));
  });
  return wholes;
}

Tensors to_tokens(const Tensors& wholes, const Communicator& comm) {
  const int64_t ranks = comm.size(), batch = wholes[0].size(0), tokens = wholes[0].size(2) / ranks;
  at::Tensor sent = at::empty({ranks, batch, tokens, all_widths(wholes, 1)}, wholes[0].options());
  for_each_of(wholes, 1, sent, [&](const at::Tensor& x, at::Tensor to) {
    to.copy_(x.unflatten(2, {ranks, tokens}).permute({2, 0, 3, 1, 4}));
  });
  const at::Tensor arrived = exchange(sent, comm);
  Tensors parts;
  for_each_of(wholes, 1, arrived, [&](const at::Tensor&, const at::Tensor& from) {
    // [ranks, batch, tokens, heads, width] → [batch, tokens, ranks · heads, width]
    parts.push_back(from.permute({1, 2, 0, 3, 4}).flatten(2, 3).transpose(1, 2));
  });
  return parts;
}

// Inputs and outputs: the tensors. Each direction is the other's gradient.
struct ExchangeNode : Node {
  Communicator comm;
  bool to_heads = false;
  std::vector<std::vector<int64_t>> sizes;  // of the outputs
  at::TensorOptions options;

  std::string name() const override { return "fsdp::exchange"; }

  Tensors backward(const Tensors& gradients) override {
    Tensors whole;
    for (size_t i = 0; i < gradients.size(); ++i)
      whole.push_back(gradients[i].defined() ? gradients[i] : at::zeros(sizes[i], options));
    return to_heads ? to_tokens(whole, comm) : nn::to_heads(whole, comm);
  }
};

Tensors exchanged(const Tensors& given, const Context& context, bool to_heads) {
  Tensors out;
  {
    Unrecorded unrecorded;
    out = to_heads ? nn::to_heads(given, context.comm()) : to_tokens(given, context.comm());
  }
  if (auto node = record<ExchangeNode>(given)) {
    node->comm = context.comm();
    node->to_heads = to_heads;
    node->options = given[0].options();
    for (at::Tensor& tensor : out) {
      node->sizes.push_back(tensor.sizes().vec());
      node->returns(tensor);
    }
  }
  return out;
}

}  // namespace

at::Tensor exchange_kernel(const at::Tensor& parts, const ChannelPointer& channel) {
  at::Tensor out = at::empty_like(parts);
  channel->comm.all_to_all(out, parts, {}, {}, {.label = "attention over the context"});
  return out;
}

std::vector<at::Tensor> exchange_to_heads(const std::vector<at::Tensor>& parts,
                                          const Context& context) {
  return exchanged(parts, context, /*to_heads=*/true);
}

std::vector<at::Tensor> exchange_to_tokens(const std::vector<at::Tensor>& wholes,
                                           const Context& context) {
  return exchanged(wholes, context, /*to_heads=*/false);
}

}  // namespace fsdp::nn
