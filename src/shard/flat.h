// Flat: the parameters of a unit that share a dtype. One storage, one layout, one shard a rank.
//
// The module's handles are views of the storage for good; gathering points the storage at memory
// that holds the whole buffer, giving up takes it away. The shard is what is gathered; the master
// is what the optimizer updates. They are one tensor where the dtypes are equal, unless somebody
// else (torch::optim) was given the master. A float32 master of a bfloat16 shard is split: the
// shard is its upper half and `rest` the bits that are missing (kernels/split.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shard/buffers.h"
#include "shard/layout.h"
#include "shard/tensor_access.h"

namespace fsdp::shard {

class Unit;
struct Home;  // offload.h

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

struct Dtypes {
  at::ScalarType param, master, reduce, grad;
  bool split;  // the master is
  bool trainable;
  auto operator<=>(const Dtypes&) const = default;
};

class Flat {
 public:
  Flat(Unit& unit, std::vector<Parameter> parameters, int world, int rank, Cut cut,
       const Dtypes& dtypes, at::Device device);
  ~Flat();
  Flat(const Flat&) = delete;
  Flat& operator=(const Flat&) = delete;

  Unit& unit() const { return unit_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const Layout& layout() const { return layout_; }
  int rank() const { return rank_; }  // of the shard
  at::ScalarType param_dtype() const { return dtypes_.param; }
  at::ScalarType master_dtype() const { return dtypes_.master; }
  at::ScalarType reduce_dtype() const { return dtypes_.reduce; }
  at::ScalarType grad_dtype() const { return leaf.defined() ? dtypes_.master : dtypes_.grad; }
  at::TensorOptions master_options() const;  // where the update runs
  at::Device device() const { return device_; }
  int64_t full_bytes() const;
  bool trainable() const;  // some parameter wants a gradient

  at::Tensor shard;        // [shard_numel] param_dtype; undefined on the meta device
  at::Tensor master;       // [shard_numel] master_dtype; may be `shard`; undefined where split
  at::Tensor rest;         // [shard_numel] int16, where the master is split
  at::Tensor window;       // [full_numel] shared by the ranks of a host, `shard` a part of it
  at::Tensor grad;         // [shard_numel] grad_dtype; undefined: none since zero_grad
  at::Tensor grad_memory;  // what `grad` lies in; on the CPU kept from step to step
  at::Tensor leaf;         // what parameters() handed out: the master as a leaf of autograd
  at::Tensor secondary;    // reshard_after_forward = n: this rank's 1/n while the unit is given up
  bool secondary_valid = false;

  // --- the master ---
  void allocate_master();  // zeros, or the shard itself
  // To be read; a copy where it is split.
  at::Tensor read_master() const;
  // To be written: settle_master() makes it what the master is. Several calls before that give the
  // same tensor.
  at::Tensor edit_master();
  void settle_master();  // the shard follows the master
  void join_master();    // one tensor from now on

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
  std::vector<int> expected;  // per parameter: gradients that layers of ours will write
  int64_t expectations = 0;   // ends of them: a layer's that is older counts no more
  void expect_none();
  std::vector<char> hooked;  // per parameter: hooks of the user's own must see its gradient
  bool alone() const;        // no other rank has a part in its gradients
  at::ScalarType slot_dtype() const { return alone() ? grad_dtype() : dtypes_.reduce; }
  // The slot of a flat that is alone is what `grad` lies in.
  GradientSlot* own_slot();
  bool in_own_slot() const { return slot && slot == own_slot_.get(); }
  void release_gradient_memory();
  // The slot's padding becomes zero; the places of its parameters stay as they are.
  void take(GradientSlot* taken);
  const at::Tensor& gradient_view(size_t parameter) const;  // into the slot
  const at::Tensor& slot_view() const;                      // [full_numel] slot_dtype
  // Handles' .grad while the gradient is sharded: reads of it say what to write instead.
  at::Tensor stand_in(size_t parameter) const;
  bool is_stand_in(const at::Tensor& gradient) const;

  // --- offload (offload.cpp) ---
  std::shared_ptr<Home> home;  // null: everything lies on the device
  void await_update() const;   // of the master and the states, in the thread that does it
  // Waits until nobody reads or writes the shard, the master and the states in host memory.
  void settle() const;
  void await_gradient() const;  // and until the gradient has come there

 private:
  Unit& unit_;
  std::vector<Parameter> parameters_;
  Layout layout_;
  int rank_;
  Dtypes dtypes_;
  at::Device device_;
  at::Tensor edited_;  // the master while it is written, where it is split
  uint32_t edited_version_ = 0;
  std::unique_ptr<GradientSlot> own_slot_;
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
