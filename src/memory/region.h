// Region: a stretch of a forward pass whose results are recomputed in backward instead of kept.
//
// While it is open it records the thread's operators below autograd, as the backends run them. A
// tensor on the tape is a storage and a geometry, so views cost nothing and aliases need no special
// care: two tensors either share memory or they don't. A storage is either *made* by a step of the
// tape, and the region keeps only a weak reference to it, or it is external (an input, a parameter,
// a constant) and kept.
//
// Autograd gets a place on the tape for each tensor of a made storage that it saves. The first
// place that is asked for its tensor replays the steps that all places need, in recorded order;
// storages that are still alive aren't made again. After that the tape is freed and the storages
// live as long as their places.
//
// What a needed step reads from outside is asked for around the region when it closes: a tensor
// that a region around it has made becomes a place there, and one that a scope moves to host memory
// goes there. So a region inside of another keeps nothing that the outer one can make again.
//
// Writes: a write to a made storage is a step like any other. A write to external memory isn't
// repeated; if steps have read that memory, it is copied before the write. With `selective`,
// results of expensive operators are kept, and replay starts from them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "memory/operator_facts.h"
#include "memory/storage_table.h"
#include "shard/kept_tensor.h"
#include "shard/tape_hook.h"
#include "shard/tensor_access.h"

namespace fsdp::memory {

using Memory = c10::intrusive_ptr<c10::StorageImpl>;
using WeakMemory = c10::weak_intrusive_ptr<c10::StorageImpl>;

// All of a storage's memory as a tensor of bytes.
inline at::Tensor bytes_of(const Memory& memory) {
  return shard::tensor_over(memory, at::kByte, {static_cast<int64_t>(memory->nbytes())}, {1}, 0);
}

struct Geometry {  // turns a storage into a tensor
  c10::DispatchKeySet keys;
  caffe2::TypeMeta type;
  int64_t offset = 0;  // in elements
  uint32_t first = 0;  // in Region's dims: sizes, then strides
  uint32_t dimensions = 0;
  bool conjugated = false, negated = false;
  bool number = false;  // a C++ scalar, which counts less in type promotion
};

// Whether a tensor is nothing but a storage and a geometry.
bool is_plain(const at::Tensor& tensor);

class Region : public std::enable_shared_from_this<Region> {
 public:
  Region(std::string name, bool selective);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const std::string& name() const { return name_; }

  // --- recording (record.cpp): by one thread, until close() ---
  // Whether an operator can be recorded.
  enum class Fit {
    kRecorded,
    kOutside,  // writes external memory: run it unrecorded, after before_write()
    kMixed,    // writes both kinds of memory: can't be recorded
  };
  // Adds the operator's arguments to the tape. After kRecorded, call finish() or drop().
  Fit begin(const OperatorFacts& facts, const torch::jit::Stack& stack);
  void finish(const torch::jit::Stack& stack);
  void drop();  // undoes begin(): the operator failed or isn't recorded
  // Null: autograd must keep the tensor.
  std::unique_ptr<shard::SavedPlace> place(const at::Tensor& tensor);
  bool abandoned();  // autograd has forgotten everything that it saved
  size_t steps();    // recorded so far
  // Keeps what its steps read from outside as `around` says (null: as it is).
  using Around = std::function<std::unique_ptr<shard::SavedPlace>(const at::Tensor&)>;
  void close(const Around& around);

  // --- afterwards (replay.cpp) ---
  // Call before a write to `storage`. Returns whether a copy had to be made.
  bool before_write(c10::StorageImpl* storage);
  // Makes everything that autograd will ask for now, and frees the tape.
  void settle();

 private:
  friend class RecomputedPlace;

  struct Made {
    WeakMemory weak;
    Memory memory;  // kept, made again, or found alive
    size_t bytes;
    at::Device device;
    c10::VariableVersion counter;  // of the first tensor in it …
    uint32_t version = 0;          // … when the region was closed
    int32_t wanted = 0;            // number of places in it
    int32_t last_use = -1;         // last step that uses it in replay
    bool raw = false;              // allocated but not written yet
    bool allocated = false;        // was raw when recorded
    bool outside = false;          // treated as external: no step makes it
    bool read = false;             // by a step
    bool overwritten = false;      // after a step has read it, or by others
    bool needed = false;           // must be made again
    bool source = false;           // read by a needed step
    bool counted = false;          // as an activation
  };
  struct Operand {
    enum List : uint8_t { kNo, kTensors, kOptionals };
    int32_t made = -1, external = -1;  // both -1: undefined, in a list
    uint16_t argument = 0;
    List list = kNo;
    bool written = false;
    Geometry geometry;  // of a made storage
  };
  struct External {  // what a step reads from outside
    shard::KeptTensor kept;
    // Instead of kept, if the region is closed and something around it has the tensor.
    std::unique_ptr<shard::SavedPlace> place;
    WeakMemory weak;    // of the place
    Geometry geometry;  // likewise

    explicit External(shard::KeptTensor tensor);
    void release();
  };
  struct Output {
    uint32_t position;  // among the tensors the operator returns
    int32_t made;
  };
  struct Random {  // a generator's state before the step
    at::Generator generator;
    at::Tensor state;
  };
  struct Step {
    const OperatorFacts* facts;
    uint32_t values, operands, outputs;  // index of the first of each
    uint32_t operand_count = 0, output_count = 0;
    int32_t random = -1;
    bool grad_mode = false;
    bool needed = true;
  };

  // record.cpp
  void add_operand(size_t argument, Operand::List list, const at::Tensor& tensor,
                   OperatorFacts::Effect effect) FSDP_REQUIRES(mutex_);
  void add_output(const at::Tensor& tensor, uint32_t position) FSDP_REQUIRES(mutex_);
  void remember_random() FSDP_REQUIRES(mutex_);
  bool is_sum_of_inputs() const FSDP_REQUIRES(mutex_);
  void keep_sum(const at::Tensor& sum) FSDP_REQUIRES(mutex_);
  int32_t made_of(const at::Tensor& tensor) const FSDP_REQUIRES(mutex_);
  Geometry geometry_of(const at::Tensor& tensor) FSDP_REQUIRES(mutex_);
  void keep(Made& made, const Memory& memory) FSDP_REQUIRES(mutex_);
  void forget(Made& made) FSDP_REQUIRES(mutex_);
  void prune() FSDP_REQUIRES(mutex_);
  void keep_around(const Around& around) FSDP_REQUIRES(mutex_);
  void clear_tape() FSDP_REQUIRES(mutex_);

  // replay.cpp
  at::Tensor get(const class RecomputedPlace& place);
  void release(int32_t made);
  bool alive(Made& made) FSDP_REQUIRES(mutex_);
  void mark(bool with_living) FSDP_REQUIRES(mutex_);
  void replay() FSDP_REQUIRES(mutex_);
  void run(const Step& step, size_t number) FSDP_REQUIRES(mutex_);
  torch::jit::Stack arguments_of(const Step& step) FSDP_REQUIRES(mutex_);
  void keep_results(const Step& step, const torch::jit::Stack& stack) FSDP_REQUIRES(mutex_);
  at::Tensor tensor_for(const Operand& operand, const Step& step) FSDP_REQUIRES(mutex_);
  at::Tensor over(const Memory& memory, const Geometry& geometry) const FSDP_REQUIRES(mutex_);

  const std::string name_;
  const bool selective_;
  Mutex mutex_;  // places are read and destroyed on other threads
  StorageTable table_ FSDP_GUARDED_BY(mutex_);
  std::vector<Made> made_ FSDP_GUARDED_BY(mutex_);
  std::vector<External> externals_ FSDP_GUARDED_BY(mutex_);
  std::vector<int64_t> dims_ FSDP_GUARDED_BY(mutex_);
  torch::jit::Stack values_ FSDP_GUARDED_BY(mutex_);  // arguments, without tensors
  std::vector<Operand> operands_ FSDP_GUARDED_BY(mutex_);
  std::vector<Output> outputs_ FSDP_GUARDED_BY(mutex_);
  std::vector<Random> random_ FSDP_GUARDED_BY(mutex_);
  std::vector<Step> steps_ FSDP_GUARDED_BY(mutex_);
  Step pending_ FSDP_GUARDED_BY(mutex_) = {};
  size_t dims_before_ FSDP_GUARDED_BY(mutex_) = 0;
  // Of the last begin()'s operator.
  bool writes_made_ FSDP_GUARDED_BY(mutex_) = false;
  bool writes_outside_ FSDP_GUARDED_BY(mutex_) = false;
  int64_t places_made_ FSDP_GUARDED_BY(mutex_) = 0;
  int64_t places_alive_ FSDP_GUARDED_BY(mutex_) = 0;
  bool closed_ FSDP_GUARDED_BY(mutex_) = false;
};

// A saved tensor of autograd's, as a place on the tape.
class RecomputedPlace final : public shard::SavedPlace {
 public:
  RecomputedPlace(std::shared_ptr<Region> region, int32_t made, const Geometry& geometry,
                  const at::Tensor& tensor);
  ~RecomputedPlace() override;
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
