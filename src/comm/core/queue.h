// Queue: runs the operations of one communicator one after the other, in the order they were
// issued.
//
// A call that must be done on return runs on the caller's thread: no hop to another thread, which
// would cost more than a small collective. An asynchronous one is picked up by the queue's own
// thread while the caller computes; whoever waits for it first runs it himself if it has not begun.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

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
  void close();  // runs what is still queued; nothing may be added after it

  // Adds an item. `background`: the queue's thread may start it at once.
  void add(std::shared_ptr<Item> item, bool background);

  // Returns when the item has run; throws its failure. With a limit above 0 it is left to the
  // queue's thread, and an Error comes at the limit; the item goes on.
  void wait(const std::shared_ptr<Item>& item, std::chrono::milliseconds limit = {});

  bool finished(const Item& item);
  std::exception_ptr failure(const Item& item);

 private:
  void run_next(std::unique_lock<std::mutex>& lock);  // mutex held, nothing running
  void start_thread();                                // mutex held
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Item>> waiting_;
  bool running_ = false;
  bool background_ = false;  // the thread has something to do
  bool stopping_ = false;
  std::thread thread_;  // started with the first asynchronous item
};

}  // namespace fsdp::comm
