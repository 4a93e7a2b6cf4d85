// The page of an out-of-memory error: what held memory, what was planned, and what would help.
#pragma once

#include <string>
#include <vector>

#include "report/memory_section.h"
#include "report/page.h"

namespace fsdp::report {

struct ShortageFacts {
  std::string run;      // its directory
  std::string where;    // "rank 3, NVIDIA H200"
  std::string problem;  // the allocator's words
  std::vector<MemoryKind> kinds;
  int64_t limit = 0;  // the device's memory; 0: unknown
  std::string error;  // the whole error, as on the terminal
  struct Help {
    std::string what, effect;
    int64_t bytes = 0;
  };
  std::vector<Help> help;
  std::string snapshot;  // file; "": none was written
};

Page shortage_page(const ShortageFacts& facts);

}  // namespace fsdp::report
