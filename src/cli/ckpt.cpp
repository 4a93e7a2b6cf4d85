// fsdp ckpt: looks into checkpoints, compares and checks them, and takes them from one format to
// another. One file a command.
#include "cli/ckpt.h"

#include <CLI/CLI.hpp>

namespace fsdp::cli {

void add_ckpt(CLI::App& app, Action& action) {
  CLI::App* ckpt =
      app.add_subcommand("ckpt", "Checkpoints: inspect, verify, diff, export, import, consolidate");
  ckpt->require_subcommand(1);
  add_ckpt_inspect(*ckpt, action);
  add_ckpt_verify(*ckpt, action);
  add_ckpt_diff(*ckpt, action);
  add_ckpt_export(*ckpt, action);
  add_ckpt_import(*ckpt, action);
  add_ckpt_consolidate(*ckpt, action);
}

}  // namespace fsdp::cli
