// Region: recording operators on the tape.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include "memory/region.h"
#include "shard/deferred_tape.h"
#include "shard/saved_activations.h"
#include "shard/tensor_access.h"

namespace fsdp::memory {

bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOther(
      {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::ZeroTensor});
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->layout() == at::kStrided && impl->has_storage() &&
         !impl->key_set().has_any(kOther) && !tensor.is_quantized() && !tensor.is_nested();
}

namespace {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

// Memory whose owner may free or refill it (from_blob).
bool is_borrowed(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || !is_plain(tensor) || shard::tag_of(tensor)) return false;
  const c10::DataPtr& data = storage_of(tensor)->_mutable_data_ptr_no_checks();
  return data.get() && !data.get_context();
}

shard::KeptTensor kept(const at::Tensor& tensor) {
  if (!is_borrowed(tensor)) return shard::KeptTensor(tensor);
  shard::Unseen unseen;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::DispatchKeySet(shard::deferred::kRecordKey));
  return shard::KeptTensor(at::clone(tensor));
}

}  // namespace

// Reserves enough for a transformer block: growing step by step costs more than recording.
Region::Region(std::string name, bool selective) : name_(std::move(name)), selective_(selective) {
  made_.reserve(32);
  externals_.reserve(32);
  dims_.reserve(256);
  values_.reserve(128);
  operands_.reserve(64);
  outputs_.reserve(32);
  steps_.reserve(32);
}

int32_t Region::made_of(const at::Tensor& tensor) const {
  if (!is_plain(tensor)) return -1;
  int32_t number = table_.find(storage_of(tensor));
  return number >= 0 && !made_[number].outside ? number : -1;
}

Geometry Region::geometry_of(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  Geometry geometry;
  geometry.keys = impl->key_set() - c10::DispatchKeySet({shard::kKey, c10::DispatchKey::Conjugate,
                                                         c10::DispatchKey::Negative});
  geometry.type = impl->dtype();
  geometry.offset = impl->storage_offset();
  geometry.first = static_cast<uint32_t>(dims_.size());
  geometry.dimensions = static_cast<uint32_t>(impl->dim());
  geometry.conjugated = tensor.is_conj();
  geometry.negated = tensor.is_neg();
  geometry.number = impl->is_wrapped_number();
  at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  dims_.insert(dims_.end(), sizes.begin(), sizes.end());
  dims_.insert(dims_.end(), strides.begin(), strides.end());
  return geometry;
}

void Region::keep(Made& made, const Memory& memory) {
  made.memory = memory;
  if (made.counted || !shard::saved_activations::counting()) return;
  made.counted = true;
  shard::saved_activations::add(memory.get(), made.bytes);
}

void Region::forget(Made& made) {
  if (made.counted) shard::saved_activations::remove(made.memory.get());
  made.counted = false;
  made.memory.reset();
}

// --- arguments ---

void Region::add_operand(size_t argument, Operand::List list, const at::Tensor& tensor,
                         OperatorFacts::Effect effect) {
  Operand operand;
  operand.argument = static_cast<uint16_t>(argument);
  operand.list = list;
  operand.written = effect != OperatorFacts::kReads;
  if (!tensor.defined()) return operands_.push_back(operand);
  int32_t number = made_of(tensor);
  if (number >= 0 && made_[number].raw) {
    if (effect == OperatorFacts::kOverwrites) {
      made_[number].raw = false;
    } else {  // filled through its data pointer
      made_[number].outside = true;
      number = -1;
    }
  }
  if (number < 0) {
    writes_outside_ |= operand.written && tensor.has_storage();
    operand.external = static_cast<int32_t>(externals_.size());
    externals_.emplace_back(kept(tensor));
    return operands_.push_back(operand);
  }
  Made& made = made_[number];
  if (operand.written) {
    writes_made_ = true;
    if (made.read) {
      made.overwritten = true;
      forget(made);
    }
  }
  operand.made = number;
  operand.geometry = geometry_of(tensor);
  operands_.push_back(operand);
}

Region::Fit Region::begin(const OperatorFacts& facts, const torch::jit::Stack& stack) {
  Lock lock(mutex_);
  size_t count = facts.arguments.size(), first = stack.size() - count;
  pending_ = Step{&facts, static_cast<uint32_t>(values_.size()),
                  static_cast<uint32_t>(operands_.size()), static_cast<uint32_t>(outputs_.size())};
  pending_.grad_mode = at::GradMode::is_enabled();
  dims_before_ = dims_.size();
  writes_made_ = writes_outside_ = false;
  bool trains = facts.batch_norm && stack[first + 5].isBool() && stack[first + 5].toBool();
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = stack[first + i];
    OperatorFacts::Effect effect = facts.arguments[i];
    bool statistics = trains && (i == 3 || i == 4);  // a replay would update them twice
    if (value.isTensor()) {
      bool defined = value.toTensor().defined();
      values_.push_back(defined ? c10::IValue() : value);
      if (defined && !statistics) add_operand(i, Operand::kNo, value.toTensor(), effect);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list = value.toTensorList();
      values_.push_back(list.empty() ? value : c10::IValue());
      for (size_t e = 0; e < list.size(); ++e)
        add_operand(i, Operand::kTensors, list.get(e), effect);
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorVector();
      values_.push_back(list.empty() ? value : c10::IValue());
      for (const std::optional<at::Tensor>& tensor : list)
        add_operand(i, Operand::kOptionals, tensor.value_or(at::Tensor()), effect);
    } else {
      values_.push_back(value);
    }
  }
  pending_.operand_count = static_cast<uint32_t>(operands_.size()) - pending_.operands;
  if (writes_outside_) return writes_made_ ? Fit::kMixed : Fit::kOutside;
  if (draws(facts, stack)) remember_random();
  return Fit::kRecorded;
}

void Region::remember_random() {
  at::Generator generator;
  for (size_t i = pending_.values; i < values_.size(); ++i)
    if (values_[i].isGenerator()) generator = values_[i].toGenerator();
  if (!generator.defined()) {
    std::optional<at::Device> device;
    for (size_t i = pending_.operands; i < operands_.size() && !device; ++i) {
      const Operand& operand = operands_[i];
      if (operand.made >= 0) device = made_[operand.made].device;
      if (operand.external >= 0) device = externals_[operand.external].kept.data().device();
    }
    if (!device) return;
    generator = at::globalContext().defaultGenerator(*device);
  }
  at::Tensor state;
  {
    std::lock_guard lock(generator.mutex());
    state = generator.get_state();
  }
  pending_.random = static_cast<int32_t>(random_.size());
  random_.push_back({std::move(generator), std::move(state)});
}

void Region::drop() {
  Lock lock(mutex_);
  // The externals of this step are the last ones.
  for (size_t i = pending_.operands; i < operands_.size(); ++i)
    if (operands_[i].external >= 0) externals_.pop_back();
  values_.resize(pending_.values);
  operands_.resize(pending_.operands);
  outputs_.resize(pending_.outputs);
  dims_.resize(dims_before_);
  if (pending_.random >= 0) random_.pop_back();
}

// --- results ---

void Region::add_output(const at::Tensor& tensor, uint32_t position) {
  if (!tensor.defined() || !is_plain(tensor)) return;
  c10::StorageImpl* storage = storage_of(tensor);
  if (table_.find(storage) >= 0) return;  // an argument, or a view of one
  for (size_t i = pending_.operands; i < operands_.size(); ++i) {
    if (operands_[i].external < 0) continue;
    const at::Tensor& other = externals_[operands_[i].external].kept.data();
    if (other.has_storage() && storage_of(other) == storage) return;
  }
  auto number = static_cast<int32_t>(made_.size());
  Memory memory = Memory::reclaim_copy(storage);
  Made made{.weak = c10::weak_intrusive_ptr<c10::StorageImpl>(memory),
            .bytes = storage->nbytes(),
            .device = storage->device()};
  if (!tensor.is_inference()) made.counter = tensor.unsafeGetTensorImpl()->version_counter();
  made.raw = made.allocated = pending_.facts->empty;
  made_.push_back(std::move(made));
  table_.add(storage, number);
  if (selective_ && pending_.facts->expensive) keep(made_.back(), memory);
  if (!pending_.facts->empty) outputs_.push_back({position, number});
}

// Whether this is a norm of the sum of two external tensors, as at the start of a transformer
// block.
bool Region::is_sum_of_inputs() const {
  if (!pending_.facts->adds || operands_.size() < pending_.operands + 2) return false;
  const Operand &x = operands_[pending_.operands], &residual = operands_[pending_.operands + 1];
  return residual.argument == 1 && x.external >= 0 && residual.external >= 0;
}

// Keeps the sum instead of the two tensors; the operator gives the same results for it.
void Region::keep_sum(const at::Tensor& sum) {
  auto residual = operands_.begin() + pending_.operands + 1;
  externals_[operands_[pending_.operands].external] = External(kept(sum));
  externals_[residual->external].release();
  operands_.erase(residual);
  --pending_.operand_count;
}

void Region::finish(const torch::jit::Stack& stack) {
  bool recorded;
  {
    Lock lock(mutex_);
    uint32_t position = 0;
    size_t count = pending_.facts->op.schema().returns().size();
    size_t first = stack.size() - count;
    if (is_sum_of_inputs()) keep_sum(stack[first + 1].toTensor());
    for (size_t i = first; i < stack.size(); ++i) {  // but for the sum, which is now an argument
      if (stack[i].isTensor()) add_output(stack[i].toTensor(), position++);
      if (stack[i].isTensorList())
        for (const at::Tensor& tensor : stack[i].toTensorVector()) add_output(tensor, position++);
    }
    pending_.output_count = static_cast<uint32_t>(outputs_.size()) - pending_.outputs;
    recorded = writes_made_ || pending_.output_count > 0;
    if (recorded) {
      steps_.push_back(pending_);
      for (size_t i = pending_.operands; i < operands_.size(); ++i)
        if (operands_[i].made >= 0 && !operands_[i].written) made_[operands_[i].made].read = true;
      // An expensive operator with an out argument.
      if (selective_ && pending_.facts->expensive && writes_made_)
        for (size_t i = pending_.operands; i < operands_.size(); ++i) {
          if (!operands_[i].written || operands_[i].made < 0) continue;
          Made& made = made_[operands_[i].made];
          Memory memory = made.weak.lock();
          if (memory && !made.memory && !made.overwritten) keep(made, memory);
        }
    }
  }
  if (!recorded) drop();
}

// --- what autograd saves ---

std::unique_ptr<shard::SavedPlace> Region::place(const at::Tensor& tensor) {
  Lock lock(mutex_);
  int32_t number = made_of(tensor);
  if (number < 0) return nullptr;
  if (made_[number].raw) {
    made_[number].outside = true;
    return nullptr;
  }
  ++made_[number].wanted;
  ++places_made_;
  ++places_alive_;
  return std::make_unique<RecomputedPlace>(shared_from_this(), number, geometry_of(tensor), tensor);
}

bool Region::abandoned() {
  Lock lock(mutex_);
  return places_made_ > 0 && places_alive_ == 0;
}

size_t Region::steps() {
  Lock lock(mutex_);
  return steps_.size();
}

void Region::close(const Around& around) {
  Lock lock(mutex_);
  if (closed_) return;
  closed_ = true;
  table_.clear();
  for (Made& made : made_)
    if (made.counter.enabled()) made.version = made.counter.current_version();
  prune();
  keep_around(around);
}

Region::External::External(shard::KeptTensor tensor)
    : kept(std::move(tensor)), weak(c10::intrusive_ptr<c10::StorageImpl>()) {}

void Region::External::release() {
  kept.release();
  place.reset();
}

void Region::keep_around(const Around& around) {
  for (External& external : externals_) {
    const at::Tensor& data = external.kept.data();
    if (!data.defined() || external.kept.unit() || !is_plain(data) || !external.kept.unchanged())
      continue;
    try {
      external.place = around(data);
    } catch (const std::exception&) {  // no host memory; a scope may be ending by an exception
      return;
    }
    if (!external.place) continue;
    external.weak = WeakMemory(Memory::reclaim_copy(storage_of(data)));
    external.geometry = geometry_of(data);
    external.kept.release();
  }
}

}  // namespace fsdp::memory
