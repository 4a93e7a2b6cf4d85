// AdamW in 16-byte registers: NEON and SSE2, which every supported CPU has.
#include "kernels/cpu/adamw_loop.h"

namespace fsdp::kernels::cpu {

void adamw_16(const AdamWArrays& arrays, const AdamWNumbers<float>& numbers, int64_t begin,
              int64_t end) {
  adamw_loop<16>(arrays, numbers, begin, end);
}

}  // namespace fsdp::kernels::cpu
