// Traces for https://ui.perfetto.dev and chrome://tracing: each rank writes its part, and one of
// them merges the parts into one file, in which every rank is a process with aligned clocks.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "observe/step_trace.h"

namespace fsdp::observe {

// A part is a file of JSON lines: a header, which also has `more`, and one event per line.
void write_trace_part(const StepTrace& trace, const nlohmann::ordered_json& more,
                      const std::filesystem::path& file);

// Merges parts in rank order and removes them. Parts that don't exist (of hosts that don't share
// the directory) are left out. Clocks of hosts are aligned by the barrier before the step: the
// first rank of each host that left it did so at the same time. Returns the headers.
std::vector<nlohmann::ordered_json> merge_trace_parts(
    const std::vector<std::filesystem::path>& parts, const std::filesystem::path& file);

}  // namespace fsdp::observe
