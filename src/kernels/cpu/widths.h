// Register widths in bytes: which ones this CPU has, and which one the passes use.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/cpu/adamw_pass.h"

namespace fsdp::kernels::cpu {

// The widths that passes are compiled for and this CPU has, narrowest first; always includes 16.
const std::vector<int>& widths();

// The width that passes use: the widest, or FSDP_CPU_WIDTH. Throws an Error if the CPU doesn't have
// that one.
int width();
// The same, with both inputs given.
int choose_width(std::optional<int64_t> asked, const std::vector<int>& there);

AdamWPass adamw_pass(int width);  // one of widths()

}  // namespace fsdp::kernels::cpu
