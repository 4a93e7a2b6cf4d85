// The tables of `fsdp plan`, and the parsing of its --world.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/plan.h"

namespace fsdp::cli {

// "8", "8,12,16", or "8..1024": doubled up to the last, which is always included. Keeps the order
// given; throws an Error for anything else.
std::vector<int> worlds_of(const std::string& text);

// One row per setting, each with its largest micro-batch.
void print_choices(const std::vector<PlanChoice>& choices, int64_t tokens_per_sample, bool json);

// One row per world size: how many settings fit, and the fastest.
void print_worlds(const std::vector<WorldChoice>& worlds, int64_t tokens_per_sample, bool json);

// One row per world size: the longest sequence, in parts of `part` tokens; 0: none fits.
struct LongestSequence {
  int world = 0;
  int64_t parts = 0;
  Plan plan;  // of the longest, or of one part if none fits
};
void print_sequences(const std::vector<LongestSequence>& rows, int64_t part, bool json);

// Saves of a planned run. `adapters_saved` as in ConfigPlan.
struct PlannedSaves {
  double bytes = 0;    // of a rank
  double seconds = 0;  // until the disk of the host has those of all its ranks
  int64_t every = 1;   // steps; saves that come sooner find the one before unfinished
  double pool = 0;     // bytes of host memory per rank that copies may take
  double held = 0;     // seconds that the update after a save waits, because the pool is smaller
};
PlannedSaves saves_of(const Plan& plan, const PlanOptions& options, int ranks_on_host,
                      double pool_gib, std::optional<double> adapters_saved);
std::string describe(const PlannedSaves& saves, double disk_speed);

// JSON: the kinds of memory; then whether it fits, the times, and saves.
void print_kinds(const Plan& plan);
void print_verdict(const Plan& plan, int64_t tokens_per_sample, const PlannedSaves& saves);

// `host_lacks`: with offload the GPUs have enough memory, but the hosts don't.
std::string nothing_fits(bool host_lacks);

std::string lower(std::string text);

}  // namespace fsdp::cli
