#include "comm/core/flight_recorder.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cstddef>
#include <type_traits>

#include "base/format.h"
#include "base/mutex.h"
#include "base/rank_status.h"

namespace fsdp::comm::flight {
namespace {

constexpr uint64_t kSlots = 2048;  // kKept, and room for calls that are being recorded
static_assert(kSlots >= kKept);

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// What doesn't change after a call was issued.
struct Issued {
  const Group* group;
  uint64_t sequence;
  Description what;
  Amounts amounts;
  uint64_t stream;
  int64_t timeout_ms, step, issued_ns;
  int32_t device, thread;
};
static_assert(std::is_trivially_copyable_v<Issued> && sizeof(Issued) % sizeof(uint64_t) == 0);
constexpr size_t kWords = sizeof(Issued) / sizeof(uint64_t);

// A writer sets `number` last, a reader looks at it before and after.
struct Slot {
  std::atomic<uint64_t> number;  // 0: empty, or being written
  std::atomic<int64_t> started_ns, ended_ns;
  std::atomic<bool> failed;
  std::array<std::atomic<uint64_t>, kWords> words;
};

Slot slots[kSlots];
std::atomic<uint64_t> last{0}, forgotten{0};
std::atomic<int64_t> waited_ns{0};
std::atomic<Group*> groups{nullptr};
Mutex groups_mutex;  // writers only

Slot& slot_of(uint64_t number) {
  return slots[number % kSlots];
}

int32_t this_thread() {
  thread_local const auto id = static_cast<int32_t>(syscall(SYS_gettid));
  return id;
}

// Of the last calls. Two threads may finish calls of one communicator in any order.
void raise_to(std::atomic<uint64_t>& highest, uint64_t value) {
  uint64_t seen = highest.load(std::memory_order_relaxed);
  while (seen < value && !highest.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

Group* add_group(const std::string& name, const std::string& backend,
                 const std::vector<int>& ranks) {
  auto* group = new Group;  // kept: records point to it, and a signal handler may read it
  group->backend = backend;
  group->size = static_cast<int>(ranks.size());
  for (int rank : ranks) group->ranks += formatted("{}{}", group->ranks.empty() ? "[" : ", ", rank);
  group->ranks += "]";
  Lock lock(groups_mutex);
  group->next = groups.load();
  auto taken = [&]() FSDP_REQUIRES(groups_mutex) {
    for (const Group* other = group->next; other; other = other->next)
      if (other->name == group->name) return true;
    return false;
  };
  group->name = name;
  for (int again = 2; taken(); ++again) group->name = formatted("{}#{}", name, again);
  groups.store(group, std::memory_order_release);
  return group;
}

const Group* last_group() {
  return groups.load(std::memory_order_acquire);
}

void forget() {
  Lock lock(groups_mutex);
  groups.store(nullptr, std::memory_order_release);  // kept: their communicators may still be there
  forgotten = last.load();
}

Amounts amounts_of(const Description& what, int size) {
  switch (what.operation) {
    case Operation::kAllGather:
      return {what.count, what.count * size};
    case Operation::kReduceScatter:
      return {what.count * size, what.count};
    default:
      return {what.count, what.count};
  }
}

uint64_t issued(Group* group, const Description& what, Amounts amounts,
                std::chrono::milliseconds timeout, Place place, bool making) {
  if (!group) return 0;
  const uint64_t number = last.fetch_add(1, std::memory_order_relaxed) + 1;
  const uint64_t sequence = making ? 0 : group->issued.fetch_add(1, std::memory_order_relaxed) + 1;
  const Issued record{.group = group,
                      .sequence = sequence,
                      .what = what,
                      .amounts = amounts,
                      .stream = place.stream,
                      .timeout_ms = timeout.count(),
                      .step = rank_status::step(),
                      .issued_ns = now_ns(),
                      .device = place.device,
                      .thread = this_thread()};
  const auto words = std::bit_cast<std::array<uint64_t, kWords>>(record);
  Slot& slot = slot_of(number);
  slot.number.store(0, std::memory_order_relaxed);
  slot.started_ns.store(0, std::memory_order_release);
  slot.ended_ns.store(0, std::memory_order_release);
  slot.failed.store(false, std::memory_order_release);
  for (size_t i = 0; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_release);
  slot.number.store(number, std::memory_order_release);
  return number;
}

namespace {

// The communicator of a record that is still there.
Group* group_of(Slot& slot) {
  // The record's first word; see Issued.
  static_assert(offsetof(Issued, group) == 0 && offsetof(Issued, sequence) == sizeof(uint64_t));
  return reinterpret_cast<Group*>(slot.words[0].load(std::memory_order_acquire));
}

}  // namespace

void started(uint64_t number) {
  Slot& slot = slot_of(number);
  if (number == 0 || slot.number.load(std::memory_order_acquire) != number) return;
  if (slot.started_ns.load(std::memory_order_relaxed) != 0) return;
  slot.started_ns.store(now_ns(), std::memory_order_release);
  raise_to(group_of(slot)->started, slot.words[1].load(std::memory_order_acquire));
}

void finished(uint64_t number, bool failed) {
  Slot& slot = slot_of(number);
  if (number == 0 || slot.number.load(std::memory_order_acquire) != number) return;
  const int64_t now = now_ns();
  int64_t unseen = 0;  // a GPU's call may be seen when it has finished
  if (!failed) slot.started_ns.compare_exchange_strong(unseen, now);
  slot.failed.store(failed, std::memory_order_release);
  slot.ended_ns.store(now, std::memory_order_release);
  const uint64_t sequence = slot.words[1].load(std::memory_order_acquire);
  Group* group = group_of(slot);
  if (failed) return;
  raise_to(group->started, sequence);
  raise_to(group->completed, sequence);
}

void add_wait(std::chrono::nanoseconds time) {
  waited_ns.fetch_add(time.count(), std::memory_order_relaxed);
}

std::chrono::nanoseconds waited() {
  return std::chrono::nanoseconds(waited_ns.load(std::memory_order_relaxed));
}

uint64_t first_number() {
  return forgotten.load() + 1;
}

uint64_t last_number() {
  return last.load(std::memory_order_acquire);
}

bool read(uint64_t number, Record& record) {
  const Slot& slot = slot_of(number);
  if (number == 0 || slot.number.load(std::memory_order_acquire) != number) return false;
  std::array<uint64_t, kWords> words;
  for (size_t i = 0; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_acquire);
  record.started_ns = slot.started_ns.load(std::memory_order_acquire);
  record.ended_ns = slot.ended_ns.load(std::memory_order_acquire);
  record.failed = slot.failed.load(std::memory_order_acquire);
  if (slot.number.load(std::memory_order_relaxed) != number) return false;
  const auto issued = std::bit_cast<Issued>(words);
  record.number = number;
  record.group = issued.group;
  record.sequence = issued.sequence;
  record.what = issued.what;
  record.amounts = issued.amounts;
  record.place = {issued.device, issued.stream};
  record.timeout_ms = issued.timeout_ms;
  record.step = issued.step;
  record.thread = issued.thread;
  record.issued_ns = issued.issued_ns;
  return true;
}

}  // namespace fsdp::comm::flight
