// The commands under `fsdp ckpt`: they work on checkpoints without training.
#pragma once

#include "cli/commands.h"

namespace fsdp::cli {

void add_ckpt_inspect(CLI::App& ckpt, Action& action);
void add_ckpt_verify(CLI::App& ckpt, Action& action);
void add_ckpt_diff(CLI::App& ckpt, Action& action);
void add_ckpt_export(CLI::App& ckpt, Action& action);
void add_ckpt_import(CLI::App& ckpt, Action& action);
void add_ckpt_consolidate(CLI::App& ckpt, Action& action);

}  // namespace fsdp::cli
