#include "observe/trace.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <set>
#include <vector>

#include "base/file_error.h"
#include "base/format.h"
#include "base/regular_file.h"
#include "fsdp/error.h"
#include "fsdp/profile.h"
#include "shard/update.h"

namespace fsdp::observe {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

std::optional<Activity> activity_of(const kineto::KinetoEvent& event) {
  using Type = libkineto::ActivityType;
  switch (static_cast<Type>(event.activityType())) {
    case Type::CONCURRENT_KERNEL:
      return Activity::kKernel;
    case Type::GPU_MEMCPY:
      return Activity::kMemcpy;
    case Type::GPU_MEMSET:
      return Activity::kMemset;
    case Type::CUDA_RUNTIME:
    case Type::CUDA_DRIVER:
      return Activity::kRuntime;
    case Type::CPU_OP:
      return Activity::kCpu;
    case Type::USER_ANNOTATION:
      if (event.name() == kLoadingScope) return Activity::kLoading;
      if (event.name().ends_with(shard::kUpdateLabel)) return Activity::kCpu;
      return {};
    default:
      return {};
  }
}

std::optional<TraceSpan::Kind> kind_of(const kineto::KinetoEvent& event) {
  using Type = libkineto::ActivityType;
  switch (static_cast<Type>(event.activityType())) {
    case Type::CONCURRENT_KERNEL:
      return TraceSpan::kKernel;
    case Type::GPU_MEMCPY:
    case Type::GPU_MEMSET:
      return TraceSpan::kCopy;
    case Type::CUDA_RUNTIME:
    case Type::CUDA_DRIVER:
      return TraceSpan::kRuntime;
    case Type::CPU_OP:
      return TraceSpan::kOperator;
    case Type::USER_ANNOTATION:
      return TraceSpan::kScope;
    default:
      return {};
  }
}

void wait_for_gpu() {  // the last kernels would be missing otherwise
  if (!at::hasCUDA()) return;
  c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  cuda.synchronizeDevice(cuda.getDevice().index());
}

}  // namespace

void Trace::start(bool all_threads) {
  if (torch::profiler::impl::profilerType() != torch::profiler::impl::ActiveProfilerType::NONE)
    throw Error("a trace is already being recorded in this process.",
                "save it first: LibTorch has only one profiler.");
  std::set<ActivityType> activities{ActivityType::CPU};
  if (at::hasCUDA())
    activities.insert(ActivityType::CUDA);
  else
    setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);  // else it prints that there is no GPU
  torch::profiler::impl::ExperimentalConfig experimental;
  experimental.profile_all_threads = all_threads;
  torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO, false,
                                               false, false, false, false, experimental);
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(config, activities);
  on_ = true;
}

void Trace::save(const std::string& path) {
  on_ = false;
  wait_for_gpu();
  auto result = kineto::disableProfiler();
  if (!std::ofstream(place_of_file(path))) {  // kineto would only log it
    const int why = errno;
    throw Error(formatted("can't write the trace to {}: {}.", path, errno_text(why)),
                file_hint(why));
  }
  result->save(path);
}

std::array<int64_t, kParts> Trace::split() {
  on_ = false;
  const auto result = kineto::disableProfiler();
  std::vector<Span> spans;
  int64_t begin = 0, end = 0;
  for (const auto& event : result->events()) {
    const auto from = static_cast<int64_t>(event.startNs());
    const auto to = static_cast<int64_t>(event.endNs());
    if (event.name() == kSplitScope) begin = from, end = to;
    if (const auto activity = activity_of(event)) spans.push_back({*activity, from, to});
  }
  if (begin == end) throw Error("the profiler recorded no steps.", "run it again.");
  return observe::split(spans, begin, end);
}

std::vector<TraceSpan> Trace::spans() {
  on_ = false;
  wait_for_gpu();
  const auto result = kineto::disableProfiler();
  std::vector<TraceSpan> spans;
  for (const auto& event : result->events()) {
    const auto kind = kind_of(event);
    if (!kind || event.isHiddenEvent()) continue;
    TraceSpan span{.kind = *kind,
                   .name = event.name(),
                   .begin = static_cast<int64_t>(event.startNs()),
                   .end = static_cast<int64_t>(event.endNs())};
    const auto own = static_cast<int64_t>(event.correlationId());
    if (span.on_device()) {
      span.lane = event.deviceResourceId();
      span.from = static_cast<int64_t>(event.linkedCorrelationId());
      span.launch = own;
    } else {
      span.lane = static_cast<int64_t>(event.startThreadId());
      span.id = own;
    }
    spans.push_back(std::move(span));
  }
  std::stable_sort(spans.begin(), spans.end(),
                   [](const TraceSpan& a, const TraceSpan& b) { return a.begin < b.begin; });
  return spans;
}

Trace::~Trace() {
  if (!on_) return;
  try {
    kineto::disableProfiler();
  } catch (const std::exception&) {  // the error that ended the step is the one to report
  }
}

}  // namespace fsdp::observe

namespace fsdp {

void trace(const std::string& path, const std::function<void()>& step) {
  observe::Trace trace;
  trace.start();
  step();
  trace.save(path);
}

}  // namespace fsdp
