// What the tests of deferred_init check: a module's tensors, whether they have memory, and whether
// they equal plain construction bit for bit.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shard/deferred.h"
#include "shard/tensor_access.h"

namespace fsdp::shard {

namespace nn = torch::nn;
using torch::Tensor;
using Module = std::shared_ptr<nn::Module>;
using Tensors = std::vector<std::pair<std::string, Tensor>>;

inline bool has_memory(const Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
}

inline Tensors tensors_of(const nn::Module& module) {
  Tensors tensors;
  for (const auto& p : module.named_parameters()) tensors.emplace_back(p.key(), p.value());
  for (const auto& b : module.named_buffers()) tensors.emplace_back(b.key(), b.value());
  return tensors;
}

inline Tensor generator_state() {
  Tensor state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  if (!torch::cuda::is_available()) return state;
  return torch::cat({state, at::globalContext().defaultGenerator({at::kCUDA, 0}).get_state()});
}

inline void expect_same_bits(const Tensor& a, const Tensor& b, const std::string& name) {
  ASSERT_EQ(a.sizes(), b.sizes()) << name;
  ASSERT_EQ(a.strides(), b.strides()) << name;
  ASSERT_EQ(a.dtype(), b.dtype()) << name;
  EXPECT_TRUE(torch::equal(a.contiguous().view({-1}).view(torch::kByte),
                           b.contiguous().view({-1}).view(torch::kByte)))
      << name;
}

inline void expect_same_handles(const Tensors& plain, const Tensors& lazy) {
  ASSERT_EQ(plain.size(), lazy.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    const auto& [name, tensor] = plain[i];
    const Tensor& other = lazy[i].second;
    EXPECT_EQ(name, lazy[i].first);
    EXPECT_EQ(tensor.sizes(), other.sizes()) << name;
    EXPECT_EQ(tensor.strides(), other.strides()) << name;
    EXPECT_EQ(tensor.dtype(), other.dtype()) << name;
    EXPECT_EQ(tensor.device(), other.device()) << name;
    EXPECT_EQ(tensor.requires_grad(), other.requires_grad()) << name;
    EXPECT_EQ(tensor.is_leaf(), other.is_leaf()) << name;
    EXPECT_EQ(tensor._version(), other._version()) << name;
    EXPECT_TRUE(deferred::is_deferred(other)) << name;
    EXPECT_FALSE(has_memory(other)) << name;
  }
}

}  // namespace fsdp::shard
