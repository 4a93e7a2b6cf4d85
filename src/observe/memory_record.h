// MemoryRecord: what a rank held in a step, by kind, and what was planned; as an event of a run
// (event_log.h) and as rows to show.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/plan.h"
#include "fsdp/shard_info.h"

namespace fsdp::observe {

struct MemoryRecord {
  MemoryReport held;                          // at its peak
  std::optional<PlannedMemory> planned = {};  // nullopt: nothing was planned
  std::optional<int64_t> peak = {};           // of the device's allocator; nullopt on the CPU
  int64_t capacity = 0;                       // of the device, in bytes; 0: unknown
  int world = 1;                              // ranks
};

nlohmann::ordered_json to_json(const MemoryRecord& record);
// Keys that are missing or aren't numbers are 0.
MemoryRecord memory_from_json(const nlohmann::ordered_json& json);

struct ComparedKind {
  std::string name;
  int64_t planned = 0, measured = 0;  // bytes; 0: none, or not known
  bool sum = false;                   // of other kinds, or beside them
};
// Kinds that are neither planned nor measured are left out.
std::vector<ComparedKind> compared_kinds(const MemoryRecord& record);

}  // namespace fsdp::observe
