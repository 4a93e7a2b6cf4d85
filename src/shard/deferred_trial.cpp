#include "shard/deferred_trial.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "shard/deferred_draw.h"

namespace fsdp::shard::deferred {
namespace {

// Whether it overwrites its first argument without reading it.
bool overwrites(const c10::OperatorHandle& op) {
  static constexpr std::array<std::string_view, 11> kNames = {
      "bernoulli_",  "cauchy_", "copy_",   "exponential_", "fill_", "geometric_",
      "log_normal_", "normal_", "random_", "uniform_",     "zero_"};
  return std::ranges::find(kNames, name_of(op)) != kNames.end();
}

// Whether it uses only the shape of its first argument.
bool reads_shape_only(const c10::OperatorHandle& op) {
  return name_of(op).ends_with("_like") || name_of(op).starts_with("new_");
}

bool is_random(const c10::OperatorHandle& op) {
  auto is_generator = [](const c10::Argument& argument) { return argument.name() == "generator"; };
  return op.hasTag(at::Tag::nondeterministic_seeded) ||
         std::ranges::any_of(op.schema().arguments(), is_generator);
}

bool fills_storage(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && tensor.nbytes() == tensor.storage().nbytes();
}

Memory meta_storage(size_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes),
      c10::DataPtr(nullptr, at::kMeta), c10::GetAllocator(at::kMeta), /*resizable=*/true);
}

Memory real_storage(const Call& call, const Storage& storage) {
  bool read = std::ranges::any_of(call.arguments, [&](const Argument& argument) {
    return argument.deferred == &storage && argument.read;
  });
  return read ? contents(storage) : scratch(storage.nbytes(), storage.device());
}

at::Tensor stand_in(const Call& call, const Argument& argument, Trial& trial) {
  const at::Tensor& tensor = argument.tensor;
  if (!tensor.defined()) return {};
  Memory& memory = trial.stand_ins[tensor.storage().unsafeGetStorageImpl()];
  if (!memory) {
    memory = !trial.real         ? meta_storage(tensor.storage().nbytes())
             : argument.deferred ? real_storage(call, *argument.deferred)
                                 : memory_of(tensor);
    trial.originals.emplace(memory.get(), argument);
  }
  return view_of(memory, geometry_of(tensor));
}

std::vector<RandomState> random_states(const Call& call) {
  std::vector<at::Generator> generators;
  for (const c10::IValue& value : call.values)
    if (value.isGenerator() && value.toGenerator().defined())
      generators.push_back(value.toGenerator());
  if (generators.empty()) {  // some kernels for other devices draw from the CPU's generator
    at::Device device = device_of(call);
    generators.push_back(at::globalContext().defaultGenerator(at::kCPU));
    if (!device.is_cpu()) generators.push_back(at::globalContext().defaultGenerator(device));
  }
  std::vector<RandomState> states;
  for (at::Generator& generator : generators) {
    std::lock_guard lock(generator.mutex());
    states.push_back({generator, generator.get_state()});
  }
  return states;
}

torch::jit::Stack trial_stack(const Call& call, Trial& trial) {
  torch::jit::Stack stack;
  for (size_t i = 0; i < call.values.size(); ++i) {
    const std::string& name = call.op.schema().arguments()[i].name();
    if (!trial.real && name == "device") {
      stack.emplace_back(at::Device(at::kMeta));
    } else if (!trial.real && name == "pin_memory") {
      stack.emplace_back();
    } else {
      stack.push_back(map_tensors(call.values[i], [&](const at::Tensor&) {
        const Argument& argument = call.arguments[trial.arguments.size()];
        trial.arguments.push_back(stand_in(call, argument, trial));
        return trial.arguments.back();
      }));
    }
  }
  return stack;
}

void collect_results(Trial& trial) {
  for (const c10::IValue& value : trial.returned)
    map_tensors(value, [&](const at::Tensor& tensor) {
      trial.results.push_back(tensor);
      return tensor;
    });
}

Trial try_for_real(const Call& call) {
  Trial trial{.real = true};
  trial.returned = trial_stack(call, trial);
  if (is_random(call.op)) trial.random = random_states(call);
  call.op.callBoxed(&trial.returned);
  collect_results(trial);
  return trial;
}

// Whether the operator modifies and returns its first argument.
bool is_in_place(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  return schema.returns().size() == 1 && writes(schema.returns()[0]) &&
         !schema.arguments().empty() && writes(schema.arguments()[0]) &&
         !op.hasTag(at::Tag::inplace_view);
}

Trial try_on_meta(const Call& call) {
  Trial trial;
  trial.returned = trial_stack(call, trial);
  try {
    call.op.callBoxed(&trial.returned);
  } catch (const c10::NotImplementedError&) {  // no kernel for meta tensors
    if (!is_in_place(call.op)) throw;
    trial.returned = {trial.arguments[0]};
  }
  collect_results(trial);
  return trial;
}

// uniform_ or normal_ of a tensor in deferred memory, if its numbers can be skipped.
std::shared_ptr<Draw> draw_of(const Call& call) {
  const bool normal = name_of(call.op) == "normal_";
  if (!normal && name_of(call.op) != "uniform_") return nullptr;
  const Argument& target = call.arguments[0];
  const at::Tensor& tensor = target.tensor;
  if (!target.deferred || !tensor.device().is_cpu() || !tensor.is_contiguous()) return nullptr;
  auto draw = std::make_shared<Draw>();
  draw->normal = normal;
  draw->a = call.values[1].toDouble();
  draw->b = call.values[2].toDouble();
  draw->type = tensor.scalar_type();
  draw->numel = tensor.numel();
  return draw->is_known() ? draw : nullptr;
}

Trial skip_draw(const Call& call, const std::shared_ptr<Draw>& draw) {
  Trial trial = try_on_meta(call);  // throws for arguments that the operator refuses
  at::Generator generator = call.values[3].isGenerator()
                                ? call.values[3].toGenerator()
                                : at::globalContext().defaultGenerator(at::kCPU);
  draw->skip(generator);
  trial.draw = draw;
  return trial;
}

}  // namespace

bool Call::any(bool (*is)(const Argument&)) const {
  return std::ranges::any_of(arguments, is);
}

bool Call::writes_any() const {
  return std::ranges::any_of(arguments, &Argument::written);
}

const Argument* Trial::original_of(const at::Tensor& tried) const {
  auto original = originals.find(tried.storage().unsafeGetStorageImpl());
  return original == originals.end() ? nullptr : &original->second;
}

std::string_view name_of(const c10::OperatorHandle& op) {
  std::string_view name = op.schema().name();
  return name.starts_with("aten::") ? name.substr(6) : std::string_view();
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() &&
         !tensor.is_nested();
}

bool is_real(const Argument& argument) {
  return argument.tensor.defined() && !argument.deferred;
}

Call call_of(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack) {
  const auto& schema = op.schema().arguments();
  Call call{op, keys, stack, torch::jit::last(stack, schema.size()), {}};
  for (size_t i = 0; i < schema.size(); ++i)
    map_tensors(call.values[i], [&](const at::Tensor& tensor) {
      bool unread = i == 0 && (overwrites(op) || reads_shape_only(op));
      Argument argument{tensor, storage_of(tensor), writes(schema[i]), !unread, false};
      argument.overwritten = unread && argument.written && fills_storage(tensor);
      call.arguments.push_back(std::move(argument));
      return tensor;
    });
  return call;
}

// The `device` argument, or else the device of the tensor arguments; a 0-d CPU tensor doesn't count
// if there is another.
at::Device device_of(const Call& call) {
  for (size_t i = 0; i < call.values.size(); ++i) {
    if (call.op.schema().arguments()[i].name() != "device" || !call.values[i].isDevice()) continue;
    at::Device device = call.values[i].toDevice();
    bool any_index = !device.is_cpu() && !device.has_index();
    return any_index ? c10::impl::VirtualGuardImpl(device.type()).getDevice() : device;
  }
  at::Device device = at::kCPU;
  bool is_number = true;
  for (const Argument& argument : call.arguments) {
    if (!argument.tensor.defined() || !is_number) continue;
    device = argument.tensor.device();
    is_number = device.is_cpu() && argument.tensor.dim() == 0;
  }
  return device;
}

Trial try_out(const Call& call) {
  if (is_random(call.op) && !this_thread().shapes_only) {
    const std::shared_ptr<Draw> draw = draw_of(call);
    return draw ? skip_draw(call, draw) : try_for_real(call);
  }
  try {
    return try_on_meta(call);
  } catch (const std::exception&) {  // the shape depends on contents, or the call is wrong; then
    return try_for_real(call);       // the real kernel throws as usual
  }
}

}  // namespace fsdp::shard::deferred
