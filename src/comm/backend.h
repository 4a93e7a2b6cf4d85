// Backend: our communicators as c10d backends, and what they add to them.
//
// CpuBackend turns c10d's calls into Calls over plain memory, checks tensors, keeps order (Queue)
// and makes Work objects; shm, mpi and fake only implement run(), which carries out one Call. nccl
// wraps c10d's own ProcessGroupNCCL and derives from Backend directly.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/core/description.h"
#include "comm/core/flight_recorder.h"
#include "comm/core/queue.h"

namespace fsdp::comm {

// A call that was captured into a CUDA graph: it runs whenever the graph is replayed.
struct CapturedCall {
  Description what;
  std::string text;  // without its label
};

class Backend : public c10d::Backend {
 public:
  using c10d::Backend::Backend;

  // Memory mapped by every rank, so that gathers and reductions need no copy; undefined if the
  // backend has none. Collective.
  virtual at::Tensor allocate_shared(int64_t bytes) { return {}; }
  // Throws a failure that was found in the background (by a watchdog).
  virtual void check() {}

  // The calls captured since the last take_captured(). The graph's owner keeps them and passes them
  // to replayed() after every replay, on the stream that runs the graph; they are then compared
  // across ranks and watched like any other call.
  virtual std::vector<CapturedCall> take_captured() { return {}; }
  virtual void replayed(const std::vector<CapturedCall>& calls) {}

  // Before the first call. Without it, calls aren't recorded (comm/core/flight_recorder.h).
  void record_as(flight::Group* group) { recorded_ = group; }

 protected:
  flight::Group* recorded_ = nullptr;
};

// Writes the flight recorder's file about a failure, whose hint then says where it is: of the
// exception that is being handled, or of a text.
void record_failure();
void record_failure(const std::string& message, std::string& hint);

struct Call {
  Description what;
  void* out = nullptr;
  const void* in = nullptr;
  std::vector<int64_t> out_counts, in_counts;  // all_to_all only
  std::chrono::milliseconds timeout{};
};

class CpuBackend : public Backend {
 public:
  CpuBackend(std::string backend, std::string name, int rank, int size,
             std::chrono::milliseconds timeout);

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  const std::string getBackendName() const override { return backend_; }
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
  Work barrier(const c10d::BarrierOptions&) override;

 protected:
  // Carries out one call; blocks until it is done. No wait inside lasts longer than call.timeout.
  // Calls come one at a time, in the order they were issued, from any thread.
  virtual void run(const Call& call) = 0;
  // Whether something may still write to a call's tensors after run() failed. If so, they are never
  // freed.
  virtual bool writes_after_failure() const { return false; }

  // Runs one of the backend's own calls, in order with the others.
  void issue_and_wait(Call call);

  // Derived classes must call this first in their destructor: queued calls need a live run().
  void drain();

  const std::string name_;  // of the communicator

 private:
  struct Options {
    bool async;
    std::chrono::milliseconds timeout;
  };
  // Keeps `held` alive until the call has run, then runs `after` (copies out of a flat buffer).
  Work issue(c10d::OpType type, Call call, Options options, Tensors held, Tensors result,
             std::function<void()> after = {});
  void run_recorded(const Call& call, const Tensors& held, uint64_t record);
  [[noreturn]] void refuse(const Call& call, const std::string& why, const std::string& hint) const;
  void require_reducible(const Call& call) const;
  void require(const Call& call, const at::Tensor& tensor, const char* role, int64_t count) const;

  const std::string backend_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
};

ReduceOp from_c10d(const c10d::ReduceOp& op);
c10d::ReduceOp to_c10d(ReduceOp op);

}  // namespace fsdp::comm
