#include "observe/throughput.h"

#include <cmath>

#include "base/format.h"

namespace fsdp::observe {
namespace {

struct Peak {
  std::string_view part;  // of the device's name
  double bf16;            // and fp16, on all of these
  double tf32;
  double fp32;  // without tensor cores
};

// The first match counts, so special names come before general ones. Dense TFLOP/s from the
// vendor's data sheets, which often print the figure with sparsity (twice as much).
constexpr Peak kPeaks[] = {
    {"GB200", 2500, 1250, 80},       {"B200", 2250, 1125, 75},    {"H200 NVL", 835.5, 417.5, 60},
    {"H200", 989.5, 494.5, 67},      {"GH200", 989.5, 494.5, 67}, {"H100 NVL", 835.5, 417.5, 60},
    {"H100 PCIe", 756.5, 378, 51},   {"H100", 989.5, 494.5, 67},  {"H800", 989.5, 494.5, 67},
    {"A100", 312, 156, 19.5},        {"A800", 312, 156, 19.5},    {"L40S", 362, 183, 91.6},
    {"RTX 4090", 165.2, 82.6, 82.6},
};

// Smaller chips that share a name with a larger one.
bool is_lesser(std::string_view device) {
  return device.find("Laptop") != std::string_view::npos || device.ends_with(" D") ||
         device.find(" MIG ") != std::string_view::npos;
}

std::string with_unit(double value, const char* unit) {
  return formatted("{:.{}f}{}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, unit);
}

}  // namespace

std::optional<double> peak_tflops(std::string_view device, std::string_view precision) {
  for (const Peak& peak : kPeaks) {
    if (device.find(peak.part) == std::string_view::npos) continue;
    if (is_lesser(device)) return {};
    // A run in fp8 is measured against bf16's, as others do: the shares can be compared.
    if (precision == "bf16" || precision == "fp16" || precision == "fp8") return peak.bf16;
    if (precision == "tf32") return peak.tf32;
    if (precision == "fp32") return peak.fp32;
    return {};
  }
  return {};
}

std::optional<double> mfu(double tflops, std::optional<double> peak) {
  if (!peak || *peak <= 0) return {};
  return tflops / *peak;
}

std::string human_count(double number) {
  if (!std::isfinite(number)) return "?";
  const char* units[] = {"k", "M", "B", "T"};
  if (std::abs(number) < 999.5) return std::to_string(std::lround(number));
  int unit = -1;
  while (std::abs(number) >= 999.5 && unit < 3) number /= 1000, ++unit;
  return with_unit(number, units[unit]);
}

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e11) return "?";
  if (seconds < 9.95) return formatted("{:.1f} s", seconds);
  long long whole = std::llround(seconds), minutes = whole / 60, hours = minutes / 60;
  if (whole < 60) return formatted("{} s", whole);
  if (hours == 0) return formatted("{} min {:02} s", minutes, whole % 60);
  if (hours < 48) return formatted("{} h {:02} min", hours, minutes % 60);
  return formatted("{} d {:02} h", hours / 24, hours % 24);
}

}  // namespace fsdp::observe
