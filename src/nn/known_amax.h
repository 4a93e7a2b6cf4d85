// Largest magnitudes of gradients, found by the kernels that wrote them: handed from one node of a
// backward to the next one of its thread, which quantises the gradient tensorwise.
//
// Autograd passes a gradient as the tensor that a node returned, unless it adds another one to it.
// So a magnitude is remembered for a tensor and its version, and forgotten with either. Nodes ask
// whether it is worth finding: only where the node before them was quantised, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>

namespace fsdp::nn {

class KnownAmax {
 public:
  static KnownAmax& of_thread();

  // Whether gradients are quantised in this backward.
  bool wanted() const { return wanted_; }
  void remember(const at::Tensor& gradient, const at::Tensor& amax);
  // Undefined if it isn't known. `quantised`: whether the caller would use it.
  at::Tensor find(const at::Tensor& gradient, bool quantised);

 private:
  struct Known {
    std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> gradient;
    uint32_t version = 0;
    at::Tensor amax;
  };
  bool wanted_ = false;
  size_t next_ = 0;
  std::array<Known, 4> known_;  // the last ones
};

}  // namespace fsdp::nn
