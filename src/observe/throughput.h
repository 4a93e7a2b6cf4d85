// How fast is fast: the peaks of known GPUs, and what share of one a model reaches (MFU).
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace fsdp::observe {

// TFLOP/s of dense matrix products on the tensor cores, by the name that the driver gives the
// device, as its vendor states them (no sparsity, no overclocking). `precision`: bf16, fp16, tf32
// or fp32. nullopt: not known.
std::optional<double> peak_tflops(std::string_view device, std::string_view precision);

// Share of the peak, 0..1; nullopt where the peak is not known (or 0).
std::optional<double> mfu(double tflops, std::optional<double> peak);

std::string human_count(double number);     // "950", "12.3k", "1.24M", "3.1B", "1.2T"
std::string human_seconds(double seconds);  // "42 s", "3 min 05 s", "1 h 03 min", "2 d 04 h"

}  // namespace fsdp::observe
