// What ranks are compared by: the average step of each, and its peak memory.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "fsdp/world.h"

namespace fsdp::train {

struct RankFigures {
  double step_ms = 0;
  double data_ms = 0;    // of it, waiting for data
  double comm_ms = 0;    // of it, exposed communication
  double wait_ms = 0;    // waiting for other ranks, on any thread
  double memory_mb = 0;  // MiB, the peak
  char host[40] = "";    // name; filled in by gather_figures()
};

// One entry per rank, in rank order. Collective.
std::vector<RankFigures> gather_figures(const World& world, RankFigures own);

// The processes of all ranks: rank, host, pid and host_identity (base/process.h) of each, for those
// who look for a running rank. Collective.
nlohmann::ordered_json gather_processes(const World& world);

nlohmann::ordered_json to_json(const std::vector<RankFigures>& ranks);

}  // namespace fsdp::train
