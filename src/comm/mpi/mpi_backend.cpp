// The mpi backend: collectives on the system's MPI, for CPU clusters.
//
// MPI moves the data with non-blocking calls, progressed by the communicator's own thread
// (comm/core/queue.h) while the caller computes. The sums are ours (comm/core/reduce.h), in rank
// order, so they have the same bits as with shm. With S bytes in the full buffer and W ranks:
//   all_gather      MPI_Iallgather in place                          S(W-1)/W received
//   reduce_scatter  MPI_Ialltoall in chunks, the next one in flight  S(W-1)/W received, then summed
//                   while one is summed
//   all_reduce      reduce_scatter, then all_gather; small ones gather everything and add
// Each operation starts by exchanging its Description (72 bytes per rank), which detects ranks that
// make a different call; a barrier needs nothing else.
#include <mpi.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>

#include "base/exit_code.h"
#include "base/format.h"
#include "base/log.h"
#include "base/mutex.h"
#include "comm/core/flight_recorder.h"
#include "comm/core/reduce.h"
#include "comm/liveness.h"
#include "comm/modules.h"
#include "comm/settings.h"
#include "comm/store.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int64_t kChunkBytes = 8 << 20;  // in flight in a reduce_scatter, all ranks together
constexpr int64_t kSmallBytes = 8192;     // an all_reduce up to this is one gather

// A failed collective can never be completed, so MPI_Finalize would hang.
std::atomic<bool> g_broken{false};

std::atomic<milliseconds> g_timeout{milliseconds(0)};  // of the world; 0: not joined yet

// MPI's own waits have no limit. One that lasts longer than the world's timeout ends the process.
class MpiLimit {
 public:
  explicit MpiLimit(const char* call)
      : watch_([this, call,
                limit = g_timeout.load().count() > 0 ? g_timeout.load() : asked_timeout()] {
          Lock lock(mutex_);
          const auto returned = [&]() FSDP_REQUIRES(mutex_) { return returned_; };
          if (returned_changed_.wait_for(lock, limit, returned)) return;
          log::error(CodedError(
              kExitLostRank,
              formatted("{}: no answer in {} s: this process ends.", call, limit.count() / 1000),
              "another rank is stopped, or has ended without MPI; see what the others printed."));
          _exit(kExitLostRank);
        }) {}
  ~MpiLimit() {
    {
      Lock lock(mutex_);
      returned_ = true;
    }
    returned_changed_.notify_all();
    watch_.join();  // Ends: the call has returned
  }
  MpiLimit(const MpiLimit&) = delete;
  MpiLimit& operator=(const MpiLimit&) = delete;

 private:
  Mutex mutex_;
  Condition returned_changed_;
  bool returned_ FSDP_GUARDED_BY(mutex_) = false;
  std::thread watch_;
};

void finalize() {
  int done = 0;
  MPI_Finalized(&done);
  if (done || g_broken) return;
  const MpiLimit limit("MPI_Finalize");
  MPI_Finalize();  // Ends: `limit`
}

// Initialises MPI once per process; throws an Error if MPI lacks MPI_THREAD_MULTIPLE.
void require_mpi() {
  int initialized = 0, level = 0;
  MPI_Initialized(&initialized);
  if (initialized) {
    MPI_Query_thread(&level);
  } else {
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    std::atexit(finalize);
  }
  if (level < MPI_THREAD_MULTIPLE)
    throw Error("MPI runs without MPI_THREAD_MULTIPLE, which the mpi backend needs.",
                "let fsdp::init() start MPI, or call MPI_Init_thread(…, MPI_THREAD_MULTIPLE, …).");
}

// MPI and the launcher's variables must agree on rank and size.
void require_place(int rank, int size) {
  int mpi_rank = 0, mpi_size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &mpi_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &mpi_size);
  if (mpi_rank == rank && mpi_size == size) return;
  throw Error(
      formatted("MPI says this is rank {} of {}, but the environment says rank {} of {}.", mpi_rank,
                mpi_size, rank, size),
      formatted(
          "the mpi backend needs the launcher of the MPI it was built with: mpirun -n {} program.",
          size));
}

class Datatype {  // `count` elements as one MPI element, with the given stride
 public:
  Datatype(int64_t count, int64_t element_size, int64_t stride_bytes) {
    if (element_size == 16) count *= 2, element_size = 8;  // complex128
    MPI_Datatype element = element_size == 1   ? MPI_BYTE
                           : element_size == 2 ? MPI_INT16_T
                           : element_size == 4 ? MPI_INT32_T
                                               : MPI_INT64_T;
    if (count > INT32_MAX)
      throw Error(formatted("a part of {} elements is more than MPI can count.", count),
                  "use more ranks or smaller units; a part may have at most 2^31 - 1 elements.");
    MPI_Datatype plain;
    MPI_Type_contiguous(static_cast<int>(count), element, &plain);
    MPI_Type_create_resized(plain, 0, stride_bytes, &type_);
    MPI_Type_commit(&type_);
    MPI_Type_free(&plain);
  }
  ~Datatype() { MPI_Type_free(&type_); }
  Datatype(const Datatype&) = delete;
  Datatype& operator=(const Datatype&) = delete;
  operator MPI_Datatype() const { return type_; }

 private:
  MPI_Datatype type_;
};

class MpiBackend : public CpuBackend {
 public:
  explicit MpiBackend(const BackendRequest& request);
  ~MpiBackend() override;

 private:
  void run(const Call& call) override;
  bool writes_after_failure() const override { return true; }  // a request can't be taken back
  void carry_out(const Call& call);
  void compare(const Description& mine);
  char* scratch(int64_t slot, int64_t bytes);
  void all_gather(void* out, const void* in, int64_t count, int64_t element);
  void reduce_scatter(void* out, const void* in, int64_t count, c10::ScalarType type, ReduceOp op);
  void all_reduce(void* data, int64_t count, c10::ScalarType type, ReduceOp op);
  void all_to_all(const Call& call);
  void finish(MPI_Request& request, int status);
  [[noreturn]] void raise(const std::string& what, const std::string& hint,
                          ExitCode code = kExitLostRank);
  [[noreturn]] void raise_timeout();

  MPI_Comm comm_ = MPI_COMM_NULL;
  std::vector<int> ranks_;
  std::shared_ptr<Liveness> liveness_;
  std::string broken_;
  uint64_t operations_ = 0;
  std::unique_ptr<char[]> scratch_[2];  // what peers sent, until it is summed
  int64_t scratch_bytes_[2] = {0, 0};
  Description current_;
  std::vector<Description> descriptions_;  // of all ranks
  milliseconds timeout_{};
  steady_clock::time_point started_;
};

MpiBackend::MpiBackend(const BackendRequest& request)
    : CpuBackend("mpi", request.name, request.rank, request.size, request.timeout),
      ranks_(request.ranks),
      liveness_(request.liveness) {
  require_mpi();
  g_timeout = request.timeout;
  // MPI_Comm_create_group has no timeout, so every rank first announces that it will come.
  request.store->set(formatted("mpi/{}", rank_), "here");
  await_ranks(request.store, "mpi", size_, request.timeout,
              formatted("rank {}: communicator \"{}\"", rank_, name_),
              [&] { return liveness_->trouble(ranks_); });
  MPI_Group world, group;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_incl(world, size_, ranks_.data(), &group);
  int tag = static_cast<int>(std::hash<std::string>{}(name_) % 32000);
  {
    const MpiLimit limit("MPI_Comm_create_group");
    MPI_Comm_create_group(MPI_COMM_WORLD, group, tag, &comm_);  // Ends: `limit`
  }
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  MPI_Group_free(&group);
  MPI_Group_free(&world);
}

MpiBackend::~MpiBackend() {
  drain();
  // While an exception unwinds, the others won't reach MPI_Finalize with us.
  if (std::uncaught_exceptions() > 0) g_broken = true;
  int done = 0;
  MPI_Finalized(&done);
  if (done || g_broken) return;
  const MpiLimit limit("MPI_Comm_free");
  MPI_Comm_free(&comm_);  // Ends: `limit`
}

void MpiBackend::raise(const std::string& what, const std::string& hint, ExitCode code) {
  broken_ = formatted("{} on communicator \"{}\" (operation {}): {}.", current_.text(), name_,
                      operations_, what);
  g_broken = true;
  liveness_->fail(broken_);
  throw CodedError(code, formatted("rank {}: {}", rank_, broken_), hint);
}

// Every rank that waits says so in the store; a rank that says nothing is missing.
void MpiBackend::raise_timeout() {
  std::string call = formatted("{} (operation {})", current_.text(), operations_);
  liveness_->post(name_, call);
  std::this_thread::sleep_for(milliseconds(1000));  // Ends: once
  raise(formatted("no answer in {} s from {}", timeout_.count() / 1000,
                  liveness_->who_is_missing(name_, ranks_, call)),
        "ranks must make the same calls in the same order; if that rank is only slow, raise the "
        "timeout (FSDP_TIMEOUT, in seconds).");
}

void MpiBackend::finish(MPI_Request& request, int status) {
  auto begun = steady_clock::now(), looked = begun;
  std::string suspicion;
  int done = 0;
  while (status == MPI_SUCCESS && !done) {
    status = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done && status == MPI_SUCCESS) return;
    auto now = steady_clock::now();
    // Polls, yielding at first and then sleeping briefly: MPI has no wait with a time limit.
    // Ends: raise_timeout().
    if (now - begun > milliseconds(2))
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    else
      std::this_thread::yield();
    if (now - looked > milliseconds(300)) {
      looked = now;
      // Seen twice, because a rank may end normally while its last message is still on its way to
      // us.
      std::string trouble = liveness_->trouble(ranks_);
      if (!trouble.empty() && trouble == suspicion)
        raise(trouble, "see what that rank printed last; mpirun shows how it ended.");
      suspicion = trouble;
    }
    if (now - started_ > timeout_) raise_timeout();
  }
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(status, text, &length);
  raise(formatted("MPI says: {}", std::string(text, length)),
        "see what mpirun printed; a peer may have died.");
}

void MpiBackend::compare(const Description& mine) {
  std::vector<Description>& all = descriptions_;
  all.resize(size_);
  MPI_Request request;
  int status = MPI_Iallgather(&mine, sizeof mine, MPI_BYTE, all.data(), sizeof mine, MPI_BYTE,
                              comm_, &request);
  // No rank has all descriptions before all have come, and they take no time to send.
  const auto begun = steady_clock::now();
  finish(request, status);
  flight::add_wait(steady_clock::now() - begun);
  for (int peer = 0; peer < size_; ++peer)
    if (!all[peer].agrees_with(mine))
      raise(formatted("ranks made different calls: rank {} {}, rank {} {}", rank_, mine.text(),
                      peer, all[peer].text()),
            "every rank must call the same operations with the same sizes in the same order.",
            kExitFailed);
}

// Kept from call to call: fresh memory of this size costs a page fault every 4 KiB.
char* MpiBackend::scratch(int64_t slot, int64_t bytes) {
  if (scratch_bytes_[slot] < bytes) {
    scratch_[slot].reset(new char[bytes]);
    scratch_bytes_[slot] = bytes;
  }
  return scratch_[slot].get();
}

void MpiBackend::all_gather(void* out, const void* in, int64_t count, int64_t element) {
  Datatype part(count, element, count * element);
  bool in_place = in == static_cast<char*>(out) + rank_ * count * element;
  MPI_Request request;
  int status = MPI_Iallgather(in_place ? MPI_IN_PLACE : in, 1, part, out, 1, part, comm_, &request);
  finish(request, status);
}

void MpiBackend::reduce_scatter(void* out, const void* in, int64_t count, c10::ScalarType type,
                                ReduceOp op) {
  int64_t element = c10::elementSize(type),
          per_chunk = std::max<int64_t>(1, kChunkBytes / size_ / element);
  int64_t chunks = (count + per_chunk - 1) / per_chunk;
  MPI_Request request[2];
  int status[2] = {};
  auto length = [&](int64_t chunk) { return std::min(per_chunk, count - chunk * per_chunk); };
  auto start = [&](int64_t chunk) {
    int64_t n = length(chunk), slot = chunk % 2;
    char* received = scratch(slot, size_ * n * element);
    // Part p of this chunk is `count` elements after part p-1.
    Datatype sent(n, element, count * element), taken(n, element, n * element);
    status[slot] = MPI_Ialltoall(static_cast<const char*>(in) + chunk * per_chunk * element, 1,
                                 sent, received, 1, taken, comm_, &request[slot]);
  };
  if (chunks > 0) start(0);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    int64_t n = length(chunk), slot = chunk % 2;
    finish(request[slot], status[slot]);
    if (chunk + 1 < chunks) start(chunk + 1);
    std::vector<const void*> sources(size_);
    for (int r = 0; r < size_; ++r) sources[r] = scratch_[slot].get() + r * n * element;
    comm::reduce(static_cast<char*>(out) + chunk * per_chunk * element, sources, n, type, op);
  }
}

void MpiBackend::all_reduce(void* data, int64_t count, c10::ScalarType type, ReduceOp op) {
  int64_t element = c10::elementSize(type), done = 0;
  char* bytes = static_cast<char*>(data);
  if (count * element > kSmallBytes) {
    int64_t share = count / size_;
    char* own = bytes + rank_ * share * element;
    reduce_scatter(own, data, share, type, op);
    all_gather(data, own, share, element);
    done = share * size_;
  }
  int64_t rest = count - done;
  if (rest == 0) return;
  char* everything = scratch(0, size_ * rest * element);
  all_gather(everything, bytes + done * element, rest, element);
  std::vector<const void*> sources(size_);
  for (int r = 0; r < size_; ++r) sources[r] = everything + r * rest * element;
  comm::reduce(bytes + done * element, sources, rest, type, op);
}

void MpiBackend::all_to_all(const Call& call) {
  std::vector<int64_t> coming(size_);
  MPI_Request request;
  int status = MPI_Ialltoall(call.in_counts.data(), 1, MPI_INT64_T, coming.data(), 1, MPI_INT64_T,
                             comm_, &request);
  finish(request, status);
  for (int peer = 0; peer < size_; ++peer)
    if (coming[peer] != call.out_counts[peer])
      raise(formatted("rank {} expects {} elements from rank {}, which sends {}", rank_,
                      call.out_counts[peer], peer, coming[peer]),
            "a rank's output splits must match what the others send to it.", kExitFailed);
  std::vector<int> in_counts, out_counts, in_at(size_), out_at(size_);
  int64_t total_in = 0, total_out = 0;
  for (int peer = 0; peer < size_; ++peer) {
    in_at[peer] = static_cast<int>(total_in);
    out_at[peer] = static_cast<int>(total_out);
    in_counts.push_back(static_cast<int>(call.in_counts[peer]));
    out_counts.push_back(static_cast<int>(call.out_counts[peer]));
    total_in += call.in_counts[peer];
    total_out += call.out_counts[peer];
  }
  if (total_in > INT32_MAX || total_out > INT32_MAX)
    raise("more than 2^31 - 1 elements", "split the tensor into several calls.", kExitFailed);
  int64_t element = c10::elementSize(call.what.type);
  Datatype one(1, element, element);
  status = MPI_Ialltoallv(call.in, in_counts.data(), in_at.data(), one, call.out, out_counts.data(),
                          out_at.data(), one, comm_, &request);
  finish(request, status);
}

void MpiBackend::run(const Call& call) {
  const Description& what = call.what;
  if (!broken_.empty())
    throw Error(formatted("rank {}: {} on communicator \"{}\", which an earlier failure broke: {}",
                          rank_, what.text(), name_, broken_),
                "end the process and start it again from the last checkpoint.");
  current_ = what;
  if (what.operation == Operation::kAllToAll) current_.count = 0;  // may differ between ranks
  ++operations_;
  timeout_ = call.timeout;
  started_ = steady_clock::now();
  try {
    carry_out(call);
  } catch (...) {
    // MPI may still write to all of these.
    for (auto& buffer : scratch_) (void)buffer.release();
    new std::vector<Description>(std::move(descriptions_));
    if (broken_.empty()) {  // not from raise(): tell the others
      broken_ = current_.text() + " failed in this process";
      g_broken = true;
      liveness_->fail(broken_);
    }
    throw;
  }
}

void MpiBackend::carry_out(const Call& call) {
  const Description& what = call.what;
  compare(current_);
  switch (what.operation) {
    case Operation::kAllGather:
      return all_gather(call.out, call.in, what.count, c10::elementSize(what.type));
    case Operation::kReduceScatter:
      return reduce_scatter(call.out, call.in, what.count, what.type, what.reduce);
    case Operation::kAllReduce:
      return all_reduce(call.out, what.count, what.type, what.reduce);
    case Operation::kBroadcast: {
      int64_t element = c10::elementSize(what.type);
      Datatype all(what.count, element, what.count * element);
      MPI_Request request;
      int status = MPI_Ibcast(call.out, 1, all, what.root, comm_, &request);
      return finish(request, status);
    }
    case Operation::kAllToAll:
      return all_to_all(call);
    case Operation::kBarrier:
    case Operation::kAllocate:
    case Operation::kNone:
      return;
  }
}

// --- the module ---

c10::intrusive_ptr<Backend> make(const BackendRequest& request) {
  return c10::make_intrusive<MpiBackend>(request);
}

std::string agree(const std::string& mine, int rank, int size) {
  require_mpi();
  require_place(rank, size);
  char text[512] = {};
  std::strncpy(text, mine.c_str(), sizeof text - 1);
  const MpiLimit limit("MPI_Bcast of the store's address");
  MPI_Bcast(text, sizeof text, MPI_CHAR, 0, MPI_COMM_WORLD);  // Ends: `limit`
  return text;
}

std::string describe_mpi() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string version(text, length);
  return version.substr(0, version.find_first_of(",\n"));
}

constexpr Module kModule{make, nullptr, nullptr, agree, describe_mpi, nullptr};

}  // namespace
}  // namespace fsdp::comm

extern "C" const fsdp::comm::Module* fsdp_module() {
  return &fsdp::comm::kModule;
}
