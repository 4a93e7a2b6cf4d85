#include "memory/plan_operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>

#include "fsdp/error.h"
#include "shard/dry_run.h"

namespace fsdp::memory {
namespace {

constexpr int64_t kSmall = 1 << 18;  // elements that are tried as they are

// What comes out depends on values, not on sizes.
bool needs_values(const std::string& name) {
  static const std::set<std::string> names = {"aten::nonzero",
                                              "aten::masked_select",
                                              "aten::_unique2",
                                              "aten::unique_dim",
                                              "aten::_unique",
                                              "aten::unique_consecutive",
                                              "aten::bincount",
                                              "aten::equal",
                                              "aten::is_nonzero",
                                              "aten::repeat_interleave",
                                              "aten::_local_scalar_dense",
                                              "aten::nonzero_static"};
  return names.contains(name);
}

[[noreturn]] void refuse(const c10::OperatorHandle& op, const std::string& why) {
  throw Error("a plan cannot go on at " + op.schema().name() + ": " + why + ".",
              "a plan runs the step on the meta device, without values: leave out of the planned "
              "step what looks at them, and make tensors on step.device.");
}

// Sizes and what stands for them: large ones become small primes, so that each can be found again
// in the sizes of a result.
class Sizes {
 public:
  explicit Sizes(bool as_they_are) : as_they_are_(as_they_are) {}

  int64_t small(int64_t size) {
    if (as_they_are_ || size <= 1) return size;
    auto known = small_.find(size);
    if (known != small_.end()) return known->second;
    constexpr std::array<int64_t, 12> kPrimes = {3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41};
    int64_t prime = kPrimes[std::min(small_.size(), kPrimes.size() - 1)];
    large_[prime] = size;
    return small_[size] = prime;
  }
  int64_t large(int64_t size) const {
    if (as_they_are_ || size <= 1) return size;
    auto known = large_.find(size);
    return known == large_.end() ? -1 : known->second;
  }

 private:
  bool as_they_are_;
  std::map<int64_t, int64_t> small_, large_;
};

int64_t elements(const c10::IValue& value) {
  int64_t count = 0;
  if (value.isTensor() && value.toTensor().defined()) count += value.toTensor().numel();
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector())
      if (tensor.defined()) count += tensor.numel();
  return count;
}

at::Tensor stand_in(const at::Tensor& tensor, Sizes& sizes) {
  if (!tensor.defined() || !tensor.is_meta()) return tensor;
  std::vector<int64_t> shape;
  for (int64_t size : tensor.sizes()) shape.push_back(sizes.small(size));
  return at::zeros(shape, at::TensorOptions(tensor.scalar_type()));
}

c10::IValue stand_in(const c10::IValue& value, Sizes& sizes) {
  if (value.isTensor()) return stand_in(value.toTensor(), sizes);
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    for (at::Tensor& tensor : tensors) tensor = stand_in(tensor, sizes);
    return tensors;
  }
  if (value.isDevice() && value.toDevice().is_meta()) return at::Device(at::kCPU);
  return value;
}

at::Tensor result(const c10::OperatorHandle& op, const at::Tensor& tried, const Sizes& sizes) {
  if (!tried.defined()) return tried;
  std::vector<int64_t> shape;
  for (int64_t size : tried.sizes()) {
    shape.push_back(sizes.large(size));
    if (shape.back() < 0) refuse(op, "the size of its result cannot be told");
  }
  return at::empty(shape, tried.options().device(at::kMeta));
}

// The tensor that a result is the same as: of an in-place operator, or one that writes to `out`.
const c10::IValue* written(const c10::FunctionSchema& schema, const torch::jit::Stack& arguments,
                           size_t which) {
  const c10::AliasInfo* alias = schema.returns()[which].alias_info();
  if (!alias || !alias->isWrite()) return nullptr;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* own = schema.arguments()[i].alias_info();
    if (own && own->isWrite() && own->beforeSets() == alias->beforeSets()) return &arguments[i];
  }
  return nullptr;
}

void size_by_trial(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  // What LibTorch's own fallback says.
  TORCH_CHECK_NOT_IMPLEMENTED(shard::dry_run::on(), schema.operator_name(),
                              ": there is no kernel for the meta device.");
  if (needs_values(schema.name())) refuse(op, "its result depends on values");
  auto first = stack->end() - static_cast<int64_t>(schema.arguments().size());
  torch::jit::Stack arguments(first, stack->end());
  stack->erase(first, stack->end());

  int64_t count = 0;
  for (const c10::IValue& value : arguments) count += elements(value);
  bool all_written = !schema.returns().empty();
  for (size_t i = 0; i < schema.returns().size(); ++i)
    all_written = all_written && written(schema, arguments, i);
  torch::jit::Stack tried;
  Sizes sizes(/*as_they_are=*/count <= kSmall);
  if (!all_written) {
    for (const c10::IValue& value : arguments) tried.push_back(stand_in(value, sizes));
    try {
      op.callBoxed(&tried);
    } catch (const c10::Error& error) {
      std::string why = error.what_without_backtrace();
      refuse(op, "the meta device lacks it, and on the CPU: " + why.substr(0, why.find('\n')));
    }
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (const c10::IValue* same = written(schema, arguments, i)) {
      stack->push_back(*same);
    } else if (tried[i].isTensor()) {
      stack->push_back(result(op, tried[i].toTensor(), sizes));
    } else if (tried[i].isTensorList()) {
      std::vector<at::Tensor> tensors = tried[i].toTensorVector();
      for (at::Tensor& tensor : tensors) tensor = result(op, tensor, sizes);
      stack->push_back(std::move(tensors));
    } else {
      refuse(op, "its result depends on values");
    }
  }
}

bool is_missing(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  for (DispatchKey key : {DispatchKey::Meta, DispatchKey::CompositeExplicitAutograd,
                          DispatchKey::CompositeImplicitAutograd,
                          DispatchKey::CompositeExplicitAutogradNonFunctional})
    if (op.hasKernelForDispatchKey(key)) return false;
  return op.hasKernelForDispatchKey(DispatchKey::CPU);
}

// Of tensors without values LibTorch takes the products of attention apart, and would keep scores
// that no device keeps.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask, double dropout, bool causal,
                     std::optional<double> scale, bool grouped) {
  bool masked = mask && mask->defined();
  bool fused = shard::dry_run::on() && q.dim() == 4 && k.dim() == 4 && v.dim() == 4 &&
               q.size(3) == v.size(3) && (dropout == 0 || shard::dry_run::as_gpu()) &&
               !(masked && mask->requires_grad());
  if (fused)
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout_p=*/0,
                                                                       causal, mask, scale));
  return std::get<0>(
      at::_scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, {}, scale, grouped));
}

TORCH_LIBRARY_IMPL(aten, AutogradMeta, m) {
  m.impl("scaled_dot_product_attention", attention);
}

}  // namespace

void install_missing_operators() {
  static const bool installed = [] {
    // For good: LibTorch takes kernels away with their library.
    auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::Meta,
                                       __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (!name.name.starts_with("aten::")) continue;
      auto op = c10::Dispatcher::singleton().findOp(name);
      if (!op || !op->hasSchema() || !is_missing(*op)) continue;
      std::string full =
          name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&size_by_trial>());
    }
    return true;
  }();
  (void)installed;
}

}  // namespace fsdp::memory
