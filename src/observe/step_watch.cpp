#include "observe/step_watch.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/ApproximateClock.h>

#include <algorithm>
#include <map>

#include "base/mutex.h"
#include "shard/profile.h"

namespace fsdp::observe {
namespace {

struct Seen {
  Mutex mutex;
  std::vector<UnitMark> marks FSDP_GUARDED_BY(mutex);
  std::vector<ProductCall> products FSDP_GUARDED_BY(mutex);
  std::map<int64_t, std::string> now FSDP_GUARDED_BY(mutex);  // unit of each thread
};

// LibTorch's callbacks are plain functions, so they find it here.
Seen& seen_operators() {
  static Seen seen;
  return seen;
}

void mark(const std::string& unit) {
  const auto lane = static_cast<int64_t>(at::RecordFunction::currentThreadId());
  Seen& seen = seen_operators();
  const Lock lock(seen.mutex);
  std::string& current = seen.now[lane];
  if (current == unit) return;
  current = unit;
  seen.marks.push_back({c10::getTime(), lane, unit});
}

// Of a [..., m, k] times [..., k, n]; `a` is the place of the first factor among the inputs.
double product_flops(c10::ArrayRef<const c10::IValue> inputs, size_t a) {
  if (inputs.size() < a + 2 || !inputs[a].isTensor() || !inputs[a + 1].isTensor()) return 0;
  const at::Tensor& left = inputs[a].toTensor();
  const at::Tensor& right = inputs[a + 1].toTensor();
  if (!left.defined() || !right.defined() || left.dim() < 2 || right.dim() < 2) return 0;
  return 2.0 * static_cast<double>(left.numel()) * static_cast<double>(right.size(-1));
}

double flops_of_call(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::_grouped_mm")
    return product_flops(inputs, 0);
  if (name == "aten::addmm" || name == "aten::baddbmm") return product_flops(inputs, 1);
  return 0;
}

std::unique_ptr<at::ObserverContext> see_operator(const at::RecordFunction& function) {
  for (const c10::IValue& input : function.inputs()) {
    if (!input.isTensor()) continue;
    if (const std::string* unit = shard::unit_of_parameter(input.toTensor())) {
      mark(*unit);
      break;
    }
  }
  if (const double flops = flops_of_call(function.name(), function.inputs()); flops > 0) {
    Seen& seen = seen_operators();
    const Lock lock(seen.mutex);
    seen.products.push_back({c10::getTime(), flops});
  }
  return nullptr;
}

template <typename Item>
std::vector<Item> by_time(std::vector<Item> items) {
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) { return a.at < b.at; });
  return items;
}

}  // namespace

StepWatch::StepWatch() {
  Seen& seen = seen_operators();
  {
    const Lock lock(seen.mutex);
    seen.marks.clear();
    seen.products.clear();
    seen.now.clear();
  }
  callback_ = at::addGlobalCallback(at::RecordFunctionCallback(&see_operator)
                                        .needsInputs(true)
                                        .scopes({at::RecordScope::FUNCTION}));
}

StepWatch::~StepWatch() {
  at::removeCallback(callback_);
}

std::vector<UnitMark> StepWatch::marks() const {
  Seen& seen = seen_operators();
  const Lock lock(seen.mutex);
  return by_time(seen.marks);
}

std::vector<ProductCall> StepWatch::products() const {
  Seen& seen = seen_operators();
  const Lock lock(seen.mutex);
  return by_time(seen.products);
}

}  // namespace fsdp::observe
