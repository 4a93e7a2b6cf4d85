// Flat: the parameters of a unit that share a dtype. One storage, one layout, one shard per rank.
//
// The module's handles are views of the storage for good. Gathering points the storage at memory
// with the full buffer; resharding takes the memory away. The shard is what ranks gather from; the
// master is what the optimizer updates. They are one tensor if the dtypes are equal, unless the
// master was handed out (to torch::optim). A float32 master of a bfloat16 shard is split: the shard
// is its upper half and `rest` the missing 16 bits (kernels/split.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shard/buffers.h"
#include "shard/layout.h"
#include "shard/replaced_linear.h"
#include "shard/tensor_access.h"

namespace fsdp::shard {

class Unit;
struct HostState;  // offload.h

struct Parameter {
  std::vector<std::string> names;  // the module's own; several when it is shared
  at::Tensor handle;               // the module's tensor
  std::vector<int64_t> sizes, strides;
  std::vector<int64_t> order;  // dimensions by descending stride: the order in memory
  bool is_norm = false;        // of a normalisation layer
  bool is_batch_norm = false;  // of one that needs float32 beside low-precision inputs
  bool is_embedding = false;   // of an embedding
  bool is_convolution = false;
  LinearFunction linear = {};  // computes products with it; usually empty
  const std::string& name() const { return names.front(); }
};

// Sets sizes, strides and order from the handle. A tensor with gaps or overlaps becomes contiguous.
void describe_memory(Parameter& parameter);

inline int64_t element_bytes(at::ScalarType type) {
  return static_cast<int64_t>(c10::elementSize(type));
}

struct Dtypes {
  at::ScalarType param, master, reduce, grad;
  bool split;  // the master is split
  bool trainable;
  Wire gather_wire, reduce_wire;  // how it travels
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
  at::ScalarType grad_dtype() const { return handed_out() ? dtypes_.master : dtypes_.grad; }
  at::TensorOptions master_options() const;  // on the device where the update runs
  // How a gather sends it: not PLAIN means that every rank computes with what is received.
  Wire gather_wire() const { return dtypes_.gather_wire; }
  Wire reduce_wire() const { return dtypes_.reduce_wire; }
  bool coded() const { return gather_wire() != Wire::PLAIN || reduce_wire() != Wire::PLAIN; }
  int64_t gather_message_bytes() const;  // what a rank sends to each other in a gather
  int64_t reduce_message_bytes() const;  // and in a reduction over "shard"
  at::Device device() const { return device_; }
  int64_t full_bytes() const;
  bool trainable() const;  // some parameter requires a gradient

  at::Tensor shard;        // [shard_numel] param_dtype; undefined on the meta device
  at::Tensor master;       // [shard_numel] master_dtype; may be `shard`; undefined where split
  at::Tensor rest;         // [shard_numel] int16, if the master is split
  at::Tensor window;       // [full_numel] shared by the ranks of a host; `shard` is a part of it
  at::Tensor grad;         // [shard_numel] grad_dtype; undefined: none since zero_grad
  at::Tensor grad_memory;  // the memory of `grad`; on the CPU kept from step to step
  // reshard_after_forward = n: this rank's 1/n while the unit is sharded, as it travels
  at::Tensor secondary;
  bool secondary_valid = false;
  void shard_changed();  // its copies elsewhere are out of date

  // --- the master ---
  void allocate_master();  // zeros, or the shard itself
  // The master for reading; a copy if it is split.
  at::Tensor read_master() const;
  // The master for writing. settle_master() makes the writes effective; calls before it return the
  // same tensor.
  at::Tensor edit_master();
  void settle_master();  // the shard follows the master
  void join_master();    // stores a split master as one tensor from now on

  // --- masters that others write (Sharded::parameters) ---
  // Per parameter: this rank's part of the master as a leaf of autograd; undefined if nobody asked
  // for it. Leaves carry the key, so the engine sees every operator that writes to one.
  std::vector<at::Tensor> leaves;
  bool handed_out() const { return !leaves.empty(); }
  void hand_out();        // makes the leaves of the parameters that are trained now
  void own_the_master();  // in memory that no other rank reads
  void show_gradients();  // leaves get their parts of `grad`

  // --- the module's handles ---
  void bind(size_t parameter);  // the handle becomes a view of the storage
  void rename(const at::Tensor& handle, std::vector<std::string> names);
  void replace_linear(size_t parameter, LinearFunction function);
  void point_at(const at::Tensor& full);  // [full_numel] param_dtype; handles read it from now on
  void take_away();
  void set_keys(bool on);       // those of replaced linears are always on
  bool viewed() const;          // a view of a parameter exists outside of the engine
  std::string moved() const;    // name of a parameter whose handle left the storage; "" for none
  std::string written() const;  // name of a parameter written since remember_versions; "" for none
  void remember_versions();
  bool was_written(size_t parameter) const;
  size_t index_of(const at::Tensor& handle) const;  // parameters().size() if it isn't one of them
  void bump_versions();
  std::atomic<int64_t> saved{0};  // number of tensors of this storage that autograd has saved

  // --- parts ---
  at::Tensor view_of(size_t parameter, const at::Tensor& full) const;  // in the module's shape
  // This rank's part of a parameter in `shard` (master, grad, …), 1-d, in memory order.
  at::Tensor part_of(size_t parameter, const at::Tensor& shard) const;
  // Copies this rank's part of a full parameter into `shard`.
  void keep_part(size_t parameter, const at::Tensor& whole, const at::Tensor& shard) const;

  // --- gradients (gradients.cpp) ---
  GradientSlot* slot = nullptr;
  size_t turn = 0;            // its place among the reductions of this backward
  std::vector<char> coming;   // per parameter: this backward brings a gradient
  std::vector<char> arrived;  // per parameter, in this backward
  std::vector<char> filled;   // per parameter: the slot has its gradient
  std::vector<int> expected;  // per parameter: number of gradients our own layers will write
  int64_t expectations = 0;   // generation of `expected`; a layer ignores counts of an older one
  void expect_none();
  std::vector<char> hooked;  // per parameter: a hook of the user's must see its gradient
  bool alone() const;        // no other rank contributes to its gradients
  at::ScalarType slot_dtype() const { return alone() ? grad_dtype() : dtypes_.reduce; }
  // The slot of a flat that is alone: the memory of `grad` itself.
  GradientSlot* own_slot();
  bool in_own_slot() const { return slot && slot == own_slot_.get(); }
  void release_gradient_memory();
  // Zeroes the slot's padding; the places of the parameters stay uninitialised.
  void take(GradientSlot* taken);
  void move(GradientSlot* to);                              // with what has arrived
  const at::Tensor& gradient_view(size_t parameter) const;  // into the slot
  const at::Tensor& slot_view() const;                      // [full_numel] slot_dtype
  // The handles' .grad while the gradient is sharded. Reading it throws an Error with the call to
  // use instead.
  at::Tensor stand_in(size_t parameter) const;
  bool is_stand_in(const at::Tensor& gradient) const;

  // --- offload (offload.cpp) ---
  std::shared_ptr<HostState> host;  // null: everything is on the device
  void await_update() const;        // waits for the update thread
  // Waits until neither the thread nor the device uses the shard, master and states in host memory.
  void settle() const;
  void await_gradient() const;  // waits until the gradient in host memory is complete and unused

 private:
  Unit& unit_;
  std::vector<Parameter> parameters_;
  Layout layout_;
  int rank_;
  Dtypes dtypes_;
  at::Device device_;
  at::Tensor edited_;  // a split master while it is written
  uint32_t edited_version_ = 0;
  std::unique_ptr<GradientSlot> own_slot_;
  StorageTag tag_, gradient_tag_, master_tag_;
  c10::intrusive_ptr<c10::StorageImpl> storage_, gradient_storage_;
  c10::intrusive_ptr<c10::StorageImpl> master_storage_;  // the leaves'; null: none
  std::vector<uint32_t> versions_;

  // Views into a slot, created when it is first taken: the same few slots are used over and over.
  struct SlotViews {
    at::Tensor full;
    std::vector<at::Tensor> parameters, gaps;
  };
  std::vector<std::pair<int64_t, int64_t>> gaps() const;  // padding of the full buffer: from, count
  std::map<GradientSlot*, SlotViews> slot_views_;
  const SlotViews* views_ = nullptr;  // of `slot`
};

// The owner of a parameter, or of a view of one; null if it isn't a sharded one.
Flat* flat_of(const at::Tensor& tensor);

}  // namespace fsdp::shard
