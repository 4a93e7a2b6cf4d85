// fsdp ckpt: inspects, verifies, compares and converts checkpoints. One file per command.
#include "cli/ckpt.h"

#include <CLI/CLI.hpp>

namespace fsdp::cli {

void add_ckpt(CLI::App& app, Action& action) {
  CLI::App* ckpt = app.add_subcommand("ckpt", "Inspect, verify, compare and convert checkpoints");
  ckpt->footer(
      "Examples:\n"
      "  fsdp ckpt inspect runs/demo\n"
      "  fsdp ckpt verify runs/demo\n"
      "  fsdp ckpt export runs/demo demo-hf           a Hugging Face directory\n"
      "  fsdp ckpt consolidate runs/demo demo.pt      one file for torch.load");
  ckpt->require_subcommand(1);
  add_ckpt_inspect(*ckpt, action);
  add_ckpt_verify(*ckpt, action);
  add_ckpt_diff(*ckpt, action);
  add_ckpt_export(*ckpt, action);
  add_ckpt_import(*ckpt, action);
  add_ckpt_consolidate(*ckpt, action);
}

}  // namespace fsdp::cli
