// Registers them, in one file because the class must come before the schemas that name it.
#include "nn/context_operators.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace fsdp::nn {

TORCH_LIBRARY_FRAGMENT(fsdp, m) {
  m.class_<Channel>("Channel");
  m.def("exchange(Tensor parts, __torch__.torch.classes.fsdp.Channel channel) -> Tensor");
  m.def(
      "ring_attention(Tensor q, Tensor k, Tensor v, Tensor? documents, bool causal, float? scale,"
      " __torch__.torch.classes.fsdp.Channel channel) -> (Tensor out, Tensor lse)");
}

TORCH_LIBRARY_IMPL(fsdp, CompositeExplicitAutograd, m) {
  m.impl("exchange", exchange_kernel);
  m.impl("ring_attention", ring_kernel);
}

TORCH_LIBRARY_IMPL(fsdp, Autograd, m) {
  for (const char* name : {"exchange", "ring_attention"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace fsdp::nn
