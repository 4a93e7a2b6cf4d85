#include "kernels/cpu/parallel.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace fsdp::kernels::cpu {

// at::parallel_for is a template that needs OpenMP where it is instantiated; compiled without
// -fopenmp, as we are, it is a plain loop. With -fopenmp we would link an OpenMP runtime beside the
// one LibTorch brings, and its threads would fight with LibTorch's. A TensorIterator's loop is
// compiled inside LibTorch, so it runs on the threads that at::set_num_threads is about.
void parallel(int64_t count, c10::function_ref<void(int64_t, int64_t, int64_t)> body) {
  const auto run = [&](int64_t chunk) {
    body(chunk, chunk * kChunk, std::min(count, (chunk + 1) * kChunk));
  };
  if (count <= kChunk) {
    if (count > 0) run(0);
    return;
  }
  // The tensor is counted and never read: an element stands for a chunk, its address says for
  // which.
  const at::Tensor counted = at::empty({chunks(count)}, at::ScalarType::Byte);
  const char* first = static_cast<const char*>(counted.const_data_ptr());
  const auto loop = [&](char** at, const int64_t*, int64_t n, int64_t) {
    for (int64_t i = 0; i < n; ++i) run(*at - first + i);
  };
  at::TensorIterator::borrowing_nullary_op(counted).for_each(loop, /*grain_size=*/1);
}

}  // namespace fsdp::kernels::cpu
