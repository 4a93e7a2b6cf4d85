#include "memory/operator_facts.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <unordered_map>

#include "base/mutex.h"

namespace fsdp::memory {
namespace {

using Names = std::initializer_list<std::string_view>;

bool in(std::string_view name, const Names& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool holds_tensors(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (auto list = type->cast<c10::ListType>()) type = list->getElementType();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::TensorType;
}

// Their results may be filled through the data pointer, which can't be observed.
bool makes_empty(std::string_view name) {
  return in(name, {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
                   "new_empty_strided"});
}
bool makes_constant(std::string_view name) {
  return in(name, {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
                   "randint_like", "new_zeros", "new_ones", "new_full"});
}

// Writes in place without reading the old contents.
bool overwrites(std::string_view name) {
  return in(name, {"zero_", "fill_", "copy_", "normal_", "uniform_", "bernoulli_", "random_",
                   "exponential_", "geometric_", "cauchy_", "log_normal_"});
}

bool is_expensive(std::string_view name) {
  return in(name, {"mm",
                   "addmm",
                   "_addmm_activation",
                   "bmm",
                   "baddbmm",
                   "addbmm",
                   "mv",
                   "addmv",
                   "linear",
                   "mkldnn_linear",
                   "_scaled_mm",
                   "fp8_mm",
                   "_grouped_mm",
                   "_scaled_grouped_mm",
                   "grouped_mm",
                   "convolution",
                   "_convolution",
                   "convolution_overrideable",
                   "mkldnn_convolution",
                   "cudnn_convolution",
                   "cudnn_convolution_transpose",
                   "_slow_conv2d_forward",
                   "slow_conv3d_forward",
                   "_conv_depthwise2d",
                   "conv_depthwise3d",
                   "slow_conv_transpose2d",
                   "slow_conv_transpose3d",
                   "mkldnn_rnn_layer"}) ||
         name.find("scaled_dot_product") != std::string_view::npos ||
         name.find("flash_attention") != std::string_view::npos ||
         name.find("efficient_attention") != std::string_view::npos;
}

bool has_kernel(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return op.hasKernelForDispatchKey(key);
}

}  // namespace

OperatorFacts::OperatorFacts(const c10::OperatorHandle& handle) : op(handle) {
  const c10::FunctionSchema& schema = op.schema();
  std::string_view full = schema.name();
  size_t colons = full.find("::");
  std::string_view library = full.substr(0, colons), name = full.substr(colons + 2);
  bool known = library == "aten" || library == "fsdp" || library == "prims";

  bool any_tensor = false;
  for (const c10::Argument& argument : schema.arguments()) {
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    bool whole = written && (argument.is_out() || (library == "aten" && overwrites(name)));
    arguments.push_back(whole ? kOverwrites : written ? kWrites : kReads);
    writes |= written;
    any_tensor |= holds_tensors(argument);
    if (argument.name() == "dropout_p") dropout = static_cast<int>(arguments.size()) - 1;
    if (argument.type()->kind() == c10::TypeKind::StorageType) unknown = true;
  }
  bool aliases = !schema.returns().empty(), tensors = false;
  for (const c10::Argument& result : schema.returns()) {
    aliases &= result.alias_info() != nullptr;
    tensors |= holds_tensors(result);
  }
  composite = has_kernel(op, c10::DispatchKey::CompositeImplicitAutograd) &&
              !has_kernel(op, c10::DispatchKey::CPU) && !has_kernel(op, c10::DispatchKey::CUDA);
  view = aliases && !writes;
  unknown |= !known && schema.aliasAnalysis() == c10::AliasAnalysisKind::CONSERVATIVE;
  unknown |= in(name, {"set_", "resize_", "resize_as_"});
  bool moves_only = false;
  for (at::Tag tag : op.getTags()) {
    random |= tag == at::Tag::nondeterministic_seeded;
    moves_only |= tag == at::Tag::inplace_view;  // t_(), unsqueeze_(): sizes and strides
  }
  if (moves_only && !unknown) view = true;
  empty = library == "aten" && makes_empty(name) && !writes;
  kept = !empty && !writes &&
         (!tensors || !any_tensor || makes_constant(name) ||
          in(name, {"_cudnn_rnn", "_cudnn_init_dropout_state", "miopen_rnn", "topk"}));
  expensive = known && is_expensive(name);
  adds = library == "fsdp" && in(name, {"rms_norm", "layer_norm", "fp8_rms_norm"});
  batch_norm = in(name, {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}) && !writes;
}

bool draws(const OperatorFacts& facts, const torch::jit::Stack& stack) {
  if (!facts.random || facts.dropout < 0) return facts.random;
  const c10::IValue& chance = stack[stack.size() - facts.arguments.size() + facts.dropout];
  return !chance.isDouble() || chance.toDouble() != 0;
}

const OperatorFacts& facts_of(const c10::OperatorHandle& op) {
  static Mutex mutex;
  static auto* all FSDP_PT_GUARDED_BY(mutex) =
      new std::unordered_map<c10::OperatorHandle, std::unique_ptr<OperatorFacts>>;
  // Per thread, so that an operator doesn't take the lock each time.
  static thread_local std::unordered_map<c10::OperatorHandle, const OperatorFacts*> known;
  const OperatorFacts*& facts = known[op];
  if (facts) return *facts;
  Lock lock(mutex);
  std::unique_ptr<OperatorFacts>& first = (*all)[op];
  if (!first) first = std::make_unique<OperatorFacts>(op);
  return *(facts = first.get());
}

}  // namespace fsdp::memory
