// Splits the time of a step into the categories of PyTorch's profiler: kernels, copies, fills,
// runtime calls, data loading, CPU work, and the rest.
//
// Activities overlap, so each instant counts for the first category that was active; instants
// without any are "other". The parts add up to the whole.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::observe {

enum class Activity { kKernel, kMemcpy, kMemset, kRuntime, kLoading, kCpu };
inline constexpr std::size_t kParts = 7;  // the activities in order, then "other"
const char* part_name(std::size_t part);

struct Span {  // when an activity ran, in nanoseconds of any clock
  Activity activity;
  int64_t begin, end;
};

// Nanoseconds of [begin, end) for each part.
std::array<int64_t, kParts> split(const std::vector<Span>& spans, int64_t begin, int64_t end);

// In hundredths of a percent, rounded so that they add up to 10000 (to 0 if all parts are 0).
std::array<int64_t, kParts> shares(const std::array<int64_t, kParts>& parts);

}  // namespace fsdp::observe
