// The page of `fsdp report`: one run, or several on top of each other.
#pragma once

#include <vector>

#include "report/memory_section.h"
#include "report/page.h"
#include "report/run_files.h"

namespace fsdp::report {

struct ReportedRun {
  RunFiles files;
  std::vector<MemoryKind> memory = {};  // planned and measured; empty: unknown
  std::string no_memory = "";           // why it is empty
};

// For at least one run.
Page run_page(const std::vector<ReportedRun>& runs);

}  // namespace fsdp::report
