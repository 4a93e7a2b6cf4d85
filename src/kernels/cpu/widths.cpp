#include "kernels/cpu/widths.h"

#include <algorithm>
#include <string>

#include "base/environment.h"
#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::kernels::cpu {
namespace {

// The compiler's built-in also checks that the operating system saves such registers.
std::vector<int> find() {
  std::vector<int> found = {16};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) found.push_back(32);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl"))
    found.push_back(64);
#endif
  return found;
}

}  // namespace

const std::vector<int>& widths() {
  static const std::vector<int> found = find();
  return found;
}

int choose_width(std::optional<int64_t> asked, const std::vector<int>& there) {
  if (!asked) return there.back();
  if (std::find(there.begin(), there.end(), *asked) != there.end()) return static_cast<int>(*asked);
  std::string list;
  for (const int width : there) list += formatted("{}{}", list.empty() ? "" : ", ", width);
  throw Error(formatted("FSDP_CPU_WIDTH={}: fsdp has no code for registers of that many bytes on "
                        "this CPU.",
                        *asked),
              formatted("choose from {}, or unset it to use the widest.", list));
}

int width() {
  static const int chosen = choose_width(environment::integer("FSDP_CPU_WIDTH"), widths());
  return chosen;
}

AdamWPass adamw_pass(int width) {
#if defined(__x86_64__)
  if (width == 64) return adamw_64;
  if (width == 32) return adamw_32;
#endif
  return adamw_16;
}

}  // namespace fsdp::kernels::cpu
