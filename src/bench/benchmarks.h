// The benchmarks of fsdp-bench, one file each.
#pragma once

#include <vector>

#include "bench/harness.h"
#include "cli/commands.h"

namespace fsdp::bench {

using cli::Action;

void add_checkpoint(CLI::App& bench, Action& action);
void add_comm(CLI::App& bench, Action& action);
void add_nvme(CLI::App& bench, Action& action);
void add_offload(CLI::App& bench, Action& action);
void add_strategies(CLI::App& bench, Action& action);
void add_train(CLI::App& bench, Action& action);
void add_units(CLI::App& bench, Action& action);
void add_update(CLI::App& bench, Action& action);

// What a rank of train, offload and strategies does: trains `row` and returns its measurements,
// with the keys of bench/peers/peer_fsdp2.py.
std::vector<Json> train_row(const Row& row, const World& world);

}  // namespace fsdp::bench
