// Region: a stretch of a forward pass whose results are computed again in backward instead of being
// kept.
//
// While it is open it records the operators of its thread below autograd, where they are what the
// backends run. Tensors on the tape are a storage and a geometry, so views cost nothing and aliases
// need no care: two tensors are the same memory or they are not. A storage is either *made* by a
// step of the tape, of which the region keeps only a weak reference, or it comes from outside (an
// input, a parameter, a constant) and is kept.
//
// Autograd is given a place on the tape for each tensor that it saves of a made storage. The first
// place that is asked for its tensor runs the steps that are needed for all of them, in the order
// of recording; whatever is still alive is not made again. After that the tape is gone and the
// storages live as long as their places.
//
// Writes: one to a made storage is a step like any other. One to memory from outside has happened
// and is not repeated; what steps have read of that memory before is copied first. With
// `selective`, results of expensive operators are kept: replay begins at them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory/operator_facts.h"
#include "memory/storage_table.h"
#include "shard/kept_tensor.h"
#include "shard/tape_hook.h"

namespace fsdp::memory {

using Memory = c10::intrusive_ptr<c10::StorageImpl>;

struct Geometry {  // all that makes a tensor of a storage
  c10::DispatchKeySet keys;
  caffe2::TypeMeta type;
  int64_t offset = 0;  // in elements
  uint32_t first = 0;  // in Region's dims: sizes, then strides
  uint32_t dimensions = 0;
  bool conjugated = false, negated = false;
  bool number = false;  // a C++ scalar, which counts less in type promotion
};

// A storage and a geometry, and no more.
bool is_plain(const at::Tensor& tensor);

class Region : public std::enable_shared_from_this<Region> {
 public:
  Region(std::string name, bool selective);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const std::string& name() const { return name_; }
  size_t steps() const { return steps_.size(); }

  // --- recording (record.cpp): by one thread, until close() ---
  // What an operator will do to the tape.
  enum class Fit {
    kRecorded,
    kOutside,  // writes memory from outside: to be run, not recorded, after before_write()
    kMixed,    // writes both: cannot be recorded
  };
  // Takes the operator's arguments onto the tape. kRecorded: finish() or drop() must follow.
  Fit begin(const OperatorFacts& facts, const torch::jit::Stack& stack);
  void finish(const torch::jit::Stack& stack);
  void drop();  // the operator failed, or was not recorded
  // Null: must be kept.
  std::unique_ptr<shard::SavedPlace> place(const at::Tensor& tensor);
  bool abandoned();  // autograd has forgotten everything that it saved
  void close();

  // --- afterwards (replay.cpp) ---
  // Somebody is about to write this storage. Whether a copy had to be made.
  bool before_write(c10::StorageImpl* storage);
  // Makes now what autograd will ask for, and forgets the tape.
  void settle();

 private:
  friend class Place;

  struct Made {
    c10::weak_intrusive_ptr<c10::StorageImpl> weak;
    Memory memory;  // kept, made again, or found alive
    size_t bytes;
    at::Device device;
    c10::VariableVersion counter;  // of the first tensor in it …
    uint32_t version = 0;          // … when the region was closed
    int32_t wanted = 0;            // places in it
    int32_t last_use = -1;         // step, in replay
    bool raw = false;              // memory that nobody has written yet
    bool allocated = false;        // began so
    bool outside = false;          // kept after all: no step makes it
    bool read = false;             // by a step
    bool overwritten = false;  // after a step had read it, or by others: not what steps have read
    bool needed = false;       // must be made again
    bool source = false;       // is read by a step that is needed
    bool counted = false;      // as an activation
  };
  struct Operand {
    enum List : uint8_t { kNo, kTensors, kOptionals };
    int32_t made = -1, external = -1;  // both -1: undefined, in a list
    uint16_t argument = 0;
    List list = kNo;
    bool written = false;
    Geometry geometry;  // of a made one
  };
  struct Output {
    uint32_t position;  // among the tensors that the operator returns
    int32_t made;
  };
  struct Random {  // a generator's state before the step
    at::Generator generator;
    at::Tensor state;
  };
  struct Step {
    const OperatorFacts* facts;
    uint32_t values, operands, outputs;  // first of each
    uint32_t operand_count = 0, output_count = 0;
    int32_t random = -1;
    bool grad_mode = false;
    bool needed = true;
  };

  // record.cpp
  void add_operand(size_t argument, Operand::List list, const at::Tensor& tensor,
                   OperatorFacts::Effect effect);
  void add_output(const at::Tensor& tensor, uint32_t position);
  void remember_random();
  bool is_sum_of_inputs() const;
  void keep_sum(const at::Tensor& sum);
  int32_t made_of(const at::Tensor& tensor) const;
  Geometry geometry_of(const at::Tensor& tensor);
  void keep(Made& made, const Memory& memory);
  void forget(Made& made);
  void prune();
  void clear_tape();

  // replay.cpp
  at::Tensor get(const class Place& place);
  void release(int32_t made);
  bool alive(Made& made);
  void mark(bool with_living);
  void replay();
  void run(const Step& step, size_t number);
  at::Tensor tensor_for(const Operand& operand, const Step& step);
  at::Tensor over(const Memory& memory, const Geometry& geometry) const;

  const std::string name_;
  const bool selective_;
  std::mutex mutex_;  // places are asked for and die on other threads
  StorageTable table_;
  std::vector<Made> made_;
  std::vector<shard::KeptTensor> externals_;
  std::vector<int64_t> dims_;
  torch::jit::Stack values_;  // arguments; tensors are left out
  std::vector<Operand> operands_;
  std::vector<Output> outputs_;
  std::vector<Random> random_;
  std::vector<Step> steps_;
  Step pending_{};
  size_t dims_before_ = 0;
  bool writes_made_ = false, writes_outside_ = false;  // the operator of the last begin()
  int64_t places_made_ = 0, places_alive_ = 0;
  bool closed_ = false;
};

// A tensor that autograd saved, as a place on the tape.
class Place final : public shard::SavedPlace {
 public:
  Place(std::shared_ptr<Region> region, int32_t made, const Geometry& geometry,
        const at::Tensor& tensor);
  ~Place() override;
  at::Tensor get() override;

 private:
  friend class Region;
  std::shared_ptr<Region> region_;
  int32_t made_;
  Geometry geometry_;
  c10::VariableVersion counter_;
  uint32_t version_ = 0;
};

}  // namespace fsdp::memory
