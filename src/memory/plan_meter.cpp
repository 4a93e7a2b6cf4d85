#include "memory/plan_meter.h"

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "memory/plan_blocks.h"
#include "shard/dry_run.h"

namespace fsdp::memory {

struct Meter::State {
  bool blocks = false;
  Blocks placed;
  int64_t live = 0, peak = 0, peak_held = 0, allocated = 0;
  std::function<void()> watch;

  void added(int64_t bytes) {
    if (watch) watch();
    live += bytes;
    allocated += bytes;
    peak = std::max(peak, live);
    if (blocks) peak_held = std::max(peak_held, placed.held());
  }
};

namespace {

thread_local std::shared_ptr<Meter::State> current;

struct Counted {  // a storage's part of the count, which may outlive the meter
  std::shared_ptr<Meter::State> state;
  int64_t bytes = 0;
  Blocks::Block* block = nullptr;
};

void forget(void* context) {
  auto* counted = static_cast<Counted*>(context);
  counted->state->live -= counted->bytes;
  if (counted->block) counted->state->placed.release(counted->block);
  delete counted;
}

class MetaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (!current || bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, at::kMeta};
    auto* counted = new Counted{current, static_cast<int64_t>(bytes)};
    if (current->blocks) {
      counted->block = current->placed.allocate(counted->bytes);
      counted->bytes = counted->block->size;
    }
    current->added(counted->bytes);
    return {nullptr, counted, &forget, at::kMeta};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::detail::deleteNothing; }
  void copy_data(void*, const void*, size_t) const override {}
};

// LibTorch keeps allocators for good, and this one does nothing where nobody counts.
void install() {
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

// Of an operator by its arguments. Those made of others are not here: their parts are.
double flops_of(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
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
  // The forward has the same product once, the backward twice; what the forward's output is has to
  // be worked out there, and stands in the arguments here.
  if (name == "convolution_backward")
    return 6 * numel(inputs[0]) * numel(inputs[2]) / std::max(1.0, size(inputs[2], 0));
  return 0;
}

// Operands, and a result that is about as large as one of them.
double bytes_of(c10::ArrayRef<const c10::IValue> inputs) {
  double bytes = 0;
  for (const c10::IValue& value : inputs)
    if (value.isTensor() && value.toTensor().defined())
      bytes += static_cast<double>(value.toTensor().nbytes());
  return 1.5 * bytes;
}

std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& function) {
  if (!current) return nullptr;
  double flops = flops_of(function.name(), function.inputs());
  if (flops > 0) shard::dry_run::count_product({flops, bytes_of(function.inputs())});
  return nullptr;
}

}  // namespace

Meter::Meter(bool blocks) : state_(std::make_shared<State>()) {
  install();
  state_->blocks = blocks;
  current = state_;
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&see).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

Meter::~Meter() {
  at::removeCallback(callback_);
  state_->watch = {};
  current.reset();
}

int64_t Meter::live() const {
  return state_->live;
}
int64_t Meter::peak() const {
  return state_->peak;
}
int64_t Meter::peak_held() const {
  return state_->peak_held;
}
int64_t Meter::allocated() const {
  return state_->allocated;
}

void Meter::begin(std::function<void()> watch) {
  state_->peak = state_->live;
  state_->peak_held = state_->blocks ? state_->placed.held() : 0;
  state_->allocated = 0;
  state_->watch = std::move(watch);
}

}  // namespace fsdp::memory
