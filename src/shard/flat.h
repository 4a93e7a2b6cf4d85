// Flat: the parameters of a unit that share a dtype. One storage, one layout, one shard a rank.
//
// The module's handles are views of the storage for good; gathering points the storage at memory
// that holds the whole buffer, giving up takes it away. The shard is what is gathered; the master
// is what the optimizer updates. They are one tensor where the dtypes are equal, unless somebody
// else (torch::optim) was given the master.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shard/layout.h"
#include "shard/tensor_access.h"

namespace fsdp::shard {

class Unit;

struct Parameter {
  std::vector<std::string> names;  // the module's own; several when it is shared
  at::Tensor handle;               // the module's tensor
  std::vector<int64_t> sizes, strides;
  std::vector<int64_t> order;  // dimensions by falling stride: the order of memory
  bool is_norm = false;        // of a normalisation layer
  bool is_batch_norm = false;  // of one that needs float32 beside low-precision inputs
  const std::string& name() const { return names.front(); }
};

// Fills sizes, strides and order from the handle. A tensor with holes or overlaps becomes
// contiguous.
void describe_memory(Parameter& parameter);

struct GradientSlot;  // buffers.h

class Flat {
 public:
  Flat(Unit& unit, std::vector<Parameter> parameters, int world, int rank, Cut cut,
       at::ScalarType param_dtype, at::ScalarType master_dtype, at::ScalarType reduce_dtype,
       at::Device device);
  ~Flat();
  Flat(const Flat&) = delete;
  Flat& operator=(const Flat&) = delete;

  Unit& unit() const { return unit_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const Layout& layout() const { return layout_; }
  int rank() const { return rank_; }  // of the shard
  at::ScalarType param_dtype() const { return param_dtype_; }
  at::ScalarType master_dtype() const { return master_dtype_; }
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }
  at::Device device() const { return device_; }
  int64_t full_bytes() const;
  bool trainable() const;  // some parameter wants a gradient

  at::Tensor shard;        // [shard_numel] param_dtype; undefined on the meta device
  at::Tensor master;       // [shard_numel] master_dtype; may be `shard`
  at::Tensor window;       // [full_numel] shared by the ranks of a host, `shard` a part of it
  at::Tensor grad;         // [shard_numel] master_dtype; undefined: none since zero_grad
  at::Tensor grad_memory;  // what `grad` lies in; kept from step to step
  at::Tensor leaf;         // what parameters() handed out: the master as a leaf of autograd
  at::Tensor secondary;    // reshard_after_forward = n: this rank's 1/n while the unit is given up
  bool secondary_valid = false;

  // --- the module's handles ---
  void bind(size_t parameter);  // the handle becomes a view of the storage
  void rename(const at::Tensor& handle, std::vector<std::string> names);
  void point_at(const at::Tensor& full);  // [full_numel] param_dtype; handles read it from now on
  void take_away();
  void set_keys(bool on);
  bool pinned() const;          // somebody holds a view of a parameter
  std::string moved() const;    // name of a parameter whose handle left the storage; "" is good
  std::string written() const;  // name of a parameter written since remember_versions
  void remember_versions();
  bool was_written(size_t parameter) const;
  size_t index_of(const at::Tensor& handle) const;  // of a parameter of this flat
  void bump_versions();
  std::atomic<int64_t> saved{0};  // tensors of this storage that autograd saved

  // --- parts ---
  at::Tensor view_of(size_t parameter, const at::Tensor& full) const;  // in the module's shape
  // The rank's part of parameter p in `shard` (master, grad, …), flat, in memory order.
  at::Tensor part_of(size_t parameter, const at::Tensor& shard) const;
  // Copies this rank's part of a whole parameter into `shard`.
  void keep_part(size_t parameter, const at::Tensor& whole, const at::Tensor& shard) const;

  // --- gradients (gradients.cpp) ---
  GradientSlot* slot = nullptr;
  std::vector<char> arrived;  // per parameter, in this backward
  std::vector<char> filled;   // per parameter: the slot holds something
  // The slot's padding becomes zero; the places of its parameters stay as they are.
  void take(GradientSlot* taken);
  const at::Tensor& gradient_view(size_t parameter) const;  // into the slot
  const at::Tensor& slot_view() const;                      // [full_numel] reduce_dtype
  // Handles' .grad while the gradient is sharded: reads of it say what to write instead.
  at::Tensor stand_in(size_t parameter) const;
  bool is_stand_in(const at::Tensor& gradient) const;

 private:
  Unit& unit_;
  std::vector<Parameter> parameters_;
  Layout layout_;
  int rank_;
  at::ScalarType param_dtype_, master_dtype_, reduce_dtype_;
  at::Device device_;
  StorageTag tag_, gradient_tag_;
  c10::intrusive_ptr<c10::StorageImpl> storage_, gradient_storage_;
  std::vector<uint32_t> versions_;

  // Views into a slot, made when it is first taken: a few slots come again and again.
  struct SlotViews {
    at::Tensor full;
    std::vector<at::Tensor> parameters, gaps;
  };
  std::vector<std::pair<int64_t, int64_t>> gaps() const;  // padding in the full buffer: from, count
  std::map<GradientSlot*, SlotViews> slot_views_;
  const SlotViews* views_ = nullptr;  // of `slot`
};

}  // namespace fsdp::shard
