#include "observe/trace.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdlib>
#include <fstream>
#include <set>

#include "base/format.h"
#include "fsdp/error.h"
#include "fsdp/profile.h"

namespace fsdp::observe {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

}  // namespace

void Trace::start() {
  if (torch::profiler::impl::profilerType() != torch::profiler::impl::ActiveProfilerType::NONE)
    throw Error("a trace is already being recorded in this process.",
                "save it first: LibTorch has only one profiler.");
  std::set<ActivityType> activities{ActivityType::CPU};
  if (at::hasCUDA())
    activities.insert(ActivityType::CUDA);
  else
    setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);  // else it prints that there is no GPU
  torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(config, activities);
  on_ = true;
}

void Trace::save(const std::string& path) {
  on_ = false;
  if (at::hasCUDA()) {  // the last kernels would be missing otherwise
    c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
    cuda.synchronizeDevice(cuda.getDevice().index());
  }
  auto result = kineto::disableProfiler();
  if (!std::ofstream(path))  // kineto would only log it
    throw Error(formatted("can't write the trace to {}.", path),
                "check that the directory exists, and its permissions.");
  result->save(path);
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
