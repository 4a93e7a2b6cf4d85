#include "memory/plan_meter.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "memory/plan_blocks.h"
#include "shard/dry_run.h"
#include "shard/saved_activations.h"

namespace fsdp::memory {

struct Counted {  // a counted storage, which may outlive the meter
  std::shared_ptr<MeterState> state;
  int64_t asked = 0, bytes = 0;
  Blocks::Block* block = nullptr;
  const void* logits = nullptr;  // the storage, if it holds logits
};

struct MeterState {
  bool blocks = false;
  Blocks placed;
  std::set<Counted*> logits;
  Counted* taken_over = nullptr;  // memory that the next allocation reuses: a sum of gradients
  int nodes = 0, losses = 0;      // currently running, nested
  bool peak_in_loss = false;
  int64_t live = 0, peak = 0, peak_held = 0, allocated = 0;
  std::function<void()> watch;

  void added(int64_t bytes) {
    if (watch) watch();
    live += bytes;
    allocated += bytes;
    if (live > peak) {
      peak = live;
      peak_in_loss = losses > 0;
    }
    if (blocks) peak_held = std::max(peak_held, placed.held());
  }

  // Memory that a kernel allocates and frees while it runs.
  void passing(int64_t bytes) {
    if (live + bytes > peak) {
      peak = live + bytes;
      peak_in_loss = false;
    }
    if (!blocks || bytes == 0) return;
    Blocks::Block* block = placed.allocate(bytes);
    peak_held = std::max(peak_held, placed.held());
    placed.release(block);
  }
};

namespace {

std::shared_ptr<MeterState>& current_meter() {
  return shard::this_thread().dry_run.meter;
}

void forget(void* context) {
  auto* counted = static_cast<Counted*>(context);
  if (counted->logits) counted->state->logits.erase(counted);
  if (counted->state->taken_over == counted) counted->state->taken_over = nullptr;
  counted->state->live -= counted->bytes;
  if (counted->block) counted->state->placed.release(counted->block);
  delete counted;
}

class MetaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const std::shared_ptr<MeterState>& meter = current_meter();
    if (!meter || bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, at::kMeta};
    auto* counted = new Counted{meter, static_cast<int64_t>(bytes), static_cast<int64_t>(bytes)};
    Counted* before = std::exchange(meter->taken_over, nullptr);
    if (before && before->asked == counted->asked) {
      counted->bytes = std::exchange(before->bytes, 0);
      counted->block = std::exchange(before->block, nullptr);
      return {nullptr, counted, &forget, at::kMeta};
    }
    if (meter->blocks) {
      counted->block = meter->placed.allocate(counted->bytes);
      counted->bytes = counted->block->size;
    }
    meter->added(counted->bytes);
    return {nullptr, counted, &forget, at::kMeta};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::detail::deleteNothing; }
  void copy_data(void*, const void*, size_t) const override {}
};

// LibTorch never removes an allocator; without a meter this one does nothing.
void install_meter() {
  static const bool installed = [] {
    static MetaAllocator allocator;
    c10::SetAllocator(at::kMeta, &allocator, /*priority=*/1);
    return true;
  }();
  (void)installed;
}

// --- operations ---

double numel(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined()
             ? static_cast<double>(value.toTensor().numel())
             : 0;
}

double size(const c10::IValue& value, int64_t dim) {
  return static_cast<double>(value.toTensor().size(dim));
}

// The flops of an operator, from its arguments. Composite operators count through their parts.
double flops_of(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  if (name == "fsdp::fp8_mm") return 2 * numel(inputs[0]) * size(inputs[2], 0);
  if (name == "fsdp::fp8_mm_into") return 2 * numel(inputs[1]) * size(inputs[3], 0);
  if (name == "fsdp::grouped_mm")
    return 2 * numel(inputs[0]) * size(inputs[1], inputs[3].toBool() ? 2 : 1);
  if (name == "fsdp::grouped_mm_into") return 2 * numel(inputs[1]) * size(inputs[2], 1);
  if (!name.starts_with("aten::")) return 0;
  name.remove_prefix(6);
  if (name == "mm" || name == "bmm") return 2 * numel(inputs[0]) * size(inputs[1], -1);
  if (name == "addmm" || name == "addmm_" || name == "baddbmm")
    return 2 * numel(inputs[1]) * size(inputs[2], -1);
  if (name == "_scaled_dot_product_flash_attention_for_cpu") {  // two products
    double causal = inputs[4].isBool() && inputs[4].toBool() ? 0.5 : 1;
    return 4 * causal * numel(inputs[0]) * size(inputs[1], 2);
  }
  if (name == "_scaled_dot_product_flash_attention_for_cpu_backward") {  // five
    double causal = inputs[7].isBool() && inputs[7].toBool() ? 0.5 : 1;
    return 10 * causal * numel(inputs[1]) * size(inputs[2], 2);
  }
  // Counts forward (one product) and backward (two) together: the output's size is an argument
  // here, and would have to be computed in forward.
  if (name == "convolution_backward")
    return 6 * numel(inputs[0]) * numel(inputs[2]) / std::max(1.0, size(inputs[2], 0));
  return 0;
}

// The operands, plus a result about as large as one of them.
double input_bytes(c10::ArrayRef<const c10::IValue> inputs) {
  double bytes = 0;
  for (const c10::IValue& value : inputs)
    if (value.isTensor() && value.toTensor().defined())
      bytes += static_cast<double>(value.toTensor().nbytes());
  return 1.5 * bytes;
}

Counted* counted_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->data_ptr();
  return data.get_deleter() == &forget ? static_cast<Counted*>(data.get_context()) : nullptr;
}

// The gradient that autograd would accumulate into in place on any other device. That happens
// between two nodes, for a gradient without other references; one reference is the callback's.
Counted* summed(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  if (name != "aten::add" || at::GradMode::is_enabled() || !inputs[0].isTensor()) return nullptr;
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  if (!in_backward || current_meter()->nodes > 0) return nullptr;
  const at::Tensor& sum = inputs[0].toTensor();
  Counted* counted = counted_of(sum);
  bool own = counted && sum.use_count() == 2 && sum.storage().use_count() == 1;
  return own && sum.is_non_overlapping_and_dense() ? counted : nullptr;
}

void mark_logits(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return;
  const at::Tensor& tensor = value.toTensor();
  Counted* counted = tensor.is_floating_point() ? counted_of(tensor) : nullptr;
  if (!counted || counted->logits) return;
  counted->logits = tensor.storage().unsafeGetStorageImpl();
  counted->state->logits.insert(counted);
}

// Alive while a loss over classes, a sum of gradients or a node of autograd's graph runs.
struct InLoss : at::ObserverContext {
  explicit InLoss(std::shared_ptr<MeterState> of) : state(std::move(of)) { ++state->losses; }
  ~InLoss() override { --state->losses; }
  std::shared_ptr<MeterState> state;
};
struct InSum : at::ObserverContext {
  InSum(std::shared_ptr<MeterState> of, Counted* sum) : state(std::move(of)) {
    state->taken_over = sum;
  }
  ~InSum() override { state->taken_over = nullptr; }
  std::shared_ptr<MeterState> state;
};
struct InNode : at::ObserverContext {
  explicit InNode(std::shared_ptr<MeterState> of) : state(std::move(of)) { ++state->nodes; }
  ~InNode() override { --state->nodes; }
  std::shared_ptr<MeterState> state;
};

// Losses over classes, ours and LibTorch's: the index of the argument that holds the logits or
// what was computed from them; -1 for other operators.
int logits_of(std::string_view name) {
  if (name == "aten::_log_softmax" || name == "aten::nll_loss_forward" ||
      name == "aten::nll_loss2d_forward" || name == "aten::binary_cross_entropy_with_logits" ||
      name == "fsdp::cross_entropy" || name == "fsdp::cross_entropy_")
    return 0;
  if (name == "aten::_log_softmax_backward_data" || name == "aten::nll_loss_backward" ||
      name == "aten::nll_loss2d_backward" || name == "fsdp::cross_entropy_backward")
    return 1;
  return -1;
}

// Libraries compute convolutions in a layout of their own, which takes a copy of the kernel's
// inputs and outputs.
struct InConvolution : at::ObserverContext {
  bool forward = false;
  int64_t bytes = 0;

  void add(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined())
      bytes += static_cast<int64_t>(value.toTensor().nbytes());
  }
};

std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& function) {
  if (!current_meter()) return nullptr;
  std::string_view name = function.name();
  c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  double flops = flops_of(name, inputs);
  const double speed = name.starts_with("fsdp::fp8") ? 2 : 1;
  if (flops > 0) shard::dry_run::count_product({flops, input_bytes(inputs), speed});
  if (Counted* sum = summed(name, inputs)) return std::make_unique<InSum>(current_meter(), sum);
  if (name == "aten::convolution" || name == "aten::convolution_backward") {
    auto kernel = std::make_unique<InConvolution>();
    kernel->forward = name == "aten::convolution";
    for (const c10::IValue& input : inputs) kernel->add(input);
    return kernel;
  }
  int logits = logits_of(name);
  if (logits < 0) return nullptr;
  mark_logits(inputs[static_cast<size_t>(logits)]);
  return std::make_unique<InLoss>(current_meter());
}

void seen(const at::RecordFunction& function, at::ObserverContext* context) {
  if (!current_meter()) return;
  if (auto* kernel = dynamic_cast<InConvolution*>(context)) {
    if (kernel->forward)
      for (const c10::IValue& output : function.outputs()) kernel->add(output);
    current_meter()->passing(kernel->bytes);
  }
  if (dynamic_cast<InLoss*>(context))
    for (const c10::IValue& made : function.outputs()) mark_logits(made);
}

std::unique_ptr<at::ObserverContext> see_node(const at::RecordFunction&) {
  return current_meter() ? std::make_unique<InNode>(current_meter()) : nullptr;
}

}  // namespace

Meter::Meter(bool blocks) : state_(std::make_shared<MeterState>()) {
  install_meter();
  state_->blocks = blocks;
  current_meter() = state_;
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&see, &seen)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  nodes_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&see_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

Meter::~Meter() {
  at::removeCallback(callback_);
  at::removeCallback(nodes_);
  state_->watch = {};
  current_meter().reset();
}

int64_t Meter::live() const {
  return state_->live;
}
Meter::Logits Meter::logits() const {
  Logits sum;
  for (const Counted* counted : state_->logits) {
    sum.all += counted->bytes;
    if (shard::saved_activations::holds(counted->logits)) sum.saved += counted->bytes;
  }
  return sum;
}
int64_t Meter::peak() const {
  return state_->peak;
}
bool Meter::peak_in_loss() const {
  return state_->peak_in_loss;
}
int64_t Meter::peak_held() const {
  return state_->peak_held;
}
int64_t Meter::allocated() const {
  return state_->allocated;
}

void Meter::begin(std::function<void()> watch) {
  state_->peak = state_->live;
  state_->peak_in_loss = false;
  state_->peak_held = state_->blocks ? state_->placed.held() : 0;
  state_->allocated = 0;
  state_->watch = std::move(watch);
}

}  // namespace fsdp::memory
