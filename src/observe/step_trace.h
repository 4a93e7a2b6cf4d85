// StepTrace: what LibTorch's profiler saw of one step, as plain spans, and which unit each operator
// read. step_time.h says where the time went; chrome_trace.h writes it for viewers.
//
// Times are nanoseconds of the host's wall clock.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::observe {

struct TraceSpan {
  enum Kind { kOperator, kScope, kRuntime, kKernel, kCopy };  // the last two are on a device
  Kind kind = kOperator;
  std::string name;
  int64_t begin = 0, end = 0;
  int64_t lane = 0;    // a thread's number, or a device's stream
  int64_t id = 0;      // of an operator or a runtime call
  int64_t from = 0;    // of a kernel: the id of its operator; 0: unknown
  int64_t launch = 0;  // of a kernel: the id of the runtime call that launched it; 0: unknown

  bool on_device() const { return kind == kKernel || kind == kCopy; }
};

struct UnitMark {  // from here on, the thread's operators work on a unit
  int64_t at = 0;
  int64_t lane = 0;
  std::string unit;
};

struct ProductCall {  // an operator that multiplies matrices
  int64_t at = 0;
  double flops = 0;
};

struct StepTrace {
  int64_t step = 0;
  int rank = 0, world = 1;
  std::string host;
  int64_t met = 0;               // when ranks left a barrier before the step, by this host's clock
  std::vector<TraceSpan> spans;  // by begin
  std::vector<UnitMark> marks;   // by time
  std::vector<ProductCall> products;
};

// Names of scopes in a trace, besides "gather UNIT", "reduce UNIT" and others of shard/profile.h.
inline constexpr const char* kStepScope = "step ";  // and its number
inline constexpr const char* kForwardScope = "forward";
inline constexpr const char* kBackwardScope = "backward";
inline constexpr const char* kUpdateScope = "update";
inline constexpr const char* kLoadingScope = "fsdp: data loading";

}  // namespace fsdp::observe
