// Shortage: what held memory when it ran out, and what would help. explain_out_of_memory() tells it
// as an error; the trainer also as a page.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/out_of_memory.h"
#include "fsdp/plan.h"
#include "fsdp/shard_info.h"

namespace fsdp::memory {

struct Saving {
  std::string what;    // includes the flags of `fsdp train` that make the change
  std::string effect;  // "saves 3 GiB (40 %), and a sample takes 1.2 times as long"
  int64_t bytes = 0;   // saved, of the device's or the host's memory
};

struct Shortage {
  std::string problem;               // the allocator's own words
  MemoryReport held;                 // by the engine; the error has already freed the rest
  int64_t allocated = 0;             // the peak: of the device's allocator, or of the process
  bool cpu = true;                   // no GPU
  bool of_host = false;              // host memory ran out in a run that has a GPU
  std::optional<Plan> plan = {};     // nullopt: there is no model to plan
  std::vector<Saving> savings = {};  // the three that save most
  std::string no_plan = "";          // why planning failed
};

// Makes several dry runs with a `model`, allocates nothing on the device, and never throws.
Shortage find_shortage(const Sharded& sharded, const std::exception& problem,
                       const PlanModel& model, const PlanOptions& options);

Error to_error(const Shortage& shortage, bool has_model);

}  // namespace fsdp::memory
