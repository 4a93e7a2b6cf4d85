// The nccl backend: c10d's ProcessGroupNCCL with our own watchdog.
//
// Collectives run on the current stream (asyncOp false) or on the process group's (true); only a
// barrier makes the host wait for the device. A watch thread checks what is in flight: an operation
// that takes too long, a dead peer, an asynchronous NCCL error or ranks whose calls differ end the
// communicator (ncclCommAbort stops its kernels), and the next call or check() throws the reason.
// c10d's own watchdog would end the process instead; it is off unless the user turned it on.
//
// Calls are compared across ranks through the store: every 100 ms by the watch thread, and at every
// barrier before it is issued. The device may already have computed with the result of a wrong
// call; the error comes with the next call, check() or barrier.
#pragma once

#include <ATen/cuda/CUDAEvent.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <atomic>
#include <deque>
#include <optional>
#include <thread>

#include "base/mutex.h"
#include "comm/liveness.h"
#include "comm/modules.h"

namespace fsdp::comm {

class NcclBackend : public Backend {
 public:
  explicit NcclBackend(const BackendRequest& request);
  ~NcclBackend() override;

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  void check() override;
  std::vector<CapturedCall> take_captured() override;
  void replayed(const std::vector<CapturedCall>& calls) override;
  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  Work _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override;
  Work allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions&) override;
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                            const c10d::ReduceScatterOptions&) override;
  Work reduce_scatter(Tensors& out, std::vector<Tensors>& in,
                      const c10d::ReduceScatterOptions&) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override;
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override;
  Work alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                     std::vector<int64_t>& in_splits, const c10d::AllToAllOptions&) override;
  // Waits on the host until every rank's device has reached it, up to the timeout.
  Work barrier(const c10d::BarrierOptions&) override;

 private:
  struct Pending {
    Description what;
    uint64_t number;
    std::chrono::steady_clock::time_point issued;
    std::vector<uint64_t> records;  // of the flight recorder; several for a replayed graph
    // Once issued, one of these is set: an event on the stream it ran on, or c10d's own work.
    std::shared_ptr<at::cuda::CUDAEvent> event = nullptr;
    Work work = {};
  };
  // `amounts`: elements on this rank if the description doesn't say.
  template <typename Issue>
  Work issue(Description what, bool async, Issue issue,
             std::optional<flight::Amounts> amounts = {});
  uint64_t record(const Description& what, std::optional<flight::Amounts> amounts = {});
  uint64_t note(const std::string& call) FSDP_REQUIRES(mutex_);  // returns the call's number
  void watch();
  std::string look(const Pending& oldest);  // what is wrong, or ""
  std::string compare_hanging(const Pending& oldest);
  std::string compare_calls();
  void meet();
  void shut_down(std::chrono::steady_clock::time_point deadline);
  void fail(const std::string& why);

  const std::string name_;
  const std::vector<int> ranks_;
  const at::Device device_;
  std::atomic<std::chrono::milliseconds> timeout_;  // the watch reads it
  BoundedStore calls_;
  std::shared_ptr<Liveness> liveness_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;

  Mutex mutex_;
  Condition stop_;
  bool stopping_ FSDP_GUARDED_BY(mutex_) = false;
  std::string failure_ FSDP_GUARDED_BY(mutex_), hint_ FSDP_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Pending>> pending_ FSDP_GUARDED_BY(mutex_);  // also what they point to
  std::vector<CapturedCall> captured_ FSDP_GUARDED_BY(mutex_);            // not yet taken
  uint64_t operations_ FSDP_GUARDED_BY(mutex_) = 0;
  std::string block_ FSDP_GUARDED_BY(mutex_);  // calls of the current block, one per line
  std::deque<std::string> finished_ FSDP_GUARDED_BY(mutex_);  // full blocks not yet compared
  std::deque<std::string> recent_ FSDP_GUARDED_BY(mutex_);    // the last calls, numbered
  uint64_t barriers_ FSDP_GUARDED_BY(mutex_) = 0;
  // The watch's own.
  uint64_t compared_ = 0;      // full blocks
  std::string compared_part_;  // of the current block
  std::thread watch_;
};

}  // namespace fsdp::comm
