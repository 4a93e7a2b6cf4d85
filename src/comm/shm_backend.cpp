#include "comm/shm_backend.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>

#include <exception>

#include "base/format.h"
#include "base/log.h"
#include "comm/shm/collectives.h"
#include "kernels/cpu/parallel.h"

namespace fsdp::comm {
namespace {

// Elements below which a second thread costs more than it saves.
constexpr int64_t kGrain = 1 << 16;

void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  if (count < kGrain || at::get_num_threads() == 1) return body(0, count);
  kernels::cpu::parallel(count, [&](int64_t, int64_t begin, int64_t end) { body(begin, end); });
}

}  // namespace

ShmBackend::ShmBackend(Store store, std::string name, int rank, int size,
                       std::chrono::milliseconds timeout, std::function<std::string()> trouble)
    : CpuBackend("shm", name, rank, size, timeout),
      group_(name, rank, size,
             exchange_over(store, formatted("rank {}: communicator \"{}\"", rank, name),
                           std::move(trouble)),
             timeout) {}

ShmBackend::~ShmBackend() {
  // Queued calls can't be finished while an exception unwinds: the others may be waiting elsewhere.
  if (std::uncaught_exceptions() > 0) group_.abandon();
  drain();
}

void ShmBackend::run(const Call& call) {
  const Description& what = call.what;
  ScopedLabel label(what.label, what.identity);
  group_.set_timeout(call.timeout);
  try {
    switch (what.operation) {
      case Operation::kAllGather:
        return shm::all_gather(group_, call.out, call.in, what.count, what.type);
      case Operation::kReduceScatter:
        return shm::reduce_scatter(group_, call.out, call.in, what.count, what.type, what.reduce,
                                   parallel);
      case Operation::kAllReduce:
        return shm::all_reduce(group_, call.out, what.count, what.type, what.reduce, parallel);
      case Operation::kBroadcast:
        return shm::broadcast(group_, call.out, what.count, what.type, what.root);
      case Operation::kAllToAll:
        return shm::all_to_all(group_, call.out, call.out_counts, call.in, call.in_counts,
                               what.type);
      case Operation::kBarrier:
        return shm::barrier(group_);
      case Operation::kAllocate: {
        auto mapping = group_.allocate(what.count);
        *static_cast<std::shared_ptr<shm::Mapping>*>(call.out) = std::move(mapping);
        return;
      }
      case Operation::kNone:
        return;
    }
  } catch (const std::exception& failure) {
    group_.fail(log::plain(failure));  // whatever it was, the others must not wait for this rank
    throw;
  }
}

at::Tensor ShmBackend::allocate_shared(int64_t bytes) {
  std::shared_ptr<shm::Mapping> mapping;
  Call call{describe(Operation::kAllocate, c10::ScalarType::Byte, bytes)};
  call.out = &mapping;
  issue_and_wait(std::move(call));
  return at::from_blob(
      mapping->data(), {bytes}, [mapping](void*) {}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace fsdp::comm
