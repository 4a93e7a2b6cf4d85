// Shared by the tests of the operators: the devices they run on, random tensors, and the comparison
// with a reference in float64.
//
// Every test runs on the CPU and, as …/cuda, on a GPU; without a GPU that part is skipped. Values
// are drawn on the CPU, so both devices get the same.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "base/modules.h"
#include "kernels/ops.h"

namespace fsdp::kernels {

// LibTorch looks for CUDA once, at the first call that needs to know (manual_seed does). The module
// must be loaded by then, so it is loaded before the first test.
class CudaModule : public ::testing::Environment {
 public:
  void SetUp() override { find_library("cuda"); }
};
inline const auto* const kCudaModule = ::testing::AddGlobalTestEnvironment(new CudaModule);

class OnDevice : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (device().is_cuda() && !at::globalContext().hasCUDA()) GTEST_SKIP() << "needs a GPU";
    torch::manual_seed(7);
  }

  at::Device device() const { return at::Device(GetParam()); }
  at::Tensor here(const at::Tensor& tensor) const {
    return tensor.defined() ? tensor.to(device()) : tensor;
  }

  // Normally distributed values of a dtype, on the device.
  at::Tensor random(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) const {
    return here(torch::randn(sizes, at::kDouble).to(type));
  }
  at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) const {
    return torch::zeros(sizes, at::TensorOptions(device()).dtype(type));
  }
  at::Tensor integers(int64_t below, at::IntArrayRef sizes) const {
    return here(torch::randint(below, sizes, at::kLong));
  }
};

#define FSDP_ON_EVERY_DEVICE(suite)                                          \
  INSTANTIATE_TEST_SUITE_P(Devices, suite, ::testing::Values("cpu", "cuda"), \
                           [](const auto& test) { return std::string(test.param); })

// The dtypes that every device supports.
const at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

// In float64 on the CPU; a leaf for autograd.
inline at::Tensor exact(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, at::kDouble).clone().requires_grad_();
}

inline std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes() << " " << tensor.scalar_type();
  return text.str();
}

// Two units in the last place of the dtype, at the value; for a difference of larger numbers, also
// float32's error in those (`scale`, or the largest element).
inline ::testing::AssertionResult near(const at::Tensor& actual, const at::Tensor& expected,
                                       double scale = 1) {
  if (actual.sizes() != expected.sizes())
    return ::testing::AssertionFailure()
           << describe(actual) << " instead of " << describe(expected);
  if (actual.numel() == 0) return ::testing::AssertionSuccess();
  const double unit = actual.scalar_type() == at::kBFloat16 ? 1.0 / 256
                      : actual.scalar_type() == at::kHalf   ? 1.0 / 2048
                      : actual.scalar_type() == at::kDouble ? 1e-12
                                                            : 2e-6;
  const double sums = actual.scalar_type() == at::kDouble ? 1e-12 : 2e-6;
  const auto a = actual.detach().to(at::kCPU, at::kDouble), e = expected.detach().to(at::kCPU);
  const double largest = std::max(scale, e.abs().max().item<double>());
  // The smallest nonzero float16 is 6e-8.
  const double least = actual.scalar_type() == at::kHalf ? 6e-8 : 0;
  const auto excess = (a - e).abs() - (e.abs() * (2 * unit) + largest * sums + least);
  const auto worst = excess.flatten().argmax().item<int64_t>();
  const double value = excess.flatten()[worst].item<double>();
  if (value <= 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << describe(actual) << ": element " << worst << " is " << a.flatten()[worst].item<double>()
         << ", expected " << e.flatten()[worst].item<double>();
}

inline ::testing::AssertionResult same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes())
    return ::testing::AssertionFailure() << describe(a) << " and " << describe(b);
  const auto x = a.detach().cpu().contiguous(), y = b.detach().cpu().contiguous();
  if (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0)
    return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << describe(a) << ": " << (x != y).sum().item<int64_t>() << " elements differ";
}

// The same values at an unaligned address, unfit for vector loads.
inline at::Tensor unaligned(const at::Tensor& tensor) {
  auto memory = at::empty({tensor.numel() + 1}, tensor.options());
  return memory.narrow(0, 1, tensor.numel()).view(tensor.sizes()).copy_(tensor);
}

// Calls `run`, which returns everything an operator made, several times, with one and with two
// threads.
inline void expect_same_bits_always(const std::function<std::vector<at::Tensor>()>& run) {
  const int threads = at::get_num_threads();
  const auto first = run();
  for (int now : {1, 2, threads}) {
    at::set_num_threads(now);
    const auto again = run();
    for (size_t i = 0; i < first.size(); ++i)
      EXPECT_TRUE(same_bits(again[i], first[i])) << "result " << i << ", " << now << " threads";
  }
  at::set_num_threads(threads);
}

}  // namespace fsdp::kernels
