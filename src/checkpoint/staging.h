// Staging: the tensors of one save on their way through the pool: a thread copies them into slots,
// another one writes the slots to the file in the same order.
//
// Masters and states don't change before the next update, so they are copied while the next forward
// and backward run, and the update waits (await_copies). What fits into the device's free memory is
// copied there first, which takes milliseconds, and the update doesn't wait for that.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "checkpoint/save_plan.h"
#include "checkpoint/save_pool.h"
#include "shard/device_stream.h"

namespace fsdp::checkpoint {

class Staging {
 public:
  // The model's device.
  Staging(std::shared_ptr<SavePool> pool, at::Device device);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Starts copying. The caller holds the model's lock. If states are on disk it also waits until
  // all is copied, because they are in memory only while it reads them.
  void start(const SavePlan& plan);
  // Before masters or states change: what the caller enqueues from now on, or does on the host,
  // comes after the copies.
  void await_copies();
  // Passes on the next `bytes`, which are one tensor of the plan, in pieces. One thread calls it.
  void read(int64_t bytes, const std::function<void(const void* bytes, size_t size)>& use);
  // Ends the copying; nobody reads the rest.
  void cancel();

  int64_t bytes() const { return bytes_; }
  int64_t read_so_far() const { return read_so_far_; }
  std::chrono::nanoseconds held() const { return held_; }  // by await_copies()

 private:
  // A flat's master or state, or another tensor, as it was when the save was asked for.
  struct Captured {
    at::Tensor whole;
    at::Tensor rest;  // defined: `whole` is the upper half of a split master
    at::Tensor read() const;
  };
  struct Item {
    std::shared_ptr<Captured> from;
    int64_t begin, count;  // elements
  };
  struct Slot {
    char* memory = nullptr;
    int64_t bytes = 0;
    std::shared_ptr<shard::StreamEvent> copied;
  };

  void capture(const SavePlan& plan);
  bool copy_on_device(Captured& captured, int64_t& room);
  void copy_items(std::vector<Item> items);
  void put(const at::Tensor& tensor);
  void put_piece(const at::Tensor& bytes);
  void pass_on_slot();
  void finish();
  void fail(std::exception_ptr why);
  Slot next_slot();

  const std::shared_ptr<SavePool> pool_;
  const at::Device device_;
  int64_t bytes_ = 0;
  std::vector<Item> items_;
  bool awaited_ = false;  // something isn't copied on the device, so updates wait for the copies
  int64_t copied_there_ = 0;  // bytes of copies on the device
  shard::StreamEvent begun_;  // what was enqueued before the save
  shard::SideStream stream_;
  std::thread copier_;

  // --- the copying thread ---
  Slot filling_;
  int64_t filled_ = 0;
  std::deque<shard::StreamEvent> in_flight_;  // behind the last copies off the device

  // --- the writing thread ---
  Slot reading_;
  int64_t at_ = 0;  // in `reading_`
  std::atomic<int64_t> read_so_far_ = 0;

  std::atomic<bool> cancelled_ = false;
  Mutex mutex_;
  Condition changed_;
  std::deque<Slot> slots_ FSDP_GUARDED_BY(mutex_);  // to be written
  bool done_ FSDP_GUARDED_BY(mutex_) = false;       // all copies are in slots_, or failed
  std::exception_ptr error_ FSDP_GUARDED_BY(mutex_);
  shard::StreamEvent copied_;  // all copies; recorded before done_
  std::chrono::nanoseconds held_{};
};

}  // namespace fsdp::checkpoint
