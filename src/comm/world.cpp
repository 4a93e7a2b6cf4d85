#include "fsdp/world.h"

#include <signal.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <functional>
#include <numeric>
#include <set>

#include "base/format.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/process.h"
#include "comm/core/flight_recorder.h"
#include "comm/fake_backend.h"
#include "comm/liveness.h"
#include "comm/modules.h"
#include "comm/next_number.h"
#include "comm/rendezvous.h"
#include "comm/settings.h"
#include "comm/shm_backend.h"
#include "comm/store.h"

namespace fsdp {

struct World::State {
  comm::LaunchEnvironment launch;
  std::string backend;
  std::chrono::milliseconds timeout{};
  at::Device device = at::kCPU;
  comm::Store store;
  std::shared_ptr<comm::Liveness> liveness;
  Mutex mutex;
  std::set<std::string> names FSDP_GUARDED_BY(mutex);  // of communicators made so far
  Communicator comm;
  std::atomic<int> numbers{0};
};

namespace {

using std::chrono::milliseconds;

// One world per process: a second init() would look for the first one's store.
Mutex g_mutex;
bool g_joined FSDP_GUARDED_BY(g_mutex) = false;
std::weak_ptr<void> g_current FSDP_GUARDED_BY(g_mutex);  // its state

bool launched_by_mpi(const comm::LaunchEnvironment& launch) {
  return launch.launcher == "OpenMPI" || launch.launcher == "MPICH";
}

std::string choose_backend(const std::string& option, const comm::LaunchEnvironment& launch) {
  std::string asked = comm::asked_backend(option);
  if (asked != "auto") return asked;
  bool gpu = comm::gpu_present() && !comm::gpus_hidden();
  const comm::Module* cuda = gpu ? comm::find_module("cuda") : nullptr;
  if (cuda && cuda->devices() > 0) return "nccl";
  bool several_hosts = launch.local_size != launch.size;
  if (launched_by_mpi(launch) && several_hosts && comm::find_module("mpi")) return "mpi";
  return "shm";
}

at::Device select_device(const comm::LaunchEnvironment& launch) {
  const comm::Module* cuda = comm::require_module("cuda");
  int devices = cuda->devices();
  if (devices == 0)
    throw Error("the nccl backend needs a GPU, but none is visible.",
                "check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the shm or mpi backend.");
  int device = launch.local_rank % devices;
  if (launch.local_size > devices) {
    // NCCL refuses two ranks on one GPU of one host, so each rank claims to be its own host.
    std::string host = formatted("{}-{}", host_identity(), launch.local_rank);
    setenv("NCCL_HOSTID", host.c_str(), /*overwrite=*/0);
    if (launch.local_size == launch.size) setenv("NCCL_SOCKET_IFNAME", "lo", /*overwrite=*/0);
    // NCCL opens one connection per peer on an interface it doesn't know. With these settings, a
    // gather of 64 MiB on an H200 takes 7 ms instead of 18.
    setenv("NCCL_SOCKET_NTHREADS", "2", /*overwrite=*/0);
    setenv("NCCL_NSOCKS_PERTHREAD", "2", /*overwrite=*/0);
    setenv("NCCL_MIN_NCHANNELS", "8", /*overwrite=*/0);
    if (launch.local_rank == 0)
      log::info(formatted("{} ranks share {} GPU(s); they talk over sockets, which is slow.",
                          launch.local_size, devices));
  }
  cuda->select(device);
  return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device));
}

// A peer that closes its connection must not end this process: LibTorch, NCCL and MPI may write to
// one without MSG_NOSIGNAL. A program's own choice stays.
void ignore_broken_pipes() {
  struct sigaction now {};
  if (sigaction(SIGPIPE, nullptr, &now) != 0 || now.sa_flags & SA_SIGINFO ||
      now.sa_handler != SIG_DFL)
    return;
  now.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &now, nullptr);
}

// A name for this run, the same on all ranks: "20261118-201502-4711".
std::string name_run(const comm::Store& store, int rank, milliseconds timeout) {
  constexpr const char* kKey = "run";
  const std::string what = formatted("rank {}: joining the world", rank);
  if (rank != 0) return comm::fetch(store, kKey, timeout, what);
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  char text[32] = {};
  std::strftime(text, sizeof text, "%Y%m%d-%H%M%S", gmtime_r(&now, &parts));
  std::string name = formatted("{}-{}", std::string_view(text), getpid());
  comm::put(store, kKey, name, timeout, what);
  return name;
}

// Ranks meet to make a communicator: recorded like a call, because they may wait there as well.
c10::intrusive_ptr<comm::Backend> record_making(
    comm::flight::Group* group, std::chrono::milliseconds timeout,
    const std::function<c10::intrusive_ptr<comm::Backend>()>& make) {
  comm::ScopedLabel label("making the communicator");
  const auto what = comm::describe(comm::Operation::kBarrier, c10::ScalarType::Byte, 0);
  const uint64_t record = comm::flight::issued(group, what, {}, timeout, {}, /*making=*/true);
  comm::flight::started(record);
  try {
    auto backend = make();
    comm::flight::finished(record);
    backend->record_as(group);
    return backend;
  } catch (...) {
    comm::flight::finished(record, /*failed=*/true);
    comm::record_failure();
    throw;
  }
}

}  // namespace

World World::current() {
  Lock lock(g_mutex);
  World world;
  world.state_ = std::static_pointer_cast<State>(g_current.lock());
  if (!world)
    throw Error("this process has not joined a world.",
                "call `auto world = fsdp::init();` first and keep what it returns.");
  return world;
}

int comm::next_number(const World& world) {
  return ++world.state_->numbers;
}

World init(InitOptions options) {
  {
    Lock lock(g_mutex);
    if (g_joined)
      throw Error("fsdp::init() has already been called in this process.",
                  "keep the World of the first call; it can be copied.");
    g_joined = true;
  }
  // Runs even if joining fails half-way, so that a later init() may try again.
  std::shared_ptr<World::State> state(new World::State, [](World::State* dying) {
    delete dying;
    Lock lock(g_mutex);
    g_joined = false;
  });
  state->launch = comm::read_launch_environment();
  comm::LaunchEnvironment& launch = state->launch;
  state->backend = choose_backend(options.backend, launch);
  state->timeout = comm::asked_timeout(options.timeout);
  if (state->backend == "fake") {
    int size = comm::asked_fake_size(options.fake_size, launch.size);
    int rank = options.fake_size > 0 ? options.fake_rank : launch.rank;
    if (rank < 0 || rank >= size)
      throw Error(formatted("a fake world of {} ranks has no rank {}.", size, rank),
                  formatted("pass a fake_rank from 0 to {}.", size - 1));
    launch = comm::LaunchEnvironment{};  // alone, whatever started this process
    launch.rank = launch.local_rank = rank;
    launch.size = launch.local_size = size;
  } else {
    log::set_rank(launch.rank, launch.size);
    if (state->backend == "nccl") state->device = select_device(launch);
    bool over_mpi =
        state->backend == "mpi" || (launched_by_mpi(launch) && !launch.one_host &&
                                    launch.master_host.empty() && comm::find_module("mpi"));
    if (launch.size > 1) ignore_broken_pipes();
    state->store = comm::rendezvous(launch, over_mpi, state->timeout);
    state->liveness = std::make_shared<comm::Liveness>(
        c10::make_intrusive<c10d::PrefixStore>("liveness", state->store), launch.rank, launch.size,
        state->timeout);
    comm::flight::join(launch.rank, launch.size,
                       name_run(state->store, launch.rank, state->timeout));
  }
  World world;
  world.state_ = state;
  {
    Lock lock(g_mutex);
    g_current = state;
  }
  std::vector<int> everybody(launch.size);
  for (int r = 0; r < launch.size; ++r) everybody[r] = r;
  state->comm = world.communicator(everybody, "world");
  return world;
}

World fake_world(int size, int local_size) {
  if (size < 1 || local_size < 0)
    throw Error(formatted("a world can't have {} ranks.", size), "pass 1 or more.");
  World world;
  world.state_ = std::make_shared<World::State>();
  world.state_->backend = "fake";
  world.state_->timeout = comm::asked_timeout(milliseconds(0));
  comm::LaunchEnvironment& launch = world.state_->launch;
  launch.rank = launch.local_rank = 0;
  launch.size = size;
  launch.local_size = local_size > 0 ? std::min(local_size, size) : size;
  std::vector<int> everybody(size);
  std::iota(everybody.begin(), everybody.end(), 0);
  world.state_->comm = world.communicator(everybody, "world");
  return world;
}

int World::rank() const {
  return state_->launch.rank;
}
int World::size() const {
  return state_->launch.size;
}
int World::local_rank() const {
  return state_->launch.local_rank;
}
int World::local_size() const {
  return state_->launch.local_size;
}
std::string World::backend() const {
  return state_->backend;
}
std::string World::launcher() const {
  return state_->launch.launcher;
}
at::Device World::device() const {
  return state_->device;
}
std::chrono::milliseconds World::timeout() const {
  return state_->timeout;
}
const Communicator& World::comm() const {
  return state_->comm;
}
c10::intrusive_ptr<c10d::Store> World::store() const {
  return state_->store;
}

std::string World::trouble() const {
  if (!state_->liveness) return "";
  std::vector<int> everybody(static_cast<size_t>(size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  return state_->liveness->trouble(everybody);
}

Communicator World::communicator(const std::vector<int>& ranks, const std::string& name) const {
  std::string what = formatted("rank {}: communicator \"{}\"", rank(), name);
  std::set<int> distinct(ranks.begin(), ranks.end());
  if (ranks.empty() || distinct.size() != ranks.size() || *distinct.begin() < 0 ||
      *distinct.rbegin() >= size())
    throw Error(formatted("{}: its ranks must be distinct and below {}.", what, size()),
                "list ranks of the world, each once.");
  auto place = std::find(ranks.begin(), ranks.end(), rank());
  if (place == ranks.end())
    throw Error(formatted("{}: this rank isn't one of its ranks.", what),
                "only the ranks of a communicator may create it.");
  {
    Lock lock(state_->mutex);
    if (!state_->names.insert(name).second)
      throw Error(formatted("{} already exists.", what), "give every communicator its own name.");
  }
  int own = static_cast<int>(place - ranks.begin()), count = static_cast<int>(ranks.size());
  c10::intrusive_ptr<c10d::Backend> backend;
  if (state_->backend == "fake") {
    backend = c10::make_intrusive<comm::FakeBackend>(name, own, count);
  } else {
    comm::Store store = c10::make_intrusive<c10d::PrefixStore>("comm/" + name, state_->store);
    const auto make = [&]() -> c10::intrusive_ptr<comm::Backend> {
      if (state_->backend == "shm")
        return c10::make_intrusive<comm::ShmBackend>(
            store, name, own, count, state_->timeout,
            [liveness = state_->liveness, ranks] { return liveness->trouble(ranks); });
      const comm::Module* module = comm::require_module(state_->backend == "mpi" ? "mpi" : "cuda");
      return module->make(
          {store, name, own, count, ranks, state_->timeout, state_->liveness, state_->device});
    };
    backend =
        record_making(comm::flight::add_group(name, state_->backend, ranks), state_->timeout, make);
  }
  return Communicator(std::move(backend), name);
}

}  // namespace fsdp
