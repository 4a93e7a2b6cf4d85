#include "comm/shm/group.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <thread>

#include "base/format.h"
#include "base/table.h"
#include "comm/core/flight_recorder.h"
#include "fsdp/error.h"

namespace fsdp::comm::shm {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kSlice{50};  // how long a rank sleeps between two looks at its peers
// Longer than waking a sleeper takes (about 100 microseconds in a virtual machine). Otherwise two
// ranks that both sleep would keep sleeping and waking each other in turn.
constexpr std::chrono::microseconds kSpin{400};

// Clocks wrap after a few days of small operations. They start just below the wrap, so that every
// run goes through it.
constexpr uint32_t kFirstClock = UINT32_MAX - 64;

enum class State : uint32_t { kAbsent, kJoined, kLeft, kFailed };

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, milliseconds limit) {
  timespec time{limit.count() / 1000, (limit.count() % 1000) * 1000000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool reached(uint32_t clock, uint32_t target) {  // clocks wrap
  return static_cast<int32_t>(clock - target) >= 0;
}

int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

std::string seconds(milliseconds time) {
  return formatted("{:.3g} s", static_cast<double>(time.count()) / 1000);
}

}  // namespace

// Holds two operations: a rank can be one operation ahead of the slowest, never two, because every
// operation waits for every rank's description.
struct Slot {
  struct Posted {
    Description description;
    Location location;
    Address made;  // allocate: where rank 0's memory can be opened
  };
  alignas(128) std::atomic<uint32_t> clock;
  std::atomic<uint32_t> sleepers;
  alignas(128) std::atomic<State> state;
  std::atomic<uint64_t> operations;
  pid_t pid;
  Posted posted[2];
  char failure[1024];
};

struct Group::Trouble {
  std::string what;  // empty: none
  std::string hint;
};

namespace {

// Bytes of each of the two buffers of a rank: one part per rank, for 2 to 8 of them.
int64_t staging_bytes_for(int size) {
  return kPartBytes * std::clamp(size, 2, 8);
}

int64_t slots_bytes(int size) {
  return round_up(size * int64_t{sizeof(Slot)}, 4096);
}

}  // namespace

Group::Group(std::string name, int rank, int size, const Exchange& exchange, milliseconds timeout)
    : name_(std::move(name)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      clock_(kFirstClock),
      released_{kFirstClock, kFirstClock} {
  // With more ranks than cores, the awaited rank may need this core.
  yields_ = size > static_cast<int>(std::thread::hardware_concurrency());
  join(exchange);
}

Group::~Group() {
  if (!control_) return;
  State joined = State::kJoined;
  slot(rank_).state.compare_exchange_strong(joined, State::kLeft);
  futex_wake_all(slot(rank_).clock);
}

Slot& Group::slot(int rank) const {
  return reinterpret_cast<Slot*>(control_->data())[rank];
}

void Group::join(const Exchange& exchange) {
  trouble_ = exchange.trouble;
  std::string what = "communicator \"" + name_ + "\"";
  exchange.set(formatted("host/{}", rank_), host_identity());
  for (int peer = 0; peer < size_; ++peer) {
    std::string host = exchange.get(formatted("host/{}", peer), timeout_);
    if (host != host_identity())
      throw Error(formatted("rank {}: {}: shared memory cannot reach rank {}, which runs on "
                            "another host or in another PID namespace.",
                            rank_, what, peer),
                  "use the mpi backend (CPU clusters) or nccl (GPUs) for ranks on several hosts.");
  }
  int64_t bytes = slots_bytes(size_) + size_ * 2 * staging_bytes();
  if (rank_ == 0) {
    control_ = Mapping::create(bytes, what);
    for (int r = 0; r < size_; ++r) (new (&slot(r)) Slot{})->clock = kFirstClock;
    Address address = control_->address();
    exchange.set("control", formatted("{} {}", address.pid, address.descriptor));
  } else {
    Address address{0, -1, bytes};
    std::string where = exchange.get("control", timeout_);
    if (std::sscanf(where.c_str(), "%d %d", &address.pid, &address.descriptor) != 2)
      throw Error(formatted("{}: rank 0 posted \"{}\", which isn't an address.", what, where), "");
    control_ = Mapping::open(address, what);
  }
  slot(rank_).pid = getpid();
  slot(rank_).state = State::kJoined;
  // Once every clock has moved, every rank has mapped it; from then on processes are watched.
  publish();
  await_all();
  if (rank_ == 0) control_->close();
  trouble_ = nullptr;
  for (int peer = 0; peer < size_; ++peer) processes_.emplace_back(slot(peer).pid);
}

// --- waiting ---

void Group::publish() {
  Slot& mine = slot(rank_);
  // Sequentially consistent, like the sleepers' count: either we see the sleeper, or the sleeper
  // sees our clock.
  mine.clock.store(++clock_);
  if (mine.sleepers.load() > 0) futex_wake_all(mine.clock);
}

void Group::await(int peer, uint32_t target) {
  std::atomic<uint32_t>& clock = slot(peer).clock;
  if (reached(clock.load(std::memory_order_acquire), target)) return;
  auto started = steady_clock::now();
  struct Waited {
    steady_clock::time_point since;
    ~Waited() { flight::add_wait(steady_clock::now() - since); }
  } waited{started};
  do {
    for (int i = 0; i < 64; ++i) {
      if (reached(clock.load(std::memory_order_acquire), target)) return;
      if (yields_)
        std::this_thread::yield();
      else
        relax();
    }
  } while (steady_clock::now() - started < kSpin);
  for (;;) {
    uint32_t seen = clock.load();
    if (reached(seen, target)) return;
    Trouble trouble = look_around(peer, started);
    // A peer may finish its part and leave between the two looks.
    if (!trouble.what.empty() && !reached(clock.load(), target))
      raise(trouble.what, trouble.hint, kExitLostRank);
    slot(peer).sleepers.fetch_add(1);
    futex_wait(clock, seen, kSlice);
    slot(peer).sleepers.fetch_sub(1);
  }
}

void Group::await_all() {
  for (int step = 1; step < size_; ++step) await((rank_ + step) % size_, clock_);
  released_[0] = released_[1] = clock_;  // all ranks are past what we waited for before
  if (operations_ > 0 && !compared_) compare_descriptions();
}

Group::Trouble Group::look_around(int awaited, steady_clock::time_point started) const {
  const std::string see = "see what that rank printed last; fsdp run shows it with its exit code.";
  if (abandoned_) return {"this rank gave up because of an exception", see};
  if (trouble_)
    if (std::string known = trouble_(); !known.empty()) return {known, see};
  for (int step = 0; step < size_; ++step) {
    int peer = (awaited + step) % size_;
    if (peer == rank_) continue;
    const Slot& other = slot(peer);
    std::string who = formatted("rank {}", peer);
    State state = other.state.load();
    if (state == State::kFailed) return {who + " failed: " + other.failure, see};
    bool dead = !processes_.empty() && !processes_[peer].alive();
    // A rank may finish its last operation and leave; only a rank that still waits for it fails.
    if (peer != awaited && other.operations.load() >= operations_) continue;
    if (dead) return {formatted("{} died (process {} is gone)", who, other.pid), see};
    if (state == State::kLeft)
      return {who + " left (an exception or a normal end destroyed its communicator)",
              "every rank must make the same calls; " + see};
  }
  if (steady_clock::now() - started > timeout_)
    return {"no answer in " + seconds(timeout_) + " from " + describe_peer(awaited),
            "ranks must make the same calls in the same order; if that rank is only slow, raise "
            "the timeout (FSDP_TIMEOUT, in seconds)."};
  return {};
}

std::string Group::describe_peer(int peer) const {
  Slot& other = slot(peer);
  std::string text = formatted("rank {}", peer);
  if (other.state.load() == State::kAbsent) return text + ", which has not joined";
  text += formatted(" (process {}", other.pid);
  if (!processes_.empty() && processes_[peer].stopped()) text += ", stopped by a signal";
  text += "), ";
  uint64_t done = other.operations.load();
  if (done == 0) return text + "which has called nothing yet";
  const Description& last = other.posted[done % 2].description;
  return formatted("{}{}{} (operation {})", text,
                   done == operations_ ? "which is inside " : "whose last call was ", last.text(),
                   done);
}

// --- operations ---

void Group::begin(const Description& description, Location location) {
  if (!broken_.empty())
    throw Error(formatted("rank {}: {} on communicator \"{}\", which an earlier failure broke: {}",
                          rank_, description.text(), name_, broken_),
                "end the process and start it again from the last checkpoint.");
  Slot& mine = slot(rank_);
  uint64_t number = ++operations_;
  mine.posted[number % 2].description = description;
  mine.posted[number % 2].location = location;
  mine.operations.store(number, std::memory_order_release);
  compared_ = false;
  next_round();
}

void Group::next_round() {
  buffer_ ^= 1;
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) await(peer, released_[buffer_]);
}

void Group::leave_staging() {
  publish();
  released_[buffer_] = clock_;
}

void Group::compare_descriptions() {
  compared_ = true;
  const Description& mine = slot(rank_).posted[operations_ % 2].description;
  for (int peer = 0; peer < size_; ++peer) {
    const Description& theirs = slot(peer).posted[operations_ % 2].description;
    if (theirs.agrees_with(mine)) continue;
    raise(formatted("ranks made different calls: rank {} {}, rank {} {}", rank_, mine.text(), peer,
                    theirs.text()),
          "every rank must call the same operations with the same sizes in the same order.",
          kExitFailed);
  }
}

char* Group::staging(int peer) const {
  return control_->data() + slots_bytes(size_) + (int64_t{peer} * 2 + buffer_) * staging_bytes();
}

int64_t Group::staging_bytes() const {
  return staging_bytes_for(size_);
}

void Group::raise(const std::string& what, const std::string& hint, ExitCode code) {
  std::string call =
      operations_ == 0 ? "joining" : slot(rank_).posted[operations_ % 2].description.text();
  broken_ =
      formatted("{} on communicator \"{}\" (operation {}): {}.", call, name_, operations_, what);
  fail(broken_);
  throw CodedError(code, formatted("rank {}: {}", rank_, broken_), hint);
}

void Group::fail(const std::string& why) noexcept {
  if (broken_.empty()) broken_ = why;
  Slot& mine = slot(rank_);
  if (mine.state.load() == State::kFailed) return;
  std::strncpy(mine.failure, why.c_str(), sizeof mine.failure - 1);
  mine.state.store(State::kFailed);
  futex_wake_all(mine.clock);
}

// --- memory ---

std::shared_ptr<Mapping> Group::allocate(int64_t bytes) {
  std::string what = "communicator \"" + name_ + "\"";
  begin(describe(Operation::kAllocate, c10::ScalarType::Byte, bytes));
  std::shared_ptr<Mapping> mapping;
  Slot& maker = slot(0);
  try {
    if (rank_ == 0) {
      mapping = Mapping::create(std::max<int64_t>(bytes, 1), what);
      maker.posted[operations_ % 2].made = mapping->address();
    }
    publish();
    await_all();
    if (rank_ != 0) mapping = Mapping::open(maker.posted[operations_ % 2].made, what);
  } catch (const Error& error) {
    if (broken_.empty()) fail(error.message());
    throw;
  }
  publish();
  await_all();
  if (rank_ == 0) mapping->close();
  Lock lock(windows_mutex_);
  std::erase_if(windows_by_address_, [&](const auto& entry) FSDP_REQUIRES(windows_mutex_) {
    return windows_[entry.second].expired();
  });
  std::erase_if(windows_, [](const auto& entry) { return entry.second.expired(); });
  windows_by_address_[mapping->data()] = next_window_;
  windows_[next_window_++] = mapping;
  return mapping;
}

Location Group::locate(const void* data, int64_t bytes) const {
  const char* begin = static_cast<const char*>(data);
  Lock lock(windows_mutex_);
  auto above = windows_by_address_.upper_bound(begin);
  if (above == windows_by_address_.begin()) return {};
  auto [base, id] = *std::prev(above);
  auto window = windows_.at(id).lock();
  if (!window || begin + bytes > base + window->bytes()) return {};
  return {id, begin - base};
}

void Group::abandon() noexcept {
  abandoned_ = true;
  State joined = State::kJoined;
  slot(rank_).state.compare_exchange_strong(joined, State::kLeft);
  futex_wake_all(slot(rank_).clock);
}

bool Group::one_location() const {
  auto at = [&](int rank) { return slot(rank).posted[operations_ % 2].location; };
  for (int peer = 0; peer < size_; ++peer)
    if (at(peer).window != at(rank_).window || at(peer).offset != at(rank_).offset) return false;
  return true;
}

std::shared_ptr<char> Group::resolve(int peer) const {
  const Location& where = slot(peer).posted[operations_ % 2].location;
  Lock lock(windows_mutex_);
  auto found = windows_.find(where.window);
  auto window = found == windows_.end() ? nullptr : found->second.lock();
  if (!window)
    throw Error(formatted("rank {}: rank {} uses shared memory that this rank has already freed.",
                          rank_, peer),
                "keep a shared buffer alive on every rank until no rank uses it.");
  char* data = window->data() + where.offset;
  return std::shared_ptr<char>(std::move(window), data);
}

}  // namespace fsdp::comm::shm
