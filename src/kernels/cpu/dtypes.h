// Maps a tensor's dtype to C++ types and pointers.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::kernels::cpu {

// Calls body(T{}) with the C++ type of a floating-point dtype.
template <typename Body>
auto with_dtype(at::ScalarType type, const Body& body) {
  switch (type) {
    case at::ScalarType::Float:
      return body(float{});
    case at::ScalarType::Double:
      return body(double{});
    case at::ScalarType::BFloat16:
      return body(c10::BFloat16{});
    case at::ScalarType::Half:
      return body(c10::Half{});
    default:
      throw Error(formatted("no kernel for {} on the CPU.", toString(type)),
                  "use float32, float64, bfloat16 or float16.");
  }
}

// The elements of a tensor, for reading or writing; null if it is undefined.
template <typename T>
const T* read(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const T*>(tensor.const_data_ptr()) : nullptr;
}

template <typename T>
T* write(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

}  // namespace fsdp::kernels::cpu
