// KeptTensor: a tensor kept for backward. A parameter is kept without its memory and gathered again
// when it is read; any other tensor is kept as it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace fsdp::shard {

class Flat;
class Unit;

class KeptTensor {
 public:
  KeptTensor() = default;
  explicit KeptTensor(const at::Tensor& tensor);
  KeptTensor(KeptTensor&& other) noexcept;
  KeptTensor& operator=(KeptTensor&& other) noexcept;
  ~KeptTensor() { release(); }

  // Without autograd metadata and without the key.
  const at::Tensor& data() const { return data_; }
  const std::shared_ptr<Unit>& unit() const { return unit_; }  // of a parameter
  bool unchanged() const;                                      // in place, since it was kept
  // An Error if the tensor was changed in place since it was kept. `who` needs it now.
  void check(const char* who) const;
  void release();

 private:
  at::Tensor data_;
  uint32_t version_ = 0;
  std::shared_ptr<Unit> unit_;  // a graph may outlive the model
  Flat* flat_ = nullptr;
  const void* counted_ = nullptr;  // its storage, if counted in saved_activations
};

}  // namespace fsdp::shard
