#include "comm/core/queue.h"

#include <utility>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::comm {

using std::chrono::milliseconds;

void Queue::close() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  if (!thread_.joinable()) {
    changed_.wait(lock, [&] { return !running_; });
    return;
  }
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();  // the thread owns the queue too
  else
    thread.join();
}

void Queue::start_thread() {
  background_ = true;
  if (!thread_.joinable() && !stopping_)
    thread_ = std::thread([self = shared_from_this()] { self->work(); });
}

void Queue::add(std::shared_ptr<Item> item, bool background) {
  std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(item));
  if (!background) return;
  start_thread();
  changed_.notify_all();
}

void Queue::wait(const std::shared_ptr<Item>& item, milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (limit.count() > 0) {
    if (!item->finished) start_thread();
    changed_.notify_all();
    if (!changed_.wait_for(lock, limit, [&] { return item->finished; }))
      throw Error(formatted("an operation did not finish within the {} ms its wait() allowed.",
                            limit.count()),
                  "the operation continues until its own timeout; wait again, or longer.");
  }
  // A running item ends by its own timeout, so this wait is bounded by the timeouts before it.
  while (!item->finished) {
    if (!running_)
      run_next(lock);
    else
      changed_.wait(lock);
  }
  if (item->failure) std::rethrow_exception(item->failure);
}

bool Queue::finished(const Item& item) {
  std::lock_guard lock(mutex_);
  return item.finished;
}

std::exception_ptr Queue::failure(const Item& item) {
  std::lock_guard lock(mutex_);
  return item.failure;
}

void Queue::run_next(std::unique_lock<std::mutex>& lock) {
  std::shared_ptr<Item> item = std::move(waiting_.front());
  waiting_.pop_front();
  running_ = true;
  lock.unlock();
  std::exception_ptr failure;
  try {
    item->run(item->timeout);
  } catch (...) {
    failure = std::current_exception();
  }
  item->run = nullptr;  // frees the tensors it held
  auto done = std::exchange(item->done, nullptr);
  lock.lock();
  running_ = false;
  item->failure = failure;
  item->finished = true;
  if (waiting_.empty()) background_ = false;
  changed_.notify_all();
  // Last and unlocked: the callback may use this queue.
  lock.unlock();
  if (done) done(failure);
  lock.lock();
}

void Queue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !running_ && (stopping_ || background_); });
    if (!waiting_.empty())
      run_next(lock);
    else if (stopping_)
      return;
    else
      background_ = false;
  }
}

}  // namespace fsdp::comm
