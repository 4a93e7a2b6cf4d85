#include "comm/nccl/nccl_backend.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstdlib>
#include <exception>
#include <future>
#include <optional>
#include <utility>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/log.h"
#include "base/rank_status.h"
#include "comm/store.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kTick{100};
constexpr milliseconds kSuspicious{500};  // age of a call at which its peers are checked
constexpr milliseconds kHanging{2000};    // age at which it is compared with the others' directly
constexpr uint64_t kBlock = 16;           // calls compared at a time
constexpr uint64_t kKept = 1024;          // blocks kept in the store
constexpr size_t kRecent = 16;            // calls compared at a barrier

// c10d's watchdog and monitor end the process on a failure, without saying which rank or call.
void quiet_c10d() {
  for (const char* name : {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING",
                           "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_PROPAGATE_ERROR"})
    setenv(name, "0", /*overwrite=*/0);
}

const char* kOrder =
    "every rank must call the same operations with the same sizes in the same order.";
const char* kLook = "see what that rank printed last; fsdp run shows it with its exit code.";

std::string numbered(const Description& what, uint64_t number) {
  return formatted("{} (operation {})", what.text(), number);
}

// Calls are texts, one per line. Returns the first two lines that differ, as far as both lists go,
// or nullopt.
std::optional<std::pair<std::string, std::string>> first_difference(const std::string& a,
                                                                    const std::string& b) {
  size_t line = 0, i = 0;
  for (; i < a.size() && i < b.size() && a[i] == b[i]; ++i)
    if (a[i] == '\n') line = i + 1;
  if (i == a.size() || i == b.size()) return std::nullopt;
  auto at_line = [&](const std::string& text) {
    return text.substr(line, text.find('\n', line) - line);
  };
  return std::pair(at_line(a), at_line(b));
}

std::string different_calls(int a, const std::string& call_a, int b, const std::string& call_b) {
  return formatted("ranks made different calls: rank {} {}, rank {} {}.", a, call_a, b, call_b);
}

}  // namespace

NcclBackend::NcclBackend(const BackendRequest& request)
    : Backend(request.rank, request.size),
      name_(request.name),
      ranks_(request.ranks),
      device_(request.device),
      timeout_(request.timeout),
      calls_(request.store->clone()),
      liveness_(request.liveness) {
  quiet_c10d();
  // Connecting has no timeout of its own, so every rank first announces that it will come.
  request.store->set(formatted("nccl/{}", rank_), "here");
  await_ranks(request.store, "nccl", size_, timeout_,
              formatted("rank {}: communicator \"{}\"", rank_, name_),
              [&] { return liveness_->trouble(ranks_); });
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = std::chrono::hours(24 * 365);  // our own timeout decides
  options->group_name = name_;
  group_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, rank_, size_, options);
  group_->setBoundDeviceId(device_);
  group_->eagerConnectSingleDevice(device_);
  watch_ = std::thread([this] { watch(); });
}

NcclBackend::~NcclBackend() {
  const auto deadline = steady_clock::now() + timeout_.load();
  bool unwinding = std::uncaught_exceptions() > 0;
  if (recorded_ && unwinding)
    flight::write(flight::Cause::kFault, "an exception ended this rank's communicators.");
  {
    // Ends: the watch aborts what doesn't finish by the timeout.
    Lock lock(mutex_);
    stop_.wait(lock, [&]() FSDP_REQUIRES(mutex_) {
      return unwinding || !failure_.empty() || pending_.empty();
    });
    stopping_ = true;
  }
  stop_.notify_all();
  watch_.join();  // Ends: it sees `stopping_`, and its calls of the store are bounded
  pending_.clear();
  if (unwinding || !failure_.empty())
    group_->abort();  // a normal shutdown would wait for peers that are gone
  else
    shut_down(deadline);
}

// NCCL's own shutdown waits for the peers without a timeout.
void NcclBackend::shut_down(steady_clock::time_point deadline) {
  auto ended = std::make_shared<std::promise<void>>();
  std::future<void> end = ended->get_future();
  std::thread([group = group_, device = device_, ended] {
    c10::cuda::CUDAGuard guard(device);
    group->shutdown();
    ended->set_value();
  }).detach();
  while (end.wait_for(kSuspicious) != std::future_status::ready) {
    if (liveness_->trouble(ranks_).empty() && steady_clock::now() < deadline) continue;
    group_->abort();
    end.wait_for(std::chrono::seconds(5));
    return;
  }
}

void NcclBackend::check() {
  Lock lock(mutex_);
  if (failure_.empty()) return;
  const bool ours = hint_ == kOrder || failure_.find("reports a fault") != std::string::npos;
  throw CodedError(ours ? kExitFailed : kExitLostRank, formatted("rank {}: {}", rank_, failure_),
                   hint_);
}

// Records a call for the comparison with the other ranks'.
uint64_t NcclBackend::note(const std::string& call) {
  uint64_t number = ++operations_;
  block_ += call + "\n";
  recent_.push_back(std::to_string(number) + ": " + call);
  if (recent_.size() > kRecent) recent_.pop_front();
  if (number % kBlock == 0) finished_.push_back(std::exchange(block_, ""));
  return number;
}

uint64_t NcclBackend::record(const Description& what, std::optional<flight::Amounts> amounts) {
  const flight::Place place{
      device_.index(),
      static_cast<uint64_t>(c10::cuda::getCurrentCUDAStream(device_.index()).id())};
  return flight::issued(recorded_, what, amounts.value_or(flight::amounts_of(what, size_)),
                        timeout_.load(), place);
}

template <typename Issue>
NcclBackend::Work NcclBackend::issue(Description what, bool async, Issue issue,
                                     std::optional<flight::Amounts> amounts) {
  check();
  // Ends when the call is issued; the device finishes it without the host.
  rank_status::Collective issuing(comm::name(what.operation), what.count, what.label);
  // A captured call runs when the graph is replayed; see replayed().
  bool capturing =
      c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  std::shared_ptr<Pending> pending;
  uint64_t number = 0;
  {
    // Watched before it is issued: NCCL connects at the first use of an algorithm, on this thread,
    // and waits there for peers that may never come.
    Lock lock(mutex_);
    std::string call = what.text(/*with_label=*/false);
    if (capturing) {
      captured_.push_back({what, std::move(call)});
    } else {
      number = note(call);
      pending = std::make_shared<Pending>(
          Pending{what, number, steady_clock::now(), {record(what, amounts)}});
      pending_.push_back(pending);
    }
  }
  Work work;
  try {
    work = issue();
  } catch (const std::exception& failure) {
    std::string why = failure.what();
    if (capturing) throw;  // the recording failed, not the communicator
    fail(formatted("{} on communicator \"{}\" (operation {}): {}.", what.text(), name_, number,
                   why.substr(0, why.find('\n'))));
    check();  // throws this, or what the watch found first
  }
  if (!pending) return work;
  Lock lock(mutex_);
  pending->issued = steady_clock::now();
  if (async) {
    pending->work = work;
  } else {
    pending->event = std::make_shared<at::cuda::CUDAEvent>(cudaEventDisableTiming);
    pending->event->record(c10::cuda::getCurrentCUDAStream(device_.index()));
  }
  return work;
}

std::vector<CapturedCall> NcclBackend::take_captured() {
  Lock lock(mutex_);
  return std::exchange(captured_, {});
}

void NcclBackend::replayed(const std::vector<CapturedCall>& calls) {
  if (calls.empty()) return;
  check();
  auto event = std::make_shared<at::cuda::CUDAEvent>(cudaEventDisableTiming);
  event->record(c10::cuda::getCurrentCUDAStream(device_.index()));
  Lock lock(mutex_);
  uint64_t number = 0;
  std::vector<uint64_t> records;
  for (const CapturedCall& call : calls) {
    number = note(call.text);
    records.push_back(record(call.what));
  }
  // One entry stands for all calls: a graph's progress can't be seen.
  pending_.push_back(std::make_shared<Pending>(Pending{
      calls.back().what, number, steady_clock::now(), std::move(records), std::move(event)}));
}

// --- the watch ---

void NcclBackend::watch() {
  c10::cuda::CUDAGuard guard(device_);
  // Querying events must not disturb a graph that another thread captures.
  c10::cuda::CUDAStreamCaptureModeGuard capture(cudaStreamCaptureModeThreadLocal);
  Lock lock(mutex_);
  while (!stopping_) {
    stop_.wait_for(lock, kTick, [&]() FSDP_REQUIRES(mutex_) { return stopping_; });
    if (!failure_.empty() || stopping_) continue;
    std::string why;
    std::optional<Pending> oldest;
    try {
      auto done = [](const Pending& call) {
        return call.event ? call.event->query() : call.work && call.work->isCompleted();
      };
      while (!pending_.empty() && done(*pending_.front())) {
        for (uint64_t record : pending_.front()->records) flight::finished(record);
        pending_.pop_front();
      }
      if (pending_.empty()) {
        stop_.notify_all();  // the destructor waits for this
      } else {
        oldest = *pending_.front();
        for (uint64_t record : oldest->records) flight::started(record);
      }
    } catch (const std::exception& fault) {
      why = std::string("communicator \"") + name_ + "\": the device reports a fault: " +
            std::string(fault.what()).substr(0, std::string(fault.what()).find('\n')) + ".";
    }
    lock.unlock();
    try {
      try {
        if (why.empty()) why = compare_calls();
      } catch (const std::exception&) {  // no answer from the store: look() says why
      }
      if (why.empty() && oldest) why = look(*oldest);
    } catch (const std::exception& failure) {
      why = "the watch failed: " + log::plain(failure);
    }
    lock.lock();
    if (!why.empty()) {
      lock.unlock();
      fail(why);
      lock.lock();
    }
  }
}

std::string NcclBackend::look(const Pending& oldest) {
  auto age = steady_clock::now() - oldest.issued;
  std::string call = formatted("{} on communicator \"{}\" (operation {}): ", oldest.what.text(),
                               name_, oldest.number);
  bool error = group_->getError() != c10d::ErrorType::SUCCESS;
  if (!error && age < kSuspicious) return "";
  std::string trouble = liveness_->trouble(ranks_);
  // NCCL notices a lost connection before anything can say whose it was: ask again for a while.
  // Ends: after 20 times.
  for (int i = 0; error && trouble.empty() && i < 20; ++i) {
    std::this_thread::sleep_for(kTick);
    trouble = liveness_->trouble(ranks_);
  }
  if (error && trouble.empty())
    trouble = "NCCL reported an asynchronous error (a lost connection or a device fault)";
  if (!trouble.empty()) return call + trouble + ".";
  if (age < kHanging) return "";
  std::string differs = compare_hanging(oldest);
  if (!differs.empty()) return call + differs;
  const milliseconds timeout = timeout_;
  if (age < timeout) return "";
  return formatted("{}no answer in {} s from {}.", call, timeout.count() / 1000,
                   liveness_->who_is_missing(name_, ranks_, numbered(oldest.what, oldest.number)));
}

// Every rank that hangs posts its call; two different calls with one number explain the hang.
std::string NcclBackend::compare_hanging(const Pending& oldest) {
  std::string mine = numbered(oldest.what, oldest.number);
  std::string suffix = mine.substr(mine.rfind(" (operation "));
  liveness_->post(name_, mine);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    std::string said = liveness_->posted(name_, ranks_[r]);
    if (said.empty() || said == mine || !said.ends_with(suffix)) continue;
    return different_calls(rank_, mine, r, said);
  }
  return "";
}

// Every rank compares its calls with those of rank 0, as far as both have got.
std::string NcclBackend::compare_calls() {
  for (;;) {
    std::string mine, block = formatted("calls/{}/", compared_);
    bool full;
    {
      Lock lock(mutex_);
      full = !finished_.empty();
      mine = full ? finished_.front() : block_;
    }
    if (mine == compared_part_) return "";
    if (rank_ == 0) {
      calls_.set(block + "0", mine);
      // The others may be a few blocks behind, not many: a rank that hangs is found within seconds.
      if (full && compared_ >= kKept) calls_.erase(formatted("calls/{}/0", compared_ - kKept));
    } else {
      auto theirs = calls_.get(block + "0");
      if (!theirs) return "";
      if (auto differ = first_difference(*theirs, mine))
        return "communicator \"" + name_ +
               "\": " + different_calls(0, differ->first, rank_, differ->second);
      if (theirs->size() < mine.size()) return "";  // rank 0 is behind
    }
    compared_part_ = full ? "" : mine;
    if (!full) return "";
    ++compared_;
    Lock lock(mutex_);
    finished_.pop_front();
  }
}

// Compares the last calls with every rank's, on the host, before the device gets the barrier: no
// earlier mismatch may get past it. The watch ends the wait if a rank doesn't come.
void NcclBackend::meet() {
  std::string mine;
  uint64_t barrier;
  {
    Lock lock(mutex_);
    for (const auto& call : recent_) mine += call + "\n";
    barrier = ++barriers_;
  }
  const std::string prefix = formatted("barrier/{}/", barrier);
  // Asks until there is an answer.
  auto ask = [&](auto question) {
    for (milliseconds pause(0);; pause = std::min(pause + milliseconds(1), milliseconds(10))) {
      check();
      try {
        if (question()) return;
      } catch (const std::exception&) {
        pause = kTick;
      }
      std::this_thread::sleep_for(pause);  // Ends: the watch finds a silent store, check() throws
    }
  };
  ask([&] { return calls_.set(prefix + std::to_string(rank_), mine), true; });
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    std::optional<std::string> theirs;
    ask([&] { return (theirs = calls_.get(prefix + std::to_string(peer))).has_value(); });
    std::string call = "communicator \"" + name_ + "\": ";
    if (auto differ = first_difference(mine, *theirs))
      fail(call + different_calls(rank_, differ->first, peer, differ->second));
    else if (mine.size() != theirs->size())
      fail(formatted(
          "{}ranks made different calls: a different number of them before this barrier.", call));
    check();
  }
  if (barrier > 2) {  // every rank has read those of two barriers ago
    std::string old = formatted("barrier/{}/{}", barrier - 2, rank_);
    ask([&] { return calls_.erase(old), true; });
  }
}

void NcclBackend::fail(const std::string& why) {
  {
    Lock lock(mutex_);
    if (!failure_.empty()) return;
    if (!pending_.empty())
      for (uint64_t record : pending_.front()->records) flight::finished(record, /*failed=*/true);
    failure_ = why;
    hint_ = why.find("different calls") != std::string::npos ? kOrder
            : why.find("no answer in") != std::string::npos
                ? "ranks must make the same calls in the same order; if that rank is only slow, "
                  "raise the timeout (FSDP_TIMEOUT, in seconds)."
                : kLook;
    record_failure(why, hint_);
  }
  stop_.notify_all();
  liveness_->fail(why);
  group_->abort();
}

// --- c10d's calls ---

NcclBackend::Work NcclBackend::_allgather_base(at::Tensor& out, at::Tensor& in,
                                               const c10d::AllgatherOptions& options) {
  return issue(describe(Operation::kAllGather, in.scalar_type(), in.numel()), options.asyncOp,
               [&] { return group_->_allgather_base(out, in, options); });
}

NcclBackend::Work NcclBackend::allgather(std::vector<Tensors>& out, Tensors& in,
                                         const c10d::AllgatherOptions& options) {
  return issue(describe(Operation::kAllGather, in.at(0).scalar_type(), in[0].numel()),
               options.asyncOp, [&] { return group_->allgather(out, in, options); });
}

NcclBackend::Work NcclBackend::_reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                                    const c10d::ReduceScatterOptions& options) {
  return issue(describe(Operation::kReduceScatter, out.scalar_type(), out.numel(),
                        from_c10d(options.reduceOp)),
               options.asyncOp, [&] { return group_->_reduce_scatter_base(out, in, options); });
}

NcclBackend::Work NcclBackend::reduce_scatter(Tensors& out, std::vector<Tensors>& in,
                                              const c10d::ReduceScatterOptions& options) {
  return issue(describe(Operation::kReduceScatter, out.at(0).scalar_type(), out[0].numel(),
                        from_c10d(options.reduceOp)),
               options.asyncOp, [&] { return group_->reduce_scatter(out, in, options); });
}

NcclBackend::Work NcclBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return issue(describe(Operation::kAllReduce, tensors.at(0).scalar_type(), tensors[0].numel(),
                        from_c10d(options.reduceOp)),
               options.asyncOp, [&] { return group_->allreduce(tensors, options); });
}

NcclBackend::Work NcclBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return issue(describe(Operation::kBroadcast, tensors.at(0).scalar_type(), tensors[0].numel(),
                        ReduceOp::SUM, static_cast<int>(options.rootRank)),
               options.asyncOp, [&] { return group_->broadcast(tensors, options); });
}

NcclBackend::Work NcclBackend::alltoall_base(at::Tensor& out, at::Tensor& in,
                                             std::vector<int64_t>& out_splits,
                                             std::vector<int64_t>& in_splits,
                                             const c10d::AllToAllOptions& options) {
  return issue(
      describe(Operation::kAllToAll, in.scalar_type(), 0), options.asyncOp,
      [&] { return group_->alltoall_base(out, in, out_splits, in_splits, options); },
      flight::Amounts{in.numel(), out.numel()});
}

NcclBackend::Work NcclBackend::barrier(const c10d::BarrierOptions& options) {
  at::Tensor token = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device_));
  Tensors tensors{token};
  c10d::AllreduceOptions reduce_options;
  reduce_options.asyncOp = false;
  Work work = issue(describe(Operation::kBarrier, c10::ScalarType::Byte, 0), false, [&] {
    meet();
    return group_->allreduce(tensors, reduce_options);
  });
  // Polled, because the watch must be able to end it.
  at::cuda::CUDAEvent reached(cudaEventDisableTiming);
  reached.record(c10::cuda::getCurrentCUDAStream(device_.index()));
  // Ends: check() throws what the watch has found.
  for (int spins = 0; !reached.query(); ++spins) {
    if (spins > 1000) std::this_thread::sleep_for(std::chrono::microseconds(50));
    check();
  }
  check();
  return work;
}

}  // namespace fsdp::comm
