// fsdp-bench: measures us and, beside us in the same run, PyTorch. `fsdp bench` starts it.
#include "bench/harness.h"
#include "cli/program.h"
#include "fsdp/version.h"

int main(int argc, char** argv) {
  CLI::App app{"fsdp bench: measures fsdp.cpp, and PyTorch beside it in the same run.",
               "fsdp bench"};
  app.set_version_flag("--version", "fsdp-bench " FSDP_VERSION);
  app.footer(
      "Every benchmark has its own --help. PyTorch is run by python3, or by FSDP_TEST_PYTHON.\n"
      "Examples:\n"
      "  fsdp bench train                         2 ranks on the CPU, beside FSDP2 and no FSDP\n"
      "  fsdp bench train --device cuda --rows all --peer\n"
      "  fsdp bench comm --ranks 4 --to 64M       collectives beside Gloo");
  app.require_subcommand(1);
  using namespace fsdp::bench;
  fsdp::cli::Action action;
  for (const auto add : {add_train, add_comm, add_units, add_strategies, add_offload, add_nvme,
                         add_update, add_checkpoint})
    add(app, action);
  return fsdp::cli::run_command(app, action, argc, argv);
}
