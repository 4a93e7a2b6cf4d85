// parallel: runs a loop over chunks on LibTorch's own threads.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace fsdp::kernels::cpu {

// Elements per chunk: about ten kilobytes of each array, a few microseconds.
constexpr int64_t kChunk = 4096;

constexpr int64_t chunks(int64_t count) {
  return (count + kChunk - 1) / kChunk;
}

// Calls body(chunk, begin, end) for every chunk of [0, count); returns when all are done. Chunk
// boundaries depend only on kChunk; which thread takes which chunk is unspecified.
void parallel(int64_t count, c10::function_ref<void(int64_t, int64_t, int64_t)> body);

// Calls body(task) for every task of [0, count); returns when all are done.
void parallel_tasks(int64_t count, c10::function_ref<void(int64_t)> body);

// Calls body(begin, end) for blocks of rows of `dim` elements, about kChunk elements each.
void parallel_rows(int64_t rows, int64_t dim, c10::function_ref<void(int64_t, int64_t)> body);

}  // namespace fsdp::kernels::cpu
