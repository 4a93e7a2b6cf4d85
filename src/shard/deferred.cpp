// Recording: how an operator inside deferred_init becomes an entry of the tape. A trial run gives
// the layout of its results, which are tensors without memory. Operators with effects outside the
// tape (they return a number, or write to a tensor that has memory) run immediately.
#include "shard/deferred.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>

#include "fsdp/deferred_init.h"
#include "shard/deferred_trial.h"
#include "shard/runtime.h"
#include "shard/tape_hook.h"
#include "shard/tensor_access.h"

namespace fsdp::shard::deferred {
namespace {

// Tensors from outside up to this size are copied onto the tape, and results up to this size are
// computed immediately, so later changes to small constants do no harm.
constexpr size_t kSmallBytes = 64 << 10;

// Whether it decomposes into other operators, which are recorded one by one.
bool is_composite(const c10::OperatorHandle& op) {
  static constexpr std::array<std::string_view, 4> kFilled = {"rand", "randn", "rand_like",
                                                              "randn_like"};  // empty and a draw
  if (std::ranges::find(kFilled, name_of(op)) != kFilled.end()) return true;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

bool returns_only_tensors(const c10::OperatorHandle& op) {
  return std::ranges::all_of(op.schema().returns(), [](const c10::Argument& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
}

// torch::tensor({…}) allocates with empty() and writes through the data pointer. It is recognised
// by its guards: it turns autograd off but not the keys below, which nothing else does around
// empty().
bool is_for_constant(const c10::OperatorHandle& op) {
  return name_of(op) == "empty" && !c10::InferenceMode::is_enabled() &&
         c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality) &&
         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
}

// --- operators that run immediately ---

void return_from(Call& call, torch::jit::Stack results) {
  torch::jit::drop(call.stack, call.values.size());
  std::ranges::move(results, std::back_inserter(call.stack));
}

// Tensors that are written get their memory for good, tensors that are read only for this call.
void run_now(Call& call) {
  size_t next = 0;
  torch::jit::Stack stack;
  for (const c10::IValue& value : call.values)
    stack.push_back(map_tensors(value, [&](const at::Tensor& tensor) {
      const Argument& argument = call.arguments[next++];
      Storage* storage = storage_of(tensor);  // again: an earlier argument may have shared it
      if (storage && !argument.written) return view_of(contents(*storage), geometry_of(tensor));
      if (storage) materialize(tensor);
      return tensor;
    }));
  call.op.redispatchBoxed(
      call.keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRecordKey), &stack);
  return_from(call, std::move(stack));
}

bool must_run_now(const Call& call) {
  bool known = returns_only_tensors(call.op) && !device_of(call).is_meta();
  bool effect = !call.op.schema().returns().empty() || call.writes_any();
  bool seen = call.any([](const Argument& argument) {
    return is_real(argument) && (argument.written || !is_plain(argument.tensor));
  });
  bool storages = std::ranges::any_of(call.values, &c10::IValue::isStorage);
  return !known || !effect || seen || storages;
}

// Whether the results must have memory: views of a tensor with memory, tensors that are more than a
// storage, and small ones computed only from tensors with memory.
bool has_real_results(const Call& call, const Trial& trial) {
  size_t bytes_read = kSmallBytes, bytes_made = 0;
  for (const Argument& argument : call.arguments)
    if (is_real(argument)) bytes_read += argument.tensor.nbytes();
  for (const at::Tensor& result : trial.results) {
    if (!result.defined()) continue;
    if (!is_plain(result)) return true;
    const Argument* original = trial.original_of(result);
    if (original && !original->deferred) return true;
    if (!original) bytes_made += result.storage().nbytes();
  }
  bool any_deferred =
      call.any([](const Argument& argument) { return argument.deferred != nullptr; });
  return !any_deferred && call.any(is_real) && bytes_made <= bytes_read;
}

// --- entries of the tape ---

// A tensor from outside, as the tape keeps it. Memory that may be freed or moved before the replay
// is copied.
Operand capture(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  StorageTag* tag = tag_of(tensor);
  bool borrowed = !storage._mutable_data_ptr_no_checks().get_context() ||  // from_blob
                  (tag && tag->kind != StorageTag::kDeferred);             // sharded
  bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  Operand operand;
  if (borrowed || (storage.nbytes() <= kSmallBytes && !number)) {
    int64_t bytes = static_cast<int64_t>(storage.nbytes());
    at::Tensor copy = at::clone(tensor_over(memory_of(tensor), at::kByte, {bytes}, {1}, 0));
    operand.real = view_of(memory_of(copy), geometry_of(tensor));
  } else {
    operand.real = tensor.tensor_data();  // shares the version counter, not autograd's graph
  }
  operand.version = operand.real.is_inference() ? 0 : operand.real._version();
  return operand;
}

Operand operand_of(const Argument& argument) {
  if (!argument.tensor.defined()) return {};
  if (!argument.deferred) return capture(argument.tensor);
  Operand operand;
  operand.storage = argument.deferred->id;
  operand.bytes = argument.deferred->nbytes();
  operand.device = argument.deferred->device();
  operand.geometry = geometry_of(argument.tensor);
  return operand;
}

std::shared_ptr<Record> record_of(const Call& call) {
  auto record = std::make_shared<Record>(call.op);
  for (const c10::IValue& value : call.values)
    record->arguments.push_back(map_tensors(value, [](const at::Tensor&) { return at::Tensor(); }));
  for (const Argument& argument : call.arguments) {
    record->operands.push_back(operand_of(argument));
    bool needed = argument.read || (argument.written && !argument.overwritten);
    if (argument.deferred && argument.deferred->last && needed)
      record->needs.push_back(argument.deferred->last);
  }
  return record;
}

// Turns the trial's tensors into tensors without memory and puts the operator on the tape.
class Commit {
 public:
  Commit(Call& call, Trial& trial)
      : call_(call), trial_(trial), device_(device_of(call)), record_(record_of(call)) {
    record_->random = std::move(trial.random);
    record_->draw = std::move(trial.draw);
  }

  void run() {
    bool changes_layout_only = call_.op.hasTag(at::Tag::inplace_view);
    for (size_t i = 0; i < call_.arguments.size(); ++i) {
      const Argument& argument = call_.arguments[i];
      if (!argument.written || !argument.deferred) continue;
      if (!changes_layout_only) written_.push_back(argument.deferred);
      lay_out(argument.tensor, trial_.arguments[i]);
    }
    torch::jit::Stack results;
    size_t position = 0;
    for (const c10::IValue& value : trial_.returned)
      results.push_back(
          map_tensors(value, [&](const at::Tensor& tensor) { return result(tensor, position++); }));
    for (Storage* storage : written_) storage->last = record_;
    return_from(call_, std::move(results));
  }

 private:
  at::Tensor result(const at::Tensor& tried, size_t position) {
    if (!tried.defined()) return tried;
    for (size_t i = 0; i < trial_.arguments.size(); ++i)
      if (tried.is_same(trial_.arguments[i])) return call_.arguments[i].tensor;
    Memory storage = storage_for(tried, position);
    at::Tensor tensor = view_of(storage, geometry_of(tried));
    set_key(tensor, true);
    return tensor;
  }

  // The deferred storage for a tensor of the trial.
  Memory storage_for(const at::Tensor& tried, size_t position) {
    if (const Argument* original = trial_.original_of(tried)) return memory_of(original->tensor);
    Memory& made = made_[tried.storage().unsafeGetStorageImpl()];
    if (made) return made;
    size_t bytes = tried.storage().nbytes();
    auto storage = c10::make_intrusive<Storage>(bytes, trial_.real ? tried.device() : device_);
    record_->outputs.push_back({storage->id, position, bytes, geometry_of(tried)});
    written_.push_back(storage.get());
    return made = storage;
  }

  // The operator may have given `tensor` another shape, a larger storage or another storage.
  void lay_out(const at::Tensor& tensor, const at::Tensor& tried) {
    const Argument* original = trial_.original_of(tried);
    Memory storage = memory_of(tensor);
    size_t bytes = tried.storage().nbytes();
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (!original) {  // set_() to nothing
      impl->set_storage_keep_dtype(
          c10::Storage(c10::make_intrusive<Storage>(bytes, tensor.device())));
    } else if (original->deferred != storage.get()) {
      impl->set_storage_keep_dtype(original->tensor.storage());
    } else if (bytes > storage->nbytes()) {
      storage->set_nbytes(bytes);
    }
    if (!same_layout(tensor, geometry_of(tried)))
      impl->set_sizes_and_strides(tried.sizes(), tried.strides(), tried.storage_offset());
  }

  Call& call_;
  Trial& trial_;
  at::Device device_;
  std::shared_ptr<Record> record_;
  std::vector<Storage*> written_;
  std::unordered_map<c10::StorageImpl*, Memory> made_;  // by the trial's storage
};

void on_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  if (!recording() && taping()) return tape_hook()->operate(op, keys, stack);
  if (!recording() || is_composite(op))
    return op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRecordKey), stack);
  std::lock_guard lock(runtime().tape.mutex);
  bool for_constant = is_for_constant(op);
  BackendsOnly backends_only;
  Call call = call_of(op, keys, *stack);
  if (for_constant || must_run_now(call)) return run_now(call);
  Trial trial = try_out(call);
  if (!has_real_results(call, trial)) return Commit(call, trial).run();
  if (!trial.real || call.writes_any()) return run_now(call);
  return_from(call, std::move(trial.returned));
}

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_operator>());
}

}  // namespace

bool recording() {
  return this_thread().deferring > 0;
}

// Goes through autograd first, which also decomposes composite operators; see kRecordKey.
void record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (name_of(op) == "cudnn_is_acceptable") {
    // Otherwise LSTM::to(kCUDA) would read data pointers to put its weights into one buffer.
    torch::jit::drop(*stack, op.schema().arguments().size());
    return torch::jit::push(*stack, false);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

bool is_deferred(const at::Tensor& tensor) {
  return storage_of(tensor) != nullptr;
}

at::Tensor value(const at::Tensor& tensor) {
  std::lock_guard lock(runtime().tape.mutex);
  BackendsOnly backends_only;
  if (Storage* storage = storage_of(tensor))
    return view_of(contents(*storage), geometry_of(tensor));
  return at::clone(tensor);
}

std::shared_ptr<const Draw> draw_behind(const at::Tensor& tensor) {
  std::lock_guard lock(runtime().tape.mutex);
  const Storage* storage = storage_of(tensor);
  if (!storage || !storage->last || !storage->last->draw) return nullptr;
  const Operand& drawn = storage->last->operands[0];
  const bool all = same_layout(tensor, drawn.geometry) && tensor.nbytes() == storage->nbytes();
  return all ? storage->last->draw : nullptr;
}

void materialize(const at::Tensor& tensor) {
  std::lock_guard lock(runtime().tape.mutex);
  if (Storage* storage = storage_of(tensor)) storage->give(contents(*storage));
  set_key(tensor, false);
}

void allocate(torch::nn::Module& module, at::Device device) {
  for (const at::Tensor& parameter : module.parameters()) {
    if (!is_deferred(parameter)) continue;  // or the second of a tied pair
    set_key(parameter, false);
    become(parameter, at::empty(parameter.sizes(), parameter.options().device(device)));
  }
}

}  // namespace fsdp::shard::deferred

namespace fsdp {

DeferredScope::DeferredScope(DeferredOptions options)
    : shapes_only_before_(shard::this_thread().shapes_only) {
  ++shard::this_thread().deferring;
  shard::this_thread().shapes_only |= !options.random;
  c10::impl::tls_set_dispatch_key_included(shard::deferred::kRecordKey, true);
  shard::check_in_debug();
}

DeferredScope::~DeferredScope() {
  shard::this_thread().shapes_only = shapes_only_before_;
  if (--shard::this_thread().deferring == 0)
    c10::impl::tls_set_dispatch_key_included(shard::deferred::kRecordKey, shard::taping());
}

}  // namespace fsdp
