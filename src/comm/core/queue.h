// Queue: runs the operations of one communicator one at a time, in the order they were issued.
//
// A blocking call runs on the caller's thread: handing it to another thread would cost more than a
// small collective. An asynchronous call runs on the queue's own thread while the caller computes,
// unless a caller waits for it before it has started; the caller then runs it.
#pragma once

#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "base/mutex.h"

namespace fsdp::comm {

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  struct Item {
    std::function<void(std::chrono::milliseconds timeout)> run;
    std::chrono::milliseconds timeout;
    std::function<void(std::exception_ptr)> done;  // called once, after it has finished
    bool finished = false;                         // guarded by the queue's mutex
    std::exception_ptr failure;                    // likewise
  };

  ~Queue() { close(); }
  void close();  // runs what is still queued; add() isn't allowed afterwards

  // Adds an item. `background`: the queue's thread may start it at once.
  void add(std::shared_ptr<Item> item, bool background);

  // Returns when the item has run; throws its failure. With a limit above 0, the queue's thread
  // runs the item, and wait() throws an Error at the limit; the item continues.
  void wait(const std::shared_ptr<Item>& item, std::chrono::milliseconds limit = {});

  bool finished(const Item& item);
  std::exception_ptr failure(const Item& item);

 private:
  void run_next() FSDP_REQUIRES(mutex_);  // nothing else is running; unlocks while the item runs
  void start_thread() FSDP_REQUIRES(mutex_);
  void work();

  Mutex mutex_;
  Condition changed_;
  std::deque<std::shared_ptr<Item>> waiting_ FSDP_GUARDED_BY(mutex_);
  bool running_ FSDP_GUARDED_BY(mutex_) = false;
  bool background_ FSDP_GUARDED_BY(mutex_) = false;  // the thread has something to do
  bool stopping_ FSDP_GUARDED_BY(mutex_) = false;
  std::thread thread_ FSDP_GUARDED_BY(mutex_);  // started with the first asynchronous item
};

}  // namespace fsdp::comm
