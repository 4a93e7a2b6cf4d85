#include "data/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace fsdp::data {

int thread_count(int asked) {
  if (asked > 0) return asked;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void for_each_index(size_t count, int threads, const std::function<void(size_t)>& work) {
  size_t workers = std::min(count, static_cast<size_t>(thread_count(threads)));
  if (workers <= 1) {
    for (size_t i = 0; i < count; ++i) work(i);
    return;
  }
  std::atomic<size_t> next = 0;
  struct {
    Mutex mutex;
    std::exception_ptr failure FSDP_GUARDED_BY(mutex);
  } first;
  auto run = [&] {
    try {
      for (size_t i = next++; i < count; i = next++) work(i);
    } catch (...) {
      Lock lock(first.mutex);
      if (!first.failure) first.failure = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> others;
  for (size_t i = 1; i < workers; ++i) others.emplace_back(run);
  run();
  for (auto& other : others) other.join();  // Ends: with the work
  Lock lock(first.mutex);
  if (first.failure) std::rethrow_exception(first.failure);
}

}  // namespace fsdp::data
