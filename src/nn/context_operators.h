// Operators that need the other ranks of a context. Operators, so that recomputation runs them
// again instead of keeping their results.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <optional>
#include <tuple>

#include "fsdp/communicator.h"

namespace fsdp::nn {

// A communicator as an argument of an operator.
struct Channel : torch::CustomClassHolder {
  explicit Channel(Communicator among) : comm(std::move(among)) {}
  Communicator comm;
};
using ChannelPointer = c10::intrusive_ptr<Channel>;

// fsdp::exchange: parts [ranks, ..], contiguous. Part r goes to rank r, whose part arrives in its
// place (exchange.cpp).
at::Tensor exchange_kernel(const at::Tensor& parts, const ChannelPointer& channel);

// fsdp::ring_attention: the result and its logsumexp (ring.cpp).
std::tuple<at::Tensor, at::Tensor> ring_kernel(const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& v,
                                               const std::optional<at::Tensor>& documents,
                                               bool causal, std::optional<double> scale,
                                               const ChannelPointer& channel);

}  // namespace fsdp::nn
