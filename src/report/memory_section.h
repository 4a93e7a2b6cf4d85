// Memory by kind, planned beside measured, as bars and as a table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "report/page.h"

namespace fsdp::report {

struct MemoryKind {
  std::string name;
  int64_t planned = 0, measured = 0;  // bytes; 0: none, or not known
  bool sum = false;                   // of other kinds, such as the peak; not part of a bar
};

// `limit`: the device's memory in bytes; 0: unknown.
void add_memory(Page& page, const std::vector<MemoryKind>& kinds, int64_t limit = 0);

}  // namespace fsdp::report
