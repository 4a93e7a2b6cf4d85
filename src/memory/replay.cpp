// Region: replaying the needed steps of a tape.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include "base/format.h"
#include "fsdp/error.h"
#include "memory/region.h"
#include "shard/deferred_tape.h"
#include "shard/saved_activations.h"
#include "shard/tensor_access.h"

namespace fsdp::memory {
namespace {

// Operators go straight to the backends, as recorded, but parameters are still gathered.
struct Backends {
  c10::InferenceMode no_inference{false};
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset |
                                           c10::DispatchKeySet(shard::deferred::kRecordKey)};
};

Memory allocate(size_t bytes, at::Device device) {
  at::Tensor tensor =
      at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
  return Memory::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
}

// Sets a generator back to an earlier state during its lifetime.
class Rewound {
 public:
  Rewound(at::Generator generator, const at::Tensor& state) : generator_(std::move(generator)) {
    std::lock_guard lock(generator_.mutex());
    now_ = generator_.get_state();
    generator_.set_state(state);
  }
  ~Rewound() {
    std::lock_guard lock(generator_.mutex());
    generator_.set_state(now_);
  }
  Rewound(const Rewound&) = delete;
  Rewound& operator=(const Rewound&) = delete;

 private:
  at::Generator generator_;
  at::Tensor now_;
};

}  // namespace

// --- places ---

RecomputedPlace::RecomputedPlace(std::shared_ptr<Region> region, int32_t made,
                                 const Geometry& geometry, const at::Tensor& tensor)
    : region_(std::move(region)), made_(made), geometry_(geometry) {
  if (tensor.is_inference()) return;
  counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  version_ = counter_.current_version();
}

RecomputedPlace::~RecomputedPlace() {
  region_->release(made_);
}

at::Tensor RecomputedPlace::get() {
  return region_->get(*this);
}

at::Tensor Region::get(const RecomputedPlace& place) {
  Lock lock(mutex_);
  if (place.counter_.enabled() && place.counter_.current_version() != place.version_)
    throw Error(
        formatted("a tensor that backward needs was changed in place after forward saved it "
                  "(recomputed region \"{}\"): version {}, expected {}.",
                  name_, place.counter_.current_version(), place.version_),
        "replace the in-place operation (add_, relu_, …) with one that returns a new tensor.");
  Made& made = made_[place.made_];
  if (!made.memory && !alive(made)) replay();
  return over(made.memory, place.geometry_);
}

void Region::release(int32_t number) {
  Lock lock(mutex_);
  Made& made = made_[number];
  if (--made.wanted == 0 && closed_ && !made.source) forget(made);
  if (--places_alive_ == 0 && closed_) {
    clear_tape();
    for (Made& other : made_) forget(other);
  }
}

// --- finding needed steps ---

// Keeps a storage that is still alive and unchanged since the region's steps read it.
bool Region::alive(Made& made) {
  bool changed = made.counter.enabled() && made.counter.current_version() != made.version;
  if (made.overwritten || changed) return false;
  Memory memory = made.weak.lock();
  if (!memory) return false;
  keep(made, memory);
  return true;
}

// Finds the steps that all places need, and what those steps read. Storages that the region holds
// aren't made again; with `with_living`, neither are those that others have kept alive.
void Region::mark(bool with_living) {
  for (Made& made : made_) {
    made.source = false;
    made.needed = made.wanted > 0 && !made.memory && !(with_living && alive(made));
  }
  for (size_t n = steps_.size(); n-- > 0;) {
    Step& step = steps_[n];
    step.needed = false;
    for (size_t i = 0; i < step.output_count; ++i)
      step.needed |= made_[outputs_[step.outputs + i].made].needed;
    for (size_t i = 0; i < step.operand_count; ++i) {
      const Operand& operand = operands_[step.operands + i];
      if (operand.written && operand.made >= 0) step.needed |= made_[operand.made].needed;
    }
    if (!step.needed) continue;
    for (size_t i = 0; i < step.operand_count; ++i) {
      const Operand& operand = operands_[step.operands + i];
      if (operand.made < 0) continue;
      Made& made = made_[operand.made];
      made.source = true;
      if (made.needed) continue;
      if (operand.written && made.memory) {
        // It is in use and can't be written again. Make it anew, and start over without it.
        made.overwritten = true;
        forget(made);
        return mark(with_living);
      }
      made.needed = operand.written || (!made.memory && !(with_living && alive(made)));
    }
  }
}

// After recording: releases what no step needs.
void Region::prune() {
  if (places_alive_ == 0) return clear_tape();
  mark(/*with_living=*/false);
  std::vector<char> used(externals_.size());
  for (const Step& step : steps_)
    for (size_t i = 0; step.needed && i < step.operand_count; ++i) {
      int32_t external = operands_[step.operands + i].external;
      if (external >= 0) used[external] = true;
    }
  for (size_t i = 0; i < externals_.size(); ++i)
    if (!used[i]) externals_[i].release();
  for (Made& made : made_)
    if (made.memory && made.wanted == 0 && !made.source) forget(made);
}

void Region::clear_tape() {
  auto free = [](auto& vector) { std::remove_reference_t<decltype(vector)>().swap(vector); };
  free(steps_);
  free(operands_);
  free(outputs_);
  free(values_);
  free(random_);
  free(externals_);
  for (Made& made : made_) {
    made.source = false;
    if (made.wanted == 0) forget(made);
  }
}

// --- running steps ---

at::Tensor Region::over(const Memory& memory, const Geometry& geometry) const {
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory), geometry.keys, geometry.type);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const int64_t* dims = dims_.data() + geometry.first;
  impl->set_sizes_and_strides(at::IntArrayRef(dims, geometry.dimensions),
                              at::IntArrayRef(dims + geometry.dimensions, geometry.dimensions),
                              geometry.offset);
  if (geometry.conjugated) impl->_set_conj(true);
  if (geometry.negated) impl->_set_neg(true);
  if (geometry.number) impl->set_wrapped_number(true);
  return tensor;
}

at::Tensor Region::tensor_for(const Operand& operand, const Step& step) {
  if (operand.external >= 0) {
    const auto& [kept, place, weak, geometry] = externals_[operand.external];
    if (place) return place->get();
    kept.check(("the recomputation of " + step.facts->op.schema().name()).c_str());
    at::Tensor tensor = kept.data();
    if (kept.unit()) {
      tensor = tensor.tensor_data();
      shard::set_key(tensor, true);  // so that the operator gathers it, as in forward
    }
    return tensor;
  }
  if (operand.made < 0) return {};
  Made& made = made_[operand.made];
  if (!made.memory && made.allocated) keep(made, allocate(made.bytes, made.device));
  if (!made.memory)
    throw Error(formatted("recomputing region \"{}\": an argument of {} was not recomputed.", name_,
                          step.facts->op.schema().name()),
                "this is a bug in fsdp; leave the module out of the policy.");
  return over(made.memory, operand.geometry);
}

torch::jit::Stack Region::arguments_of(const Step& step) {
  size_t count = step.facts->arguments.size();
  torch::jit::Stack stack(values_.begin() + step.values, values_.begin() + step.values + count);
  for (size_t i = 0; i < step.operand_count;) {
    const Operand& operand = operands_[step.operands + i];
    if (operand.list == Operand::kNo) {
      stack[operand.argument] = tensor_for(operand, step);
      ++i;
      continue;
    }
    c10::List<at::Tensor> tensors;
    c10::List<std::optional<at::Tensor>> optionals;
    for (; i < step.operand_count; ++i) {
      const Operand& element = operands_[step.operands + i];
      if (element.argument != operand.argument) break;
      at::Tensor tensor = tensor_for(element, step);
      if (operand.list == Operand::kTensors)
        tensors.push_back(std::move(tensor));
      else
        optionals.push_back(tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt);
    }
    if (operand.list == Operand::kTensors)
      stack[operand.argument] = std::move(tensors);
    else
      stack[operand.argument] = std::move(optionals);
  }
  return stack;
}

void Region::keep_results(const Step& step, const torch::jit::Stack& stack) {
  uint32_t position = 0;
  size_t output = 0;
  auto take = [&](const at::Tensor& tensor) FSDP_REQUIRES(mutex_) {
    uint32_t at = position++;
    if (output == step.output_count || outputs_[step.outputs + output].position != at) return;
    Made& made = made_[outputs_[step.outputs + output++].made];
    if (!made.needed || made.memory) return;
    if (!tensor.defined() || tensor.storage().nbytes() != made.bytes)
      throw Error(formatted("recomputing {} in region \"{}\" gave a different result than forward.",
                            step.facts->op.schema().name(), name_),
                  "leave this module out of the policy: its results depend on more than its "
                  "inputs.");
    keep(made, Memory::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
  };
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) take(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) take(tensor);
  }
}

void Region::run(const Step& step, size_t number) {
  torch::jit::Stack stack = arguments_of(step);
  {
    at::AutoGradMode grad_mode(step.grad_mode);
    std::optional<Rewound> rewound;
    if (step.random >= 0)
      rewound.emplace(random_[step.random].generator, random_[step.random].state);
    step.facts->op.callBoxed(stack);
  }
  keep_results(step, stack);
  // Frees storages after their last use.
  auto done = [&](int32_t made) FSDP_REQUIRES(mutex_) {
    if (made >= 0 && made_[made].wanted == 0 &&
        made_[made].last_use <= static_cast<int32_t>(number))
      forget(made_[made]);
  };
  for (size_t i = 0; i < step.operand_count; ++i) done(operands_[step.operands + i].made);
  for (size_t i = 0; i < step.output_count; ++i) done(outputs_[step.outputs + i].made);
}

void Region::replay() {
  Backends backends;
  mark(/*with_living=*/true);
  for (Made& made : made_) made.last_use = -1;
  for (size_t n = 0; n < steps_.size(); ++n)
    for (size_t i = 0; steps_[n].needed && i < steps_[n].operand_count; ++i) {
      int32_t made = operands_[steps_[n].operands + i].made;
      if (made >= 0) made_[made].last_use = static_cast<int32_t>(n);
    }
  std::vector<char> had(made_.size());
  for (size_t i = 0; i < made_.size(); ++i) had[i] = static_cast<bool>(made_[i].memory);
  try {
    for (size_t n = 0; n < steps_.size(); ++n)
      if (steps_[n].needed) run(steps_[n], n);
  } catch (...) {
    // Drops half-made storages; the tape is still complete.
    for (size_t i = 0; i < made_.size(); ++i)
      if (!had[i]) forget(made_[i]);
    throw;
  }
  clear_tape();
}

void Region::settle() {
  Lock lock(mutex_);
  closed_ = true;
  table_.clear();
  for (Made& made : made_)
    if (made.counter.enabled()) made.version = made.counter.current_version();
  replay();
}

// --- writes by others ---

bool Region::before_write(c10::StorageImpl* storage) {
  Lock lock(mutex_);
  if (steps_.empty()) return false;
  Memory copy;
  auto copied = [&] {
    if (copy) return copy;
    at::NoGradGuard no_grad;
    Backends backends;
    copy = allocate(storage->nbytes(), storage->device());
    bytes_of(copy).copy_(bytes_of(Memory::reclaim_copy(storage)));
    return copy;
  };
  for (Made& made : made_) {
    if (made.weak._unsafe_get_target() != storage) continue;
    made.overwritten = true;
    made.outside |= !closed_;  // no step makes what the region reads from it after this write
    if (!made.memory) continue;
    forget(made);
    keep(made, copied());
  }
  for (External& external : externals_) {
    if (external.place && external.weak._unsafe_get_target() == storage) {
      external = External(shard::KeptTensor(over(copied(), external.geometry)));
      continue;
    }
    const at::Tensor& data = external.kept.data();
    if (!data.defined() || external.kept.unit() || !data.has_storage() ||
        data.storage().unsafeGetStorageImpl() != storage)
      continue;
    at::Tensor there = shard::tensor_over(copied(), data.scalar_type(), data.sizes(),
                                          data.strides(), data.storage_offset());
    there._set_conj(data.is_conj());
    there._set_neg(data.is_neg());
    external = External(shard::KeptTensor(there));
  }
  return static_cast<bool>(copy);
}

}  // namespace fsdp::memory
