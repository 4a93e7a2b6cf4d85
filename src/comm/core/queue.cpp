#include "comm/core/queue.h"

#include <algorithm>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::comm {

using std::chrono::milliseconds;

void Queue::close() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Queue::add(std::shared_ptr<Item> item, bool background) {
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(item));
    if (!background) return;
    background_ = true;
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  }
  changed_.notify_all();
}

void Queue::wait(const std::shared_ptr<Item>& item, milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (limit.count() > 0) item->timeout = std::min(item->timeout, limit);
  // An item that runs ends by its own timeout, so this wait is bounded by those before it.
  while (!item->finished) {
    if (!running_) {
      run_next(lock);
    } else if (limit.count() <= 0) {
      changed_.wait(lock);
    } else if (changed_.wait_for(lock, limit) == std::cv_status::timeout && !item->finished) {
      throw Error("an operation did not finish within the " + std::to_string(limit.count()) +
                      " ms its wait() allowed.",
                  "the operation itself goes on until its own timeout; wait again, or longer.");
    }
  }
  if (item->failure) std::rethrow_exception(item->failure);
}

bool Queue::finished(const Item& item) {
  std::lock_guard lock(mutex_);
  return item.finished;
}

void Queue::run_next(std::unique_lock<std::mutex>& lock) {
  std::shared_ptr<Item> item = std::move(waiting_.front());
  waiting_.pop_front();
  running_ = true;
  milliseconds timeout = item->timeout;
  lock.unlock();
  std::exception_ptr failure;
  try {
    item->run(timeout);
  } catch (...) {
    failure = std::current_exception();
  }
  item->run = nullptr;  // tensors it held are free as soon as it is done
  if (item->done) std::exchange(item->done, nullptr)(failure);
  lock.lock();
  running_ = false;
  item->failure = failure;
  item->finished = true;
  if (waiting_.empty()) background_ = false;
  changed_.notify_all();
}

void Queue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || (background_ && !running_); });
    if (background_ && !running_ && !waiting_.empty())
      run_next(lock);
    else if (stopping_ && !running_)
      return;
  }
}

}  // namespace fsdp::comm
