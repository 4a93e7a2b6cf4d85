#include "kernels/cpu/parallel.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace fsdp::kernels::cpu {

// at::parallel_for is a template that needs OpenMP where it is instantiated; without -fopenmp, as
// here, it is a plain loop. With -fopenmp we would link a second OpenMP runtime, whose threads
// would compete with those of LibTorch's. A TensorIterator's loop is compiled inside LibTorch, so
// it runs on the threads that at::set_num_threads controls.
void parallel_tasks(int64_t count, c10::function_ref<void(int64_t)> body) {
  if (count <= 1) {
    if (count == 1) body(0);
    return;
  }
  // The tensor is never read: each element stands for a task, and its address gives the task's
  // number.
  const at::Tensor counted = at::empty({count}, at::ScalarType::Byte);
  const char* first = static_cast<const char*>(counted.const_data_ptr());
  const auto loop = [&](char** at, const int64_t*, int64_t n, int64_t) {
    for (int64_t i = 0; i < n; ++i) body(*at - first + i);
  };
  at::TensorIterator::borrowing_nullary_op(counted).for_each(loop, /*grain_size=*/1);
}

namespace {

struct alignas(64) Stretch {  // of chunks; those from `next` on are not yet taken
  std::atomic<int64_t> next;
  int64_t end;
};

}  // namespace

// A thread begins with its own stretch, the same in every call, so that its memory stays near it.
// Then it helps the others, because a thread that shares its core with something else would delay
// all.
void parallel(int64_t count, c10::function_ref<void(int64_t, int64_t, int64_t)> body) {
  const int64_t all = chunks(count);
  const int64_t threads = std::clamp<int64_t>(at::get_num_threads(), 1, std::max<int64_t>(1, all));
  const int64_t at_a_time = std::clamp<int64_t>(all / (8 * threads), 1, 16);
  std::vector<Stretch> stretches(threads);
  for (int64_t i = 0; i < threads; ++i) {
    stretches[i].next = all * i / threads;
    stretches[i].end = all * (i + 1) / threads;
  }
  parallel_tasks(threads, [&](int64_t own) {
    for (int64_t i = 0; i < threads; ++i) {
      Stretch& stretch = stretches[(own + i) % threads];
      while (stretch.next.load(std::memory_order_relaxed) < stretch.end) {
        const int64_t first = stretch.next.fetch_add(at_a_time, std::memory_order_relaxed);
        const int64_t end = std::min(stretch.end, first + at_a_time);
        for (int64_t chunk = first; chunk < end; ++chunk)
          body(chunk, chunk * kChunk, std::min(count, (chunk + 1) * kChunk));
      }
    }
  });
}

void parallel_rows(int64_t rows, int64_t dim, c10::function_ref<void(int64_t, int64_t)> body) {
  const int64_t block = std::max<int64_t>(1, kChunk / std::max<int64_t>(1, dim));
  parallel_tasks((rows + block - 1) / block,
                 [&](int64_t task) { body(task * block, std::min(rows, (task + 1) * block)); });
}

}  // namespace fsdp::kernels::cpu
