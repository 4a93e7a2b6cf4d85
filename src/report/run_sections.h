// Sections of a run's page that are mostly tables: memory, ranks, checkpoints, events, config.
#pragma once

#include <string>
#include <vector>

#include "report/run_page.h"

namespace fsdp::report {

// "finished", "stopped on request", "ended by an error", or how far it is.
std::string state_of(const RunFiles& run);
// The run's time by part, as a row of bars; null: it has no end.
Json total_of(const RunFiles& run);

void add_memory_of(Page& page, const std::vector<ReportedRun>& runs);
void add_ranks(Page& page, const std::vector<ReportedRun>& runs);
void add_checkpoints(Page& page, const std::vector<ReportedRun>& runs);
void add_events(Page& page, const std::vector<ReportedRun>& runs);
void add_config(Page& page, const std::vector<ReportedRun>& runs);

}  // namespace fsdp::report
