// Communicator: collectives over a fixed set of ranks.
//
// A thin face over a c10d::Backend: ours (shm, mpi, nccl, fake) or any other. Every rank of the
// communicator must make the same calls in the same order. A call returns when it is done, or with
// `async` at once with a Work to wait for; tensors must then stay untouched until it is done. On a
// GPU "done" means ordered on the current stream, as everything there. A failure anywhere (a rank
// that died, stopped or called something else, a timeout) is an Error on every rank, and ends the
// communicator.
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

class Work {
 public:
  Work() = default;
  void wait() const;  // throws Error if the operation failed; a default Work is done
  bool done() const;

 private:
  friend class Communicator;
  explicit Work(c10::intrusive_ptr<c10d::Work> work);
  std::shared_ptr<c10::intrusive_ptr<c10d::Work>> work_;
};

struct CallOptions {
  bool async = false;
  std::string_view label = "";  // what the call is for ("unit layers.7"); errors carry it
  int64_t identity = 0;         // the same as a number: ranks whose numbers differ get an error
};

class Communicator {
 public:
  Communicator() = default;
  Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::string name);

  const std::string& name() const;
  std::string backend_name() const;
  int rank() const;  // in this communicator
  int size() const;

  Work all_gather(at::Tensor out, at::Tensor in, CallOptions options = {}) const;  // [size·n] ← [n]
  Work reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op = ReduceOp::SUM,
                      CallOptions options = {}) const;  // [n] ← [size·n]
  Work all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::SUM, CallOptions options = {}) const;
  Work broadcast(at::Tensor tensor, int root, CallOptions options = {}) const;
  // Equal parts, or rows of the first dimension by the given splits.
  Work all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits = {},
                  std::vector<int64_t> in_splits = {}, CallOptions options = {}) const;
  void barrier(CallOptions options = {}) const;

  // A buffer for all-gathers in place: rank r writes its part r and passes it as the input. With
  // shm it is one memory for all ranks and the gather copies nothing, so between a gather and the
  // next one a rank may write its part only when the others have stopped reading it. Elsewhere it
  // is plain memory on `device`. Collective; zeroed.
  at::Tensor gather_buffer(int64_t numel, at::ScalarType type, at::Device device) const;
  // A buffer for the input of reduce_scatter and for all_reduce: every rank has its own, and with
  // shm the others read it where it lies. Collective; zeroed.
  at::Tensor reduce_buffer(int64_t numel, at::ScalarType type, at::Device device) const;

  // Throws what went wrong in the background since the last call (nccl; nothing elsewhere).
  void check() const;

  // The backend itself, for code that speaks c10d.
  c10::intrusive_ptr<c10d::Backend> backend() const;

  explicit operator bool() const { return state_ != nullptr; }

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace fsdp
