// StepTime: where the time of a traced step went, by family of kernels, by unit and by kernel.
//
// Each instant of the step counts once: for the family whose kernel runs; for exposed communication
// if nothing else runs; for a gap if nothing runs at all. The parts add up to the step. On the CPU
// operators of the computing threads stand for kernels, and gaps are the time between operators.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "observe/step_work.h"

namespace fsdp::observe {

struct FamilyTime {
  std::string name;
  double ms = 0;
  int64_t calls = 0;
  double tflops = 0;  // achieved; 0: unknown
};

struct UnitTime {
  std::string name;  // "(no unit)": before the first unit; "(update)": the optimizer
  double forward_ms = 0, backward_ms = 0, update_ms = 0;  // computation
  double exposed_ms = 0;                                  // communication
};

struct KernelTime {
  std::string name;
  std::string family;
  double ms = 0;
  int64_t calls = 0;
  double longest_ms = 0;
};

struct StepTime {
  int64_t step = 0;
  int rank = 0, world = 1;
  bool gpu = false;
  double traced_ms = 0;              // the step, with the tracer's own cost
  std::vector<FamilyTime> families;  // add up to traced_ms; empty ones are left out
  double communication_ms = 0;       // all of it
  double hidden_ms = 0;              // the part of it behind computation
  double gaps_ms = 0;
  std::vector<UnitTime> units;      // in the order of first use
  std::vector<KernelTime> kernels;  // the ten that take longest
  nlohmann::ordered_json timeline;  // of page.js

  double share(const std::string& family) const;  // of the step, 0..1
};

StepTime step_time(const StepTrace& trace);

// What else is needed to say what to do.
struct StepSettings {
  std::optional<double> peak_tflops = {};  // of one device
  double step_ms = 0;                      // without the tracer; 0: unknown
  bool graphed = false;                    // other steps are replayed as CUDA graphs
  int hosts = 1;
  std::string strategy = "full_shard";
  std::string precision = "fp32", reduce = "fp32";
};

// At most three lines, each with an option of `fsdp train`.
std::vector<std::string> what_next(const StepTime& time, const StepSettings& settings);

// Tables as text.
std::string describe(const StepTime& time, const StepSettings& settings);
// What profile.json holds.
nlohmann::ordered_json to_json(const StepTime& time, const StepSettings& settings);

}  // namespace fsdp::observe
