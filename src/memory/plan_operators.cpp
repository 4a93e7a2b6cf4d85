#include "memory/plan_operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/format.h"
#include "fsdp/error.h"
#include "shard/dry_run.h"

namespace fsdp::memory {
namespace {

constexpr int64_t kFewElements = 1 << 18;  // up to this many are tried at full size

// Operators whose result sizes depend on values.
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
  throw Error(formatted("a plan can't run {}: {}.", op.schema().name(), why),
              "a plan runs the step on the meta device, without values: leave code that reads "
              "values out of the planned step, and create tensors on step.device.");
}

// Maps large sizes to small primes, so that each can be recognized in the sizes of a result.
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
    if (shape.back() < 0) refuse(op, "the size of its result is unknown");
  }
  return at::empty(shape, tried.options().device(at::kMeta));
}

// The argument that a result aliases: of an in-place operator, or one that writes to `out`.
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
  // Outside of dry runs, fails as LibTorch's own fallback does.
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
  Sizes sizes(/*as_they_are=*/count <= kFewElements);
  if (!all_written) {
    for (const c10::IValue& value : arguments) tried.push_back(stand_in(value, sizes));
    try {
      op.callBoxed(&tried);
    } catch (const c10::Error& error) {
      std::string why = error.what_without_backtrace();
      refuse(op, "it has no meta kernel and failed on the CPU: " + why.substr(0, why.find('\n')));
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

// On the meta device LibTorch would compute attention with separate products and keep the scores,
// which no device keeps.
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

// One layer and direction of an LSTM as the CPU computes it: one product for all inputs, then step
// by step. On a device that it doesn't know, LibTorch would compute every product step by step. On
// GPUs cuDNN keeps about as much: it too has one gradient per weight, not one per step.
struct LstmLayer {
  at::Tensor w_ih, w_hh, b_ih, b_hh;

  at::Tensor operator()(const at::Tensor& x, at::Tensor& h, at::Tensor& c, bool reverse) const {
    std::vector<at::Tensor> inputs = at::linear(x, w_ih, b_ih).unbind(0);
    if (reverse) std::reverse(inputs.begin(), inputs.end());
    std::vector<at::Tensor> outputs;
    for (const at::Tensor& input : inputs) {
      std::vector<at::Tensor> gates = at::linear(h, w_hh, b_hh).add_(input).unsafe_chunk(4, 1);
      at::Tensor in = gates[0].sigmoid_(), forget = gates[1].sigmoid_(), cell = gates[2].tanh_(),
                 out = gates[3].sigmoid_();
      c = (forget * c).add_(in * cell);
      h = out * c.tanh();
      outputs.push_back(h);
    }
    if (reverse) std::reverse(outputs.begin(), outputs.end());
    return at::stack(outputs, 0);
  }
};

using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Three lstm(const at::Tensor& input, at::TensorList hx, at::TensorList params, bool biases,
           int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  const size_t each = biases ? 4 : 2, directions = bidirectional ? 2 : 1;
  const auto count = static_cast<size_t>(layers) * directions;
  if (!shard::dry_run::on() || params.size() != count * each)
    return at::native::lstm(input, hx, params, biases, layers, dropout, train, bidirectional,
                            batch_first);
  at::Tensor x = batch_first ? input.transpose(0, 1) : input;
  std::vector<at::Tensor> h = hx[0].unbind(0), c = hx[1].unbind(0);
  for (size_t layer = 0; layer < static_cast<size_t>(layers); ++layer) {
    std::vector<at::Tensor> outputs;
    for (size_t d = 0; d < directions; ++d) {
      size_t i = layer * directions + d;
      const at::Tensor* own = &params[i * each];
      LstmLayer run{own[0], own[1], biases ? own[2] : at::Tensor(), biases ? own[3] : at::Tensor()};
      outputs.push_back(run(x, h[i], c[i], /*reverse=*/d == 1));
    }
    x = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout > 0 && train && layer + 1 < static_cast<size_t>(layers))
      x = at::dropout(x, dropout, train);
  }
  return {batch_first ? x.transpose(0, 1) : x, at::stack(h, 0), at::stack(c, 0)};
}

TORCH_LIBRARY_IMPL(aten, AutogradMeta, m) {
  m.impl("scaled_dot_product_attention", attention);
  m.impl("lstm.input", lstm);
}

}  // namespace

void install_missing_operators() {
  static const bool installed = [] {
    // Never freed: LibTorch removes kernels with their library.
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
