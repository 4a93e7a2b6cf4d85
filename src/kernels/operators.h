// Calls of our operators through the dispatcher.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

#include <optional>

#include "base/modules.h"

namespace fsdp::kernels {

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// The state during a call. Without grad mode, as src/nn calls them, nothing can be recorded and
// autograd's keys are skipped; with it, a tensor that requires a gradient goes through a kernel
// that makes backward an error.
class OperatorCall {
 public:
  explicit OperatorCall(const at::Tensor& first) {
    if (first.defined() && first.is_cuda()) {
      static const bool loaded = (load_cuda_module(), true);
      static_cast<void>(loaded);
    }
    if (!at::GradMode::is_enabled()) below_.emplace();
  }

 private:
  std::optional<at::AutoDispatchBelowAutograd> below_;
};

}  // namespace fsdp::kernels
