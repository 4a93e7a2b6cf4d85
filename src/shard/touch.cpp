// Where LibTorch calls the engine: the fallback of the key that sharded parameters carry, hooks for
// saved tensors, and the beginning and end of a backward. All of it is installed when this library
// is loaded, which is before the first backward.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/library.h>

#include <unordered_set>
#include <vector>

#include "base/format.h"
#include "shard/deferred.h"
#include "shard/deferred_tape.h"
#include "shard/dry_run.h"
#include "shard/engine.h"
#include "shard/gradients.h"
#include "shard/kept_tensor.h"
#include "shard/model.h"
#include "shard/registry.h"
#include "shard/tape_hook.h"

namespace fsdp::shard {
namespace {

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

std::shared_ptr<Model> owner_of(const Unit& unit) {
  return unit.require_owner("keep the module alive as long as graphs made with it are used.");
}

// --- operators ---

// The sharded tensors that one operator reads or writes.
class Touched {
 public:
  explicit Touched(const c10::OperatorHandle& op) : op_(op) {}
  ~Touched() {
    if (!counted_) return;
    for (const auto& [unit, model] : units_) {
      const Locked locked = model->lock();
      --unit->busy;
    }
  }
  Touched(const Touched&) = delete;
  Touched& operator=(const Touched&) = delete;

  void see(const at::Tensor& tensor, bool write) {
    if (!has_key(tensor)) return;
    if (tape_hooks()) seen_.push_back(tensor.unsafeGetTensorImpl());
    StorageTag* tag = tag_of(tensor);
    if (!tag) return;  // an alias whose owner is gone; reading its storage throws
    switch (tag->kind) {
      case StorageTag::kDeferred:
        if (!deferred::recording()) deferred::materialize(tensor);
        return;
      case StorageTag::kGradients:
        return see_gradient(*static_cast<Flat*>(tag->owner), tensor);
      case StorageTag::kMasters:
        if (write) written_.push_back(&static_cast<Flat*>(tag->owner)->unit());
        return;
      case StorageTag::kParameters:
        return see_parameter(*static_cast<Flat*>(tag->owner), tensor, write);
    }
  }

  // Gathers all units; none may be resharded until the operator has returned.
  void gather() {
    const char* name = op_.schema().name().c_str();
    for (Unit* unit : written_) owner_of(*unit)->lock()->before_write(*unit, name);
    for (auto& [unit, model] : units_) model = owner_of(*unit);
    for (const auto& [unit, model] : units_) {
      const Locked locked = model->lock();
      ++unit->busy;
    }
    counted_ = true;
    for (const auto& [unit, model] : units_) model->lock()->use(*unit, name, in_backward());
  }

  // Tells recomputation where a module begins. Nested operators add nothing to that.
  void tell() {
    if (this_thread().inside > 0) return;
    for (c10::TensorImpl* tensor : seen_) tape_hook()->touched(tensor);
  }

  // The dtype the operator's other floating-point inputs are cast to, or nullopt.
  std::optional<at::ScalarType> cast_to() const { return mixed_ ? std::nullopt : cast_to_; }
  bool done() const { return done_; }  // the operator is done; its result is its first argument

 private:
  void see_parameter(Flat& flat, const at::Tensor& tensor, bool write) {
    Unit& unit = flat.unit();
    if (write && !unit.writable) refuse_write(flat, tensor);
    if (unit.cast_inputs && at::isFloatingType(flat.param_dtype())) {
      if (cast_to_ && *cast_to_ != flat.param_dtype()) mixed_ = true;
      cast_to_ = flat.param_dtype();
    }
    for (const auto& known : units_)
      if (known.unit.get() == &unit) return;
    units_.push_back({unit.shared_from_this(), nullptr});
  }

  [[noreturn]] void refuse_write(const Flat& flat, const at::Tensor& tensor) const {
    std::string name = "a parameter";
    for (const Parameter& p : flat.parameters())
      if (p.handle.is_same(tensor)) name = formatted("parameter \"{}\"", p.name());
    throw Error(
        formatted("unit \"{}\": {} writes to {}, which is sharded.", flat.unit().name,
                  op_.schema().name(), name),
        "update it with fsdp::AdamW(sharded, …) or torch::optim on sharded.parameters(), load it "
        "with sharded.load_full_state_dict(), or write to it inside sharded.summon_full_params().");
  }

  // A stand-in for a sharded gradient. Only model->zero_grad() works on it.
  void see_gradient(Flat& flat, const at::Tensor& tensor) {
    const std::string& name = op_.schema().name();
    if (name == "aten::detach" || name == "aten::detach_") return;
    std::string parameter;
    for (size_t i = 0; i < flat.parameters().size(); ++i) {
      if (flat.layout().offset(i) != tensor.storage_offset()) continue;
      parameter = flat.parameters()[i].name();
      if (name != "aten::zero_" || !flat.grad.defined()) continue;
      const auto model = owner_of(flat.unit());
      const Locked locked = model->lock();
      Unseen unseen;
      change_gradient(flat);
      flat.part_of(i, flat.grad).zero_();
      done_ = true;
      return;
    }
    throw Error(formatted("unit \"{}\": {} reads the gradient of \"{}\", which is sharded.",
                          flat.unit().name, name, parameter),
                "clip with sharded.clip_grad_norm_(…), update with fsdp::AdamW(sharded, …) or "
                "torch::optim on sharded.parameters(), read it with sharded.full_grad(name).");
  }

  const c10::OperatorHandle& op_;
  struct Use {
    std::shared_ptr<Unit> unit;
    std::shared_ptr<Model> model;  // from gather() on
  };
  c10::SmallVector<Use, 4> units_;
  c10::SmallVector<Unit*, 2> written_;          // through handed-out masters
  c10::SmallVector<c10::TensorImpl*, 4> seen_;  // only while a tape hook is set
  std::optional<at::ScalarType> cast_to_;
  bool mixed_ = false;
  bool counted_ = false;  // as busy
  bool done_ = false;
};

template <typename Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) visit(*tensor);
  }
}

// Whether it is a parameter to whose dtype other inputs are cast.
bool has_own_type(const at::Tensor& tensor) {
  if (!has_key(tensor)) return false;
  StorageTag* tag = tag_of(tensor);
  return tag && tag->kind == StorageTag::kParameters &&
         static_cast<Flat*>(tag->owner)->unit().cast_inputs;
}

at::Tensor cast(const at::Tensor& tensor, at::ScalarType type) {
  bool castable = tensor.defined() && at::isFloatingType(tensor.scalar_type()) &&
                  tensor.scalar_type() != type && !has_own_type(tensor) &&
                  !tensor.unsafeGetTensorImpl()->is_wrapped_number() &&
                  tensor.layout() == at::kStrided;
  return castable ? tensor.to(type) : tensor;
}

// Modules of the C++ frontend have no boundary at which to cast their inputs, so the cast happens
// at the operators that read a parameter.
void cast_inputs(const c10::OperatorHandle& op, at::ScalarType type, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (writes(arguments[i])) continue;
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      at::Tensor other = cast(tensor, type);
      if (!other.is_same(tensor)) value = std::move(other);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = cast(tensor, type);
      value = std::move(tensors);
    }
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  Touched touched(op);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    bool write = writes(arguments[i]);
    for_each_tensor(value, [&](const at::Tensor& tensor) { touched.see(tensor, write); });
  }
  if (touched.done()) return;
  touched.gather();
  if (deferred::recording()) return deferred::record(op, keys, stack);
  touched.tell();
  // A recomputed region that has just begun includes this operator.
  if (shown() && this_thread().inside == 0) keys = keys.add(deferred::kRecordKey);
  if (auto type = touched.cast_to()) cast_inputs(op, *type, stack);
  ThreadScope<&ThreadState::inside> nested(this_thread().inside + 1);
  // Redispatch below the key, never from the top: an alias taken while sharded keeps the key for
  // good.
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// --- products with a parameter that another function computes (replaced_linear.h) ---

bool is_transpose(const at::Tensor& tensor, const at::Tensor& of) {
  return tensor.dim() == 2 && of.dim() == 2 && tensor.size(0) == of.size(1) &&
         tensor.size(1) == of.size(0) && tensor.stride(0) == of.stride(1) &&
         tensor.stride(1) == of.stride(0) && tensor.storage_offset() == of.storage_offset();
}

// Null: the operator multiplies as it is.
const Parameter* replaced_weight(const at::Tensor& operand, bool transposed) {
  const Flat* flat = has_key(operand) ? flat_of(operand) : nullptr;
  if (!flat || deferred::recording()) return nullptr;
  for (const Parameter& parameter : flat->parameters())
    if (parameter.linear &&
        (transposed ? is_transpose(operand, parameter.handle) : operand.is_same(parameter.handle)))
      return &parameter;
  return nullptr;
}

// The places of x, weight and bias (-1: none) among an operator's arguments.
struct Places {
  int x, weight, bias;
  bool transposed;  // it multiplies by weight.t()
};

template <Places kAt>
void multiply(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto argument = [&](int place) -> const c10::IValue& {
    return torch::jit::peek(*stack, static_cast<size_t>(place), count);
  };
  bool plain = true;  // no factors other than 1
  for (int place = 3; place < static_cast<int>(count); ++place)
    plain = plain && argument(place).toScalar().equal(1);
  const Parameter* weight =
      plain ? replaced_weight(argument(kAt.weight).toTensor(), kAt.transposed) : nullptr;
  if (weight) {
    const at::Tensor x = argument(kAt.x).toTensor();
    at::Tensor bias;
    if constexpr (kAt.bias >= 0)
      if (argument(kAt.bias).isTensor()) bias = argument(kAt.bias).toTensor();
    const bool is_bias = !bias.defined() || (bias.dim() == 1 && bias.size(0) == weight->sizes[0]);
    auto product = is_bias ? weight->linear(x, weight->handle, bias) : std::nullopt;
    if (product) {
      torch::jit::drop(*stack, count);
      return torch::jit::push(*stack, std::move(*product));
    }
  }
  fallback(op, keys, stack);
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  // torch::nn::Linear calls addmm for rows with a bias, else matmul.
  static constexpr Places kLinear{0, 1, 2, false}, kAddmm{1, 2, 0, true}, kMatmul{0, 1, -1, true};
  library.impl("linear", torch::CppFunction::makeFromBoxedFunction<&multiply<kLinear>>());
  library.impl("addmm", torch::CppFunction::makeFromBoxedFunction<&multiply<kAddmm>>());
  library.impl("matmul", torch::CppFunction::makeFromBoxedFunction<&multiply<kMatmul>>());
}

// --- saved tensors ---

// Keeps a tensor for backward as autograd would, except that a parameter is kept without its
// memory, and a tensor that can be recomputed isn't kept at all. With hooks, autograd no longer
// checks for in-place changes of saved tensors; this class does.
class SavedTensor : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const at::Tensor& tensor) override {
    if (packing()) place_ = tape_hook()->pack(tensor);
    if (!place_) kept_ = KeptTensor(tensor);
  }

  at::Tensor call_unpack_hook() override {
    if (place_) return place_->get();
    kept_.check("backward");
    if (const auto& unit = kept_.unit()) owner_of(*unit)->lock()->use(*unit, "backward", true);
    return kept_.data();
  }

 private:
  KeptTensor kept_;
  std::unique_ptr<SavedPlace> place_;
};

// The leaves into which a backward from `roots` accumulates gradients: what autograd will reach.
GradientsToCome gradients_to_come(const torch::autograd::edge_list& roots, bool accumulate_grad,
                                  const torch::autograd::edge_list& outputs) {
  GradientsToCome found;
  if (!accumulate_grad) return found;
  const auto add = [&](torch::autograd::Node* node) {
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node))
      found.insert(leaf->variable.unsafeGetTensorImpl());
  };
  for (const auto& edge : outputs) add(edge.function.get());
  if (!outputs.empty()) return found;
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> open;
  const auto visit = [&](const torch::autograd::Edge& edge) {
    if (edge.function && seen.insert(edge.function.get()).second)
      open.push_back(edge.function.get());
  };
  for (const auto& edge : roots) visit(edge);
  while (!open.empty()) {
    torch::autograd::Node* node = open.back();
    open.pop_back();
    add(node);
    for (const auto& edge : node->next_edges()) visit(edge);
  }
  return found;
}

class HookedEngine : public torch::autograd::Engine {
 public:
  static torch::autograd::Engine& get() {
    static auto* engine = new HookedEngine;  // never destroyed: its threads end with the process
    return *engine;
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return registry::empty() && !packing() ? nullptr : std::make_unique<SavedTensor>();
  }

  // A backward inside a backward is part of the outer one.
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    auto run = [&] {
      return torch::autograd::Engine::execute(roots, inputs, keep_graph, create_graph,
                                              accumulate_grad, outputs);
    };
    if (in_backward()) return run();
    if (TapeHook* hook = tape_hook()) hook->backward_begins();
    if (registry::empty()) return run();
    auto models = registry::models();
    // A dry run during training leaves the real models alone, and the other way round.
    std::erase_if(models,
                  [](const auto& model) { return model->device().is_meta() != dry_run::on(); });
    const auto coming = gradients_to_come(roots, accumulate_grad, outputs);
    for (const auto& model : models) model->lock()->begin_backward(coming);
    try {
      auto result = run();
      for (const auto& model : models) model->lock()->end_backward(/*failed=*/false);
      return result;
    } catch (...) {
      for (const auto& model : models) model->lock()->end_backward(/*failed=*/true);
      throw;
    }
  }
};

const bool installed = (torch::autograd::set_default_engine_stub(&HookedEngine::get), true);

}  // namespace
}  // namespace fsdp::shard
