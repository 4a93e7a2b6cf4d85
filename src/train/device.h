// Queries about the device that the trainer computes on.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>

namespace fsdp::train {

std::string device_name(at::Device device);  // "NVIDIA H200"; empty for the CPU
double peak_memory_mb(at::Device device);    // MiB: peak allocation of a GPU, else of the process
double peak_reserved_mb(at::Device device);  // MiB: what a GPU's allocator took
int64_t peak_memory(at::Device device);  // bytes: of a GPU since reset_peak_memory; 0 on the CPU
void reset_peak_memory(at::Device device);
// Peak allocation as a share of the GPU's memory; nullopt on the CPU.
std::optional<double> memory_share(at::Device device);
// How often the device's allocator had to free its cache to go on, so far.
int64_t allocator_retries(at::Device device);
// Lets a GPU's allocator grow its blocks instead of adding new ones, which is faster and wastes
// less, unless the environment configures it. Must be called before the first allocation.
void prepare_allocator(at::Device device);
void synchronize(at::Device device);

// Makes operators give the same bits every time, or fail. On the CPU they always do.
void set_deterministic(bool on);

}  // namespace fsdp::train
