#include "fsdp/communicator.h"

#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include "comm/backend.h"

namespace fsdp {

Work::Work(c10::intrusive_ptr<c10d::Work> work) {
  if (work) work_ = std::make_shared<c10::intrusive_ptr<c10d::Work>>(std::move(work));
}

void Work::wait() const {
  if (work_) (*work_)->wait();
}

bool Work::done() const {
  return !work_ || (*work_)->isCompleted();
}

struct Communicator::State {
  c10::intrusive_ptr<c10d::Backend> backend;
  comm::Backend* ours;  // the same if it is one of ours, else null
  std::string name;
};

Communicator::Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::string name) {
  auto* ours = dynamic_cast<comm::Backend*>(backend.get());
  state_ = std::make_shared<State>(State{std::move(backend), ours, std::move(name)});
}

const std::string& Communicator::name() const {
  return state_->name;
}
std::string Communicator::backend_name() const {
  return state_->backend->getBackendName();
}
int Communicator::rank() const {
  return state_->backend->getRank();
}
int Communicator::size() const {
  return state_->backend->getSize();
}
c10::intrusive_ptr<c10d::Backend> Communicator::backend() const {
  return state_->backend;
}

void Communicator::check() const {
  if (state_->ours) state_->ours->check();
}

namespace {

// Waits for a blocking call on a backend that ignores asyncOp (one that isn't ours).
c10::intrusive_ptr<c10d::Work> finish(c10::intrusive_ptr<c10d::Work> work, bool async) {
  if (async || !work) return work;
  work->wait();
  return nullptr;
}

}  // namespace

Work Communicator::all_gather(at::Tensor out, at::Tensor in, CallOptions options) const {
  RECORD_USER_SCOPE("comm all_gather");
  comm::ScopedLabel label(options.label, options.identity);
  c10d::AllgatherOptions c10d_options;
  c10d_options.asyncOp = options.async;
  return Work(finish(state_->backend->_allgather_base(out, in, c10d_options), options.async));
}

Work Communicator::reduce_scatter(at::Tensor out, at::Tensor in, ReduceOp op,
                                  CallOptions options) const {
  RECORD_USER_SCOPE("comm reduce_scatter");
  comm::ScopedLabel label(options.label, options.identity);
  c10d::ReduceScatterOptions c10d_options;
  c10d_options.asyncOp = options.async;
  c10d_options.reduceOp = comm::to_c10d(op);
  return Work(finish(state_->backend->_reduce_scatter_base(out, in, c10d_options), options.async));
}

Work Communicator::all_reduce(at::Tensor tensor, ReduceOp op, CallOptions options) const {
  RECORD_USER_SCOPE("comm all_reduce");
  comm::ScopedLabel label(options.label, options.identity);
  c10d::AllreduceOptions c10d_options;
  c10d_options.asyncOp = options.async;
  c10d_options.reduceOp = comm::to_c10d(op);
  std::vector<at::Tensor> tensors{tensor};
  return Work(finish(state_->backend->allreduce(tensors, c10d_options), options.async));
}

Work Communicator::broadcast(at::Tensor tensor, int root, CallOptions options) const {
  RECORD_USER_SCOPE("comm broadcast");
  comm::ScopedLabel label(options.label, options.identity);
  c10d::BroadcastOptions c10d_options;
  c10d_options.asyncOp = options.async;
  c10d_options.rootRank = root;
  std::vector<at::Tensor> tensors{tensor};
  return Work(finish(state_->backend->broadcast(tensors, c10d_options), options.async));
}

Work Communicator::all_to_all(at::Tensor out, at::Tensor in, std::vector<int64_t> out_splits,
                              std::vector<int64_t> in_splits, CallOptions options) const {
  RECORD_USER_SCOPE("comm all_to_all");
  comm::ScopedLabel label(options.label, options.identity);
  c10d::AllToAllOptions c10d_options;
  c10d_options.asyncOp = options.async;
  return Work(finish(state_->backend->alltoall_base(out, in, out_splits, in_splits, c10d_options),
                     options.async));
}

void Communicator::barrier(CallOptions options) const {
  RECORD_USER_SCOPE("comm barrier");
  comm::ScopedLabel label(options.label, options.identity);
  c10d::BarrierOptions c10d_options;
  c10d_options.asyncOp = false;
  finish(state_->backend->barrier(c10d_options), false);
}

namespace {

at::Tensor shared_or_plain(comm::Backend* ours, int64_t numel, int64_t copies, int mine,
                           at::ScalarType type, at::Device device) {
  int64_t element = static_cast<int64_t>(c10::elementSize(type));
  if (ours && device.is_cpu()) {
    // Each rank's copy begins on its own page, so that no two ranks write the same cache line.
    int64_t stride = copies == 1 ? numel * element : (numel * element + 4095) / 4096 * 4096;
    at::Tensor bytes = ours->allocate_shared(stride * copies);
    if (bytes.defined()) return bytes.narrow(0, mine * stride, numel * element).view(type);
  }
  return at::zeros({numel}, at::TensorOptions().dtype(type).device(device));
}

}  // namespace

at::Tensor Communicator::gather_buffer(int64_t numel, at::ScalarType type,
                                       at::Device device) const {
  return shared_or_plain(state_->ours, numel, 1, 0, type, device);
}

at::Tensor Communicator::reduce_buffer(int64_t numel, at::ScalarType type,
                                       at::Device device) const {
  return shared_or_plain(state_->ours, numel, size(), rank(), type, device);
}

}  // namespace fsdp
