// What the trainer asks of the device it computes on.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string>

namespace fsdp::train {

std::string device_name(at::Device device);  // "NVIDIA H200"; empty for the CPU
double peak_memory_mb(at::Device device);    // MiB: allocated at most on a GPU; else of the process
int64_t peak_memory(at::Device device);      // in bytes, of a GPU since reset_peak_memory; else 0
void reset_peak_memory(at::Device device);
// Of the GPU's memory, what was allocated at most; nothing for the CPU.
std::optional<double> memory_share(at::Device device);
void synchronize(at::Device device);

// From now on operators give the same bits every time, or refuse. On the CPU they do so anyway.
void set_deterministic(bool on);

}  // namespace fsdp::train
