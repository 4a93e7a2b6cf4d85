// Where the time of a step went, in the categories of PyTorch's profiler: kernels, copies, fills,
// calls of the runtime, loading of data, work of the CPU, and the rest.
//
// Things overlap, so every moment is given to the first of these that was going on; what is left of
// the time is "other". The parts then add up to the whole.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::cli {

enum class Activity { kKernel, kMemcpy, kMemset, kRuntime, kLoading, kCpu };
inline constexpr size_t kParts = 7;  // the activities in their order, then the rest
const char* part_name(size_t part);

struct Span {  // something that was going on, in nanoseconds of any clock
  Activity activity;
  int64_t begin, end;
};

// Nanoseconds of [begin, end) for each part.
std::array<int64_t, kParts> split(const std::vector<Span>& spans, int64_t begin, int64_t end);

// In hundredths of a percent, rounded so that they add up to 10000 (to 0 if all parts are 0).
std::array<int64_t, kParts> shares(const std::array<int64_t, kParts>& parts);

}  // namespace fsdp::cli
