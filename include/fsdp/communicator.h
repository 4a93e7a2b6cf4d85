/// @file
/// Collectives over a fixed set of ranks.
///
/// A Communicator is a thin layer over a c10d::Backend: one of ours (shm, mpi, nccl, fake) or any
/// other. Every rank of the communicator must make the same calls in the same order. On the CPU a
/// call has finished when it returns. On a GPU it is ordered on the current stream, like a kernel.
///
/// A failure on any rank (it died, hangs or made another call, or a wait timed out) is an Error on
/// every rank and ends the communicator.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.h"
#include "fsdp/reduce_op.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace fsdp {

/// An operation that was started with CallOptions::async. A shared handle.
class Work {
 public:
  /// A finished operation.
  Work() = default;
  /// Waits for the operation (on a GPU: orders it on the current stream). Throws Error if it
  /// failed.
  void wait() const;
  /// Whether it has finished.
  bool done() const;

 private:
  friend class Communicator;
  explicit Work(c10::intrusive_ptr<c10d::Work> work);
  std::shared_ptr<c10::intrusive_ptr<c10d::Work>> work_;
};

/// Options of one collective call.
struct CallOptions {
  bool async = false;           ///< Return at once; leave the tensors alone until Work::wait().
  std::string_view label = "";  ///< What the call is for ("unit layers.7"), for error messages.
  int64_t identity = 0;         ///< A number for the same purpose: ranks that differ get an Error.
};

/// Collectives over a fixed set of ranks. A shared handle.
///
/// All methods that take CallOptions are collective, and so are the two that make buffers.
class Communicator {
 public:
  /// A handle to no communicator.
  Communicator() = default;
  /// Over a backend that exists already.
  Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::string name);

  const std::string& name() const;   ///< For error messages.
  std::string backend_name() const;  ///< "shm", "mpi", "nccl", "fake", or a foreign backend's.
  int rank() const;                  ///< This process's rank in the communicator.
  int size() const;                  ///< Number of ranks.

  /// Concatenates every rank's `in` [n], in rank order, into `out` [size · n].
  Work all_gather(at::Tensor out, at::Tensor in, CallOptions options = {}) const;
  /// Reduces every rank's `in` [size · n] and leaves part r in rank r's `out` [n].
  Work reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op = ReduceOp::SUM,
                      CallOptions options = {}) const;
  /// Reduces `tensor` over all ranks, in place.
  Work all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::SUM, CallOptions options = {}) const;
  /// Copies rank `root`'s `tensor` to all ranks.
  Work broadcast(at::Tensor tensor, int root, CallOptions options = {}) const;
  /// Sends part r of `in` to rank r. Equal parts, or rows of the first dimension by the splits.
  Work all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits = {},
                  std::vector<int64_t> in_splits = {}, CallOptions options = {}) const;
  /// Waits until every rank has called it. Waits for the device.
  void barrier(CallOptions options = {}) const;

  /// A zeroed buffer for in-place all-gathers: rank r writes part r and passes it as the input.
  /// With shm all ranks share one memory and the gather copies nothing, so a rank may write its
  /// part again only after the others have stopped reading. Otherwise it is plain memory on
  /// `device`. Collective.
  at::Tensor gather_buffer(int64_t numel, at::ScalarType type, at::Device device) const;
  /// A zeroed buffer for all_reduce and the input of reduce_scatter. Every rank has its own; with
  /// shm other ranks read it in place. Collective.
  at::Tensor reduce_buffer(int64_t numel, at::ScalarType type, at::Device device) const;

  /// Throws what failed in the background since the last call (nccl only).
  void check() const;

  /// The backend, for code that uses c10d.
  c10::intrusive_ptr<c10d::Backend> backend() const;

  /// Whether it refers to a communicator.
  explicit operator bool() const { return state_ != nullptr; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fsdp
