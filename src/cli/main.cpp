// fsdp: the command line. Each command lives in its own file; this one gathers them.
#include <CLI/CLI.hpp>
#include <string_view>

#include "cli/commands.h"
#include "cli/program.h"
#include "fsdp/version.h"

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "bench") return fsdp::cli::exec_bench(argv + 2);
  CLI::App app{"fsdp: Fully Sharded Data Parallel for C++.", "fsdp"};
  app.set_version_flag("--version", "fsdp " FSDP_VERSION);
  app.footer(
      "Every command has its own --help.\n\n"
      "Examples:\n"
      "  fsdp train                       train a small model, as a demo\n"
      "  fsdp generate runs/demo          generate text with it\n"
      "  fsdp explain                     see what sharding does in a step\n"
      "  fsdp doctor                      check this machine");
  app.require_subcommand(1);
  fsdp::cli::Action action;
  fsdp::cli::add_train(app, action);
  fsdp::cli::add_generate(app, action);
  fsdp::cli::add_tokenize(app, action);
  fsdp::cli::add_ckpt(app, action);
  fsdp::cli::add_report(app, action);
  fsdp::cli::add_plan(app, action);
  fsdp::cli::add_explain(app, action);
  fsdp::cli::add_run(app, action);
  fsdp::cli::list_bench(app);
  fsdp::cli::add_hang(app, action);
  fsdp::cli::add_doctor(app, action);
  return fsdp::cli::run_command(app, action, argc, argv);
}
