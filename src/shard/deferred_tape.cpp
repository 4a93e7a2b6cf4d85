#include "shard/deferred_tape.h"

#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "base/format.h"
#include "fsdp/error.h"
#include "shard/deferred_draw.h"
#include "shard/runtime.h"

namespace fsdp::shard::deferred {
namespace {

constexpr const char* kRawReadMessage =
    "fsdp: this tensor was made under deferred_init and has no memory yet.\n"
    "  HINT: run any operator on it, or shard it, to give it memory. Inside deferred_init, fill "
    "tensors with operators, torch::tensor(...) or torch::from_blob(...).clone(), not through "
    "data_ptr() or accessors.";

uint64_t next_number() {
  return ++runtime().tape.last_number;
}

// A DataPtr by which tag_of() finds `tag`.
c10::DataPtr tagged_pointer(StorageTag* tag, at::Device device) {
  return make_storage(0, device, tag, {})->set_data_ptr(c10::DataPtr(nullptr, device));
}

at::Tensor state_of(at::Generator& generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// While alive, the generators' states and the default dtype are as recorded: an operator depends on
// them as well as on its arguments. Both belong to the process, not to the thread.
class Then {
 public:
  explicit Then(const Record& record) : default_dtype_(c10::get_default_dtype()) {
    for (RandomState random : record.random) {
      now_.push_back({random.generator, state_of(random.generator)});
      set_state(random.generator, random.state);
    }
    if (record.default_dtype != default_dtype_) c10::set_default_dtype(record.default_dtype);
  }
  ~Then() {
    for (RandomState& random : now_) set_state(random.generator, random.state);
    if (c10::get_default_dtype() != default_dtype_) c10::set_default_dtype(default_dtype_);
  }
  Then(const Then&) = delete;
  Then& operator=(const Then&) = delete;

 private:
  std::vector<RandomState> now_;
  caffe2::TypeMeta default_dtype_;
};

std::vector<std::shared_ptr<const Record>> needed_for(const std::shared_ptr<const Record>& last) {
  std::vector<std::shared_ptr<const Record>> records;
  std::unordered_set<const Record*> seen;
  auto visit = [&](const std::shared_ptr<const Record>& record) {
    if (record && seen.insert(record.get()).second) records.push_back(record);
  };
  visit(last);
  for (size_t i = 0; i < records.size(); ++i) {
    std::shared_ptr<const Record> record = records[i];  // visit() moves the vector
    for (const auto& need : record->needs) visit(need);
  }
  std::ranges::sort(records, {}, [](const auto& record) { return record->sequence; });
  return records;
}

class Replay {
 public:
  explicit Replay(const Storage& target) : target_(target), records_(needed_for(target.last)) {
    for (const auto& record : records_) {
      for (const Operand& operand : record->operands) last_use_[operand.storage] = record->sequence;
      for (const Output& output : record->outputs) last_use_[output.storage] = record->sequence;
    }
    last_use_.erase(target.id);
  }

  Memory run() {
    for (const auto& record : records_) {
      run(*record);
      for (const Operand& operand : record->operands) drop_if_done(operand.storage, *record);
      for (const Output& output : record->outputs) drop_if_done(output.storage, *record);
    }
    return buffer(target_.id, target_.nbytes(), target_.device());
  }

 private:
  void run(const Record& record) {
    if (record.draw) return record.draw->fill(tensor_for(record, record.operands[0]).view(-1), 0);
    std::vector<at::Tensor> given, returned;
    torch::jit::Stack stack;
    for (const c10::IValue& value : record.arguments)
      stack.push_back(map_tensors(value, [&](const at::Tensor&) {
        return given.emplace_back(tensor_for(record, record.operands[given.size()]));
      }));
    {
      Then then(record);
      record.op.callBoxed(&stack);
    }
    for (const c10::IValue& value : stack)
      map_tensors(value, [&](const at::Tensor& tensor) { return returned.emplace_back(tensor); });
    for (const Output& output : record.outputs)
      buffers_[output.storage] = taken(returned.at(output.position), output, given);
  }

  at::Tensor tensor_for(const Record& record, const Operand& operand) {
    if (operand.storage)
      return view_of(buffer(operand.storage, operand.bytes, operand.device), operand.geometry);
    const at::Tensor& real = operand.real;
    if (real.defined() && !real.is_inference() && real._version() != operand.version)
      throw Error(formatted("deferred_init: a tensor that {} read while the module was built has "
                            "been changed in place since.",
                            record.op.schema().name()),
                  "don't change such tensors until the module is sharded, or clone() them in the "
                  "constructor.");
    return real;
  }

  // An Output creates a storage's buffer. If there is none yet, the storage is overwritten as a
  // whole or only its shape is read, so its contents don't matter.
  Memory buffer(uint64_t storage, size_t bytes, at::Device device) {
    Memory& memory = buffers_[storage];
    if (!memory) memory = scratch(bytes, device);
    if (memory->nbytes() < bytes) memory = grown(memory, bytes);  // by resize_
    return memory;
  }

  static Memory grown(const Memory& memory, size_t bytes) {
    int64_t count = static_cast<int64_t>(memory->nbytes());
    Memory larger = scratch(bytes, memory->device());
    tensor_over(larger, at::kByte, {count}, {1}, 0)
        .copy_(tensor_over(memory, at::kByte, {count}, {1}, 0));
    return larger;
  }

  // Takes an operator's result without a copy, unless its layout isn't the recorded one or it is an
  // alias of an argument.
  static Memory taken(const at::Tensor& made, const Output& output,
                      const std::vector<at::Tensor>& given) {
    bool fresh = std::ranges::none_of(given, [&](const at::Tensor& tensor) {
      return tensor.defined() && tensor.is_alias_of(made);
    });
    if (fresh && same_layout(made, output.geometry)) return memory_of(made);
    Memory memory = scratch(output.bytes, made.device());
    view_of(memory, output.geometry).copy_(made);
    return memory;
  }

  void drop_if_done(uint64_t storage, const Record& record) {
    auto use = last_use_.find(storage);
    if (use != last_use_.end() && use->second == record.sequence) buffers_.erase(storage);
  }

  const Storage& target_;
  std::vector<std::shared_ptr<const Record>> records_;  // in order
  std::unordered_map<uint64_t, uint64_t> last_use_;     // of a storage, by a record's sequence
  std::unordered_map<uint64_t, Memory> buffers_;
};

}  // namespace

Geometry geometry_of(const at::Tensor& tensor) {
  return {tensor.scalar_type(),
          at::DimVector(tensor.sizes()),
          at::DimVector(tensor.strides()),
          tensor.storage_offset(),
          tensor.is_conj(),
          tensor.is_neg(),
          tensor.unsafeGetTensorImpl()->is_wrapped_number()};
}

bool same_layout(const at::Tensor& tensor, const Geometry& geometry) {
  return tensor.scalar_type() == geometry.type && tensor.sizes() == geometry.sizes &&
         tensor.strides() == geometry.strides && tensor.storage_offset() == geometry.offset;
}

at::Tensor view_of(const Memory& storage, const Geometry& geometry) {
  at::Tensor tensor =
      tensor_over(storage, geometry.type, geometry.sizes, geometry.strides, geometry.offset);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (geometry.conjugated) impl->_set_conj(true);
  if (geometry.negated) impl->_set_neg(true);
  if (geometry.number) impl->set_wrapped_number(true);
  return tensor;
}

Record::Record(const c10::OperatorHandle& op)
    : sequence(next_number()), op(op), default_dtype(c10::get_default_dtype()) {}

Record::~Record() {
  std::vector<std::shared_ptr<const Record>> dying = std::move(needs);
  while (!dying.empty()) {
    std::shared_ptr<const Record> record = std::move(dying.back());
    dying.pop_back();
    if (record.use_count() != 1) continue;
    auto& its_needs = const_cast<Record&>(*record).needs;  // this is the last reference
    std::ranges::move(its_needs, std::back_inserter(dying));
    its_needs.clear();
  }
}

Storage::Storage(size_t bytes, at::Device device)
    : StorageImpl(use_byte_size_t(), static_cast<int64_t>(bytes), c10::DataPtr(nullptr, device),
                  /*allocator=*/nullptr, /*resizable=*/false),
      id(next_number()),
      tag_{StorageTag::kDeferred, this} {
  set_data_ptr_noswap(tagged_pointer(&tag_, device));
  release_data_and_set_meta_custom_data_ptr_error_msg_(kRawReadMessage);
}

void Storage::give(Memory memory) {
  memory_ = std::move(memory);
  point_at(*this, memory_->mutable_data());
  last.reset();
  has_memory_ = true;
}

Storage* storage_of(const at::Tensor& tensor) {
  StorageTag* tag = tag_of(tensor);
  if (!tag || tag->kind != StorageTag::kDeferred) return nullptr;
  auto* storage = static_cast<Storage*>(tag->owner);
  return storage->has_memory() ? nullptr : storage;
}

Memory contents(const Storage& storage) {
  c10::InferenceMode not_inference(false);
  BackendsOnly backends_only;
  return Replay(storage).run();
}

Memory scratch(size_t bytes, at::Device device) {
  return memory_of(
      at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device)));
}

Memory memory_of(const at::Tensor& tensor) {
  return Memory::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
}

}  // namespace fsdp::shard::deferred
