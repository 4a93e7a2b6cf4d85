// Peak speeds of known GPUs, model FLOPs utilization (MFU), and short forms of numbers.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace fsdp::observe {

// The vendor's TFLOP/s for dense matrix products on tensor cores (no sparsity, no overclocking).
// `device`: the driver's name for it. `precision`: bf16, fp16, fp8 (bf16's), tf32 or fp32. nullopt:
// unknown.
std::optional<double> peak_tflops(std::string_view device, std::string_view precision);

// Share of the peak, 0..1; nullopt if the peak is unknown or 0.
std::optional<double> mfu(double tflops, std::optional<double> peak);

std::string human_count(double number);     // "950", "12.3k", "1.24M", "3.1B", "1.2T"
std::string human_seconds(double seconds);  // "42 s", "3 min 05 s", "1 h 03 min", "2 d 04 h"

}  // namespace fsdp::observe
