// Shared by the tests of the simulated CUDA kernels.
#pragma once

#include <torch/types.h>

#include <functional>
#include <vector>

#include "kernels/simulated/simulated.h"
#include "kernels/testing.h"

namespace fsdp::kernels {

// Calls `run`, which returns everything it made or wrote, with the simulated kernels behind ops.h:
// once in each order of threads and blocks. A result that depends on the order is a race.
inline std::vector<at::Tensor> simulated(const std::function<std::vector<at::Tensor>()>& run) {
  std::vector<at::Tensor> made, again;
  {
    const Simulated kernels(/*reversed=*/false);
    made = run();
  }
  {
    const Simulated kernels(/*reversed=*/true);
    again = run();
  }
  for (size_t i = 0; i < made.size(); ++i) {
    if (!made[i].defined()) continue;
    EXPECT_TRUE(same_bits(again[i], made[i])) << "result " << i << " in reversed order";
  }
  return made;
}

// Normally distributed; `apart`: at an unaligned address, unfit for vector loads.
inline at::Tensor made_up(at::IntArrayRef sizes, at::ScalarType type, bool apart = false) {
  const auto values = torch::randn(sizes, at::kDouble).to(type);
  return apart ? unaligned(values) : values;
}

// As far from an aligned address as the tensor is.
inline at::Tensor copied(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return tensor.storage_offset() > 0 ? unaligned(tensor) : tensor.clone();
}

inline at::Tensor exact_or_none(const at::Tensor& tensor) {
  return tensor.defined() ? exact(tensor).detach() : tensor;
}

// Cycles through combinations of options, so that a list of cases needn't be multiplied by all of
// them.
class Options {
 public:
  bool flip() { return (next() >> 16 & 1) != 0; }
  bool rarely() { return (next() >> 16 & 7) == 0; }
  template <typename T>
  T one_of(T a, T b) {
    return flip() ? a : b;
  }
  int count() const { return count_; }  // choices so far

 private:
  uint32_t next() {
    ++count_;
    return state_ = state_ * 1664525u + 1013904223u;
  }
  uint32_t state_ = 7;
  int count_ = 0;
};

}  // namespace fsdp::kernels
