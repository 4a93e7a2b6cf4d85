// AdamW in 32-byte registers. Compiled for AVX2 (src/CMakeLists.txt); called only on CPUs that have
// it.
#if defined(__x86_64__)
#include "kernels/cpu/adamw_loop.h"

namespace fsdp::kernels::cpu {

void adamw_32(const AdamWArrays& arrays, const AdamWNumbers<float>& numbers, int64_t begin,
              int64_t end) {
  adamw_loop<32>(arrays, numbers, begin, end);
}

}  // namespace fsdp::kernels::cpu
#endif
