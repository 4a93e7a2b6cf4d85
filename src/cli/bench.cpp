// fsdp bench: what is measured, each beside its peer in the same run. One file a benchmark.
#include <CLI/CLI.hpp>

#include "cli/bench.h"
#include "cli/commands.h"

namespace fsdp::cli {

void add_bench(CLI::App& app, Action& action) {
  CLI::App* bench = app.add_subcommand(
      "bench",
      "Measure: collectives (comm), training (train), unit events (units), strategies, "
      "checkpoints (checkpoint), offload to host memory (offload), state on a disk (nvme), the "
      "CPU's updates (update)");
  bench->require_subcommand(1);
  add_bench_comm(*bench, action);
  add_bench_train(*bench, action);
  add_bench_units(*bench, action);
  add_bench_strategies(*bench, action);
  add_bench_checkpoint(*bench, action);
  add_bench_offload(*bench, action);
  add_bench_nvme(*bench, action);
  add_bench_update(*bench, action);
}

}  // namespace fsdp::cli
