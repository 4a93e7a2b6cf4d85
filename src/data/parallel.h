// A parallel loop. Its threads live as long as the call.
#pragma once

#include <cstddef>
#include <functional>

namespace fsdp::data {

int thread_count(int asked);  // `asked`, or the number of cores if that is 0

// Calls work(0) ... work(count - 1), each once, in any order, on up to `threads` threads. The first
// exception stops the loop and is rethrown.
void for_each_index(size_t count, int threads, const std::function<void(size_t)>& work);

}  // namespace fsdp::data
