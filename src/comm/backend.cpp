#include "comm/backend.h"

#include <ATen/core/ivalue.h>

#include <exception>
#include <mutex>
#include <numeric>

#include "base/format.h"
#include "base/rank_status.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

// Null on the meta device. There, a part of a tensor has an address that isn't null.
void* memory_of(const at::Tensor& tensor) {
  return tensor.is_meta() ? nullptr : tensor.data_ptr();
}

class QueuedWork : public c10d::Work {
 public:
  QueuedWork(int rank, c10d::OpType type, std::shared_ptr<Queue> queue, at::TensorList result)
      : c10d::Work(rank, type), queue_(std::move(queue)), result_(result.vec()) {}

  bool isCompleted() override { return queue_->finished(*item_); }
  bool isSuccess() const override { return queue_->finished(*item_) && !item_->failure; }
  std::exception_ptr exception() const override { return queue_->failure(*item_); }
  void synchronize() override { queue_->wait(item_); }
  std::vector<at::Tensor> result() override { return result_; }

  bool wait(std::chrono::milliseconds timeout) override {
    queue_->wait(item_, timeout);
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::unique_lock lock(mutex_);
    if (future_) return future_;
    auto future = future_ =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    bool completed = completed_;
    lock.unlock();
    if (completed) settle(*future);
    return future;
  }

  void complete(std::exception_ptr failure) {
    std::unique_lock lock(mutex_);
    completed_ = true;
    exception_ = failure;
    auto future = future_;
    lock.unlock();  // the future's callbacks may ask this work or its queue for more
    if (future) settle(*future);
  }

  std::shared_ptr<Queue::Item> item_ = std::make_shared<Queue::Item>();

 private:
  void settle(c10::ivalue::Future& future) {
    if (exception_)
      future.setError(exception_);
    else
      future.markCompleted(c10::IValue(result_));
  }

  std::shared_ptr<Queue> queue_;
  std::vector<at::Tensor> result_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made on first request
};

int64_t sum(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

}  // namespace

ReduceOp from_c10d(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::SUM;
    case c10d::ReduceOp::AVG:
      return ReduceOp::AVG;
    case c10d::ReduceOp::MAX:
      return ReduceOp::MAX;
    case c10d::ReduceOp::MIN:
      return ReduceOp::MIN;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::PRODUCT;
    default:
      throw Error("this reduction isn't supported.", "use SUM, AVG, MAX, MIN or PRODUCT.");
  }
}

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::SUM:
      return c10d::ReduceOp::SUM;
    case ReduceOp::AVG:
      return c10d::ReduceOp::AVG;
    case ReduceOp::MAX:
      return c10d::ReduceOp::MAX;
    case ReduceOp::MIN:
      return c10d::ReduceOp::MIN;
    default:
      return c10d::ReduceOp::PRODUCT;
  }
}

CpuBackend::CpuBackend(std::string backend, std::string name, int rank, int size,
                       std::chrono::milliseconds timeout)
    : Backend(rank, size),
      name_(std::move(name)),
      backend_(std::move(backend)),
      timeout_(timeout) {}

namespace {

std::string hint_with_folder(const std::string& hint) {
  return formatted("{}{}fsdp hang {} says which rank is where.", hint, hint.empty() ? "" : " ",
                   flight::directory());
}

}  // namespace

void record_failure() {
  try {
    throw;
  } catch (Error& failure) {
    // The exception in flight, which keeps its type.
    if (flight::write(flight::Cause::kFault, failure.message().c_str()))
      failure = Error(failure.message(), hint_with_folder(failure.hint()));
  } catch (const std::exception& failure) {
    flight::write(flight::Cause::kFault, failure.what());
  } catch (...) {
    flight::write(flight::Cause::kFault, "an exception of unknown type");
  }
}

void record_failure(const std::string& message, std::string& hint) {
  if (flight::write(flight::Cause::kFault, message.c_str())) hint = hint_with_folder(hint);
}

void CpuBackend::drain() {
  // The others are about to find that this rank has left.
  if (recorded_ && std::uncaught_exceptions() > 0)
    flight::write(flight::Cause::kFault, "an exception ended this rank's communicators.");
  queue_->close();
}

void CpuBackend::refuse(const Call& call, const std::string& why, const std::string& hint) const {
  throw Error(
      formatted("rank {}: {} on communicator \"{}\": {}.", rank_, call.what.text(), name_, why),
      hint);
}

void CpuBackend::require(const Call& call, const at::Tensor& tensor, const char* role,
                         int64_t count) const {
  if (!tensor.defined()) refuse(call, formatted("the {} is undefined", role), "pass a tensor.");
  // A plan trains on the meta device in a fake world.
  if (!tensor.device().is_cpu() && !(tensor.is_meta() && backend_ == "fake"))
    refuse(call, formatted("the {} is on {}", role, tensor.device().str()),
           formatted("the {} backend moves CPU tensors; use nccl for GPUs.", backend_));
  if (!tensor.is_contiguous())
    refuse(call, formatted("the {} isn't contiguous", role), "pass tensor.contiguous().");
  if (tensor.scalar_type() != call.what.type)
    refuse(call, formatted("the {} is {}", role, c10::toString(tensor.scalar_type())),
           "input and output must have the same type.");
  if (tensor.numel() != count)
    refuse(
        call, formatted("the {} has {} elements instead of {}", role, tensor.numel(), count),
        formatted("with {} ranks, the full side is that many times as long as the other.", size_));
}

void CpuBackend::require_reducible(const Call& call) const {
  if (!reducible(call.what.type))
    refuse(call, "this type can't be reduced",
           "reduce float32, float64, bfloat16, float16, bool or an integer type.");
}

void CpuBackend::run_recorded(const Call& call, const Tensors& held, uint64_t record) {
  rank_status::Collective running(comm::name(call.what.operation), call.what.count,
                                  call.what.label);
  flight::started(record);
  try {
    run(call);
  } catch (...) {
    flight::finished(record, /*failed=*/true);
    if (writes_after_failure()) new Tensors(held);  // leaked: something may still write
    if (recorded_) record_failure();
    throw;
  }
  flight::finished(record);
}

CpuBackend::Work CpuBackend::issue(c10d::OpType type, Call call, Options options, Tensors held,
                                   Tensors result, std::function<void()> after) {
  auto work = c10::make_intrusive<QueuedWork>(rank_, type, queue_, result);
  Queue::Item& item = *work->item_;
  item.timeout = options.timeout == c10d::kUnsetTimeout ? timeout_ : options.timeout;
  flight::Amounts amounts = flight::amounts_of(call.what, size_);
  if (call.what.operation == Operation::kAllToAll) amounts.out = sum(call.out_counts);
  const uint64_t record = flight::issued(recorded_, call.what, amounts, item.timeout);
  item.run = [this, call = std::move(call), held = std::move(held), after = std::move(after),
              record](std::chrono::milliseconds timeout) mutable {
    call.timeout = timeout;
    run_recorded(call, held, record);
    if (after) after();
  };
  item.done = [work](std::exception_ptr failure) { work->complete(failure); };
  queue_->add(work->item_, options.async);
  if (!options.async) queue_->wait(work->item_);
  return work;
}

void CpuBackend::issue_and_wait(Call call) {
  issue(c10d::OpType::UNKNOWN, std::move(call), {false, c10d::kUnsetTimeout}, {}, {});
}

CpuBackend::Work CpuBackend::_allgather_base(at::Tensor& out, at::Tensor& in,
                                             const c10d::AllgatherOptions& options) {
  Call call{describe(Operation::kAllGather, in.scalar_type(), in.numel())};
  require(call, in, "input", in.numel());
  require(call, out, "output", in.numel() * size_);
  call.out = memory_of(out);
  call.in = memory_of(in);
  return issue(c10d::OpType::_ALLGATHER_BASE, std::move(call), {options.asyncOp, options.timeout},
               {out, in}, {out});
}

CpuBackend::Work CpuBackend::allgather(std::vector<Tensors>& out, Tensors& in,
                                       const c10d::AllgatherOptions& options) {
  Call call{describe(Operation::kAllGather, in.at(0).scalar_type(), in[0].numel())};
  if (in.size() != 1 || out.size() != 1 || static_cast<int>(out[0].size()) != size_)
    refuse(call, "it needs one input and one output per rank", "pass {{out_0, …}} and {in}.");
  at::Tensor input = in[0].contiguous(), flat = at::empty({size_ * input.numel()}, input.options());
  require(call, input, "input", input.numel());
  for (const at::Tensor& tensor : out[0]) require(call, tensor, "output", input.numel());
  call.out = memory_of(flat);
  call.in = memory_of(input);
  auto copy_out = [flat, outputs = out[0]] {
    at::NoGradGuard no_grad;
    for (size_t r = 0; r < outputs.size(); ++r)
      outputs[r].copy_(
          flat.narrow(0, r * outputs[r].numel(), outputs[r].numel()).view_as(outputs[r]));
  };
  return issue(c10d::OpType::ALLGATHER, std::move(call), {options.asyncOp, options.timeout},
               {flat, input}, out[0], copy_out);
}

CpuBackend::Work CpuBackend::_reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                                  const c10d::ReduceScatterOptions& options) {
  Call call{describe(Operation::kReduceScatter, out.scalar_type(), out.numel(),
                     from_c10d(options.reduceOp))};
  require_reducible(call);
  require(call, out, "output", out.numel());
  require(call, in, "input", out.numel() * size_);
  call.out = memory_of(out);
  call.in = memory_of(in);
  return issue(c10d::OpType::_REDUCE_SCATTER_BASE, std::move(call),
               {options.asyncOp, options.timeout}, {out, in}, {out});
}

CpuBackend::Work CpuBackend::reduce_scatter(Tensors& out, std::vector<Tensors>& in,
                                            const c10d::ReduceScatterOptions& options) {
  Call call{describe(Operation::kReduceScatter, out.at(0).scalar_type(), out[0].numel(),
                     from_c10d(options.reduceOp))};
  require_reducible(call);
  if (out.size() != 1 || in.size() != 1 || static_cast<int>(in[0].size()) != size_)
    refuse(call, "it needs one output and one input per rank", "pass {out} and {{in_0, …}}.");
  Tensors flattened;
  for (const at::Tensor& tensor : in[0]) {
    require(call, tensor.contiguous(), "input", out[0].numel());
    flattened.push_back(tensor.reshape({-1}));
  }
  at::Tensor flat = at::cat(flattened);
  require(call, out[0], "output", out[0].numel());
  call.out = memory_of(out[0]);
  call.in = memory_of(flat);
  return issue(c10d::OpType::REDUCE_SCATTER, std::move(call), {options.asyncOp, options.timeout},
               {out[0], flat}, out);
}

CpuBackend::Work CpuBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  at::Tensor tensor = tensors.at(0);
  Call call{describe(Operation::kAllReduce, tensor.scalar_type(), tensor.numel(),
                     from_c10d(options.reduceOp))};
  require_reducible(call);
  if (tensors.size() != 1) refuse(call, "it takes one tensor", "call it once per tensor.");
  require(call, tensor, "tensor", tensor.numel());
  call.out = memory_of(tensor);
  return issue(c10d::OpType::ALLREDUCE, std::move(call), {options.asyncOp, options.timeout},
               {tensor}, {tensor});
}

CpuBackend::Work CpuBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  at::Tensor tensor = tensors.at(0);
  Call call{describe(Operation::kBroadcast, tensor.scalar_type(), tensor.numel(), ReduceOp::SUM,
                     static_cast<int>(options.rootRank))};
  if (tensors.size() != 1) refuse(call, "it takes one tensor", "call it once per tensor.");
  if (options.rootRank < 0 || options.rootRank >= size_)
    refuse(call, "there is no such rank", "pass a rank of this communicator, counted from 0.");
  require(call, tensor, "tensor", tensor.numel());
  call.out = memory_of(tensor);
  return issue(c10d::OpType::BROADCAST, std::move(call), {options.asyncOp, options.timeout},
               {tensor}, {tensor});
}

CpuBackend::Work CpuBackend::alltoall_base(at::Tensor& out, at::Tensor& in,
                                           std::vector<int64_t>& out_splits,
                                           std::vector<int64_t>& in_splits,
                                           const c10d::AllToAllOptions& options) {
  Call call{describe(Operation::kAllToAll, in.scalar_type(), in.numel())};
  // Splits count rows of the first dimension; no splits means equal parts.
  auto counts = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits,
                    const char* role) {
    std::vector<int64_t> parts(size_, tensor.numel() / size_);
    int64_t row = tensor.dim() > 0 && tensor.size(0) > 0 ? tensor.numel() / tensor.size(0) : 1;
    if (!splits.empty()) {
      if (static_cast<int>(splits.size()) != size_)
        refuse(call, formatted("{} splits have the wrong length", role), "pass one per rank.");
      for (int r = 0; r < size_; ++r) {
        if (splits[r] < 0)
          refuse(call, formatted("{} splits are negative", role), "pass numbers of rows.");
        parts[r] = splits[r] * row;
      }
    }
    require(call, tensor, role, sum(parts));
    return parts;
  };
  call.in_counts = counts(in, in_splits, "input");
  call.out_counts = counts(out, out_splits, "output");
  call.out = memory_of(out);
  call.in = memory_of(in);
  return issue(c10d::OpType::ALLTOALL_BASE, std::move(call), {options.asyncOp, options.timeout},
               {out, in}, {out});
}

CpuBackend::Work CpuBackend::barrier(const c10d::BarrierOptions& options) {
  Call call{describe(Operation::kBarrier, c10::ScalarType::Byte, 0)};
  return issue(c10d::OpType::BARRIER, std::move(call), {options.asyncOp, options.timeout}, {}, {});
}

}  // namespace fsdp::comm
