#include "comm/core/queue.h"

#include <utility>

#include "base/format.h"
#include "fsdp/error.h"

namespace fsdp::comm {

using std::chrono::milliseconds;

void Queue::close() {
  Lock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  if (!thread_.joinable()) {
    // Ends: what runs ends by its timeout.
    changed_.wait(lock, [&]() FSDP_REQUIRES(mutex_) { return !running_; });
    return;
  }
  std::thread thread = std::move(thread_);
  lock.unlock();
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();  // the thread owns the queue too
  else
    thread
        .join();  // Ends: by the timeout of what runs; once that has failed, the rest fails at once
}

void Queue::start_thread() {
  background_ = true;
  if (!thread_.joinable() && !stopping_)
    thread_ = std::thread([self = shared_from_this()] { self->work(); });
}

void Queue::add(std::shared_ptr<Item> item, bool background) {
  Lock lock(mutex_);
  waiting_.push_back(std::move(item));
  if (!background) return;
  start_thread();
  changed_.notify_all();
}

void Queue::wait(const std::shared_ptr<Item>& item, milliseconds limit) {
  Lock lock(mutex_);
  if (limit.count() > 0) {
    if (!item->finished) start_thread();
    changed_.notify_all();
    if (!changed_.wait_for(lock, limit, [&] { return item->finished; }))
      throw Error(formatted("an operation did not finish within the {} ms its wait() allowed.",
                            limit.count()),
                  "the operation continues until its own timeout; wait again, or longer.");
  }
  while (!item->finished) {
    if (!running_)
      run_next();
    else
      changed_.wait(
          lock);  // Ends: a running item by its timeout, so this by the timeouts before it
  }
  if (item->failure) std::rethrow_exception(item->failure);
}

bool Queue::finished(const Item& item) {
  Lock lock(mutex_);
  return item.finished;
}

std::exception_ptr Queue::failure(const Item& item) {
  Lock lock(mutex_);
  return item.failure;
}

void Queue::run_next() {
  std::shared_ptr<Item> item = std::move(waiting_.front());
  waiting_.pop_front();
  running_ = true;
  std::exception_ptr failure;
  std::function<void(std::exception_ptr)> done;
  {
    Unlocked unlocked(mutex_);
    try {
      item->run(item->timeout);
    } catch (...) {
      failure = std::current_exception();
    }
    item->run = nullptr;  // frees the tensors it held
    done = std::exchange(item->done, nullptr);
  }
  running_ = false;
  item->failure = failure;
  item->finished = true;
  if (waiting_.empty()) background_ = false;
  changed_.notify_all();
  // Last and unlocked: the callback may use this queue.
  Unlocked unlocked(mutex_);
  if (done) done(failure);
}

void Queue::work() {
  Lock lock(mutex_);
  for (;;) {
    // Ends: close().
    changed_.wait(lock,
                  [&]() FSDP_REQUIRES(mutex_) { return !running_ && (stopping_ || background_); });
    if (!waiting_.empty())
      run_next();
    else if (stopping_)
      return;
    else
      background_ = false;
  }
}

}  // namespace fsdp::comm
