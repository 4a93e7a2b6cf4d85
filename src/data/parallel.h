// Work spread over threads: texts to encode, chunks to check. Threads live as long as the call.
#pragma once

#include <cstddef>
#include <functional>

namespace fsdp::data {

int thread_count(int asked);  // `asked`, or the cores of this process where it is 0

// Calls work(0) ... work(count - 1), each once, in any order, on up to `threads` threads. The first
// exception ends it and comes out here.
void for_each_index(size_t count, int threads, const std::function<void(size_t)>& work);

}  // namespace fsdp::data
