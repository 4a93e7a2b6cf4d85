// The benchmarks under `fsdp bench`.
#pragma once

#include "cli/commands.h"

namespace fsdp::cli {

void add_bench_checkpoint(CLI::App& bench, Action& action);
void add_bench_comm(CLI::App& bench, Action& action);
void add_bench_nvme(CLI::App& bench, Action& action);
void add_bench_offload(CLI::App& bench, Action& action);
void add_bench_strategies(CLI::App& bench, Action& action);
void add_bench_train(CLI::App& bench, Action& action);
void add_bench_units(CLI::App& bench, Action& action);
void add_bench_update(CLI::App& bench, Action& action);

}  // namespace fsdp::cli
