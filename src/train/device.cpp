#include "train/device.h"

#include <ATen/Context.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/resource.h>

#include <cstdlib>

#include "comm/modules.h"

namespace fsdp::train {

std::string device_name(at::Device device) {
  if (!device.is_cuda()) return "";
  const comm::Module* cuda = comm::find_module("cuda");
  return cuda && cuda->device_name ? cuda->device_name(device.index()) : "";
}

namespace {

constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

c10::CachingDeviceAllocator::DeviceStats stats_of(at::Device device) {
  return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
}

}  // namespace

int64_t peak_memory(at::Device device) {
  return device.is_cpu() ? 0 : stats_of(device).allocated_bytes[kAll].peak;
}

double peak_reserved_mb(at::Device device) {
  if (device.is_cpu()) return peak_memory_mb(device);
  return static_cast<double>(stats_of(device).reserved_bytes[kAll].peak) / (1 << 20);
}

void reset_peak_memory(at::Device device) {
  if (!device.is_cpu()) c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
}

double peak_memory_mb(at::Device device) {
  if (!device.is_cpu()) return static_cast<double>(peak_memory(device)) / (1 << 20);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;  // KiB
}

std::optional<double> memory_share(at::Device device) {
  if (device.is_cpu()) return std::nullopt;
  auto [free, total] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
  if (total == 0) return std::nullopt;
  return peak_memory_mb(device) * (1 << 20) / static_cast<double>(total);
}

int64_t allocator_retries(at::Device device) {
  return device.is_cpu() ? 0 : stats_of(device).num_alloc_retries;
}

void prepare_allocator(at::Device device) {
  if (device.is_cpu() || getenv("PYTORCH_CUDA_ALLOC_CONF") || getenv("PYTORCH_ALLOC_CONF")) return;
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
}

void synchronize(at::Device device) {
  if (!device.is_cpu())
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

void set_deterministic(bool on) {
  // cuBLAS reads it when it creates its first handle. The user's own value wins.
  if (on) setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/false);
  at::globalContext().setDeterministicCuDNN(on);
  if (on) at::globalContext().setBenchmarkCuDNN(false);
}

}  // namespace fsdp::train
