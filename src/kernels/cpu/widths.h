// Widths of registers, in bytes: which of them this CPU has, and which a pass shall use.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/cpu/adamw_pass.h"

namespace fsdp::kernels::cpu {

// Those that passes are compiled for and this CPU has, narrowest first; 16 always.
const std::vector<int>& widths();

// The one that passes use: the widest, or what FSDP_CPU_WIDTH says. An Error if it says another.
int width();
// The same with both given.
int choose_width(std::optional<int64_t> asked, const std::vector<int>& there);

AdamWPass adamw_pass(int width);  // of widths()

}  // namespace fsdp::kernels::cpu
