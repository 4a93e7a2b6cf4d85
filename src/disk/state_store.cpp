#include "disk/state_store.h"

#include <algorithm>

#include "base/format.h"
#include "base/table.h"

namespace fsdp::disk {

StateStore::StateStore(const std::string& directory, std::vector<std::vector<int64_t>> entries,
                       const StoreOptions& options)
    : memory_(nullptr, nullptr) {
  if (options.buffers < 2)
    throw Error(formatted("state on disk needs at least 2 buffers, not {}.", options.buffers),
                "set buffers to 2 or more: one is in use while another is read or written.");
  int64_t total = 0, largest = 0;  // bytes of an entry
  for (const auto& tensors : entries) {
    Entry& entry = entries_.emplace_back();
    entry.offset = total;
    for (const int64_t bytes : tensors) {
      entry.begins.push_back(entry.bytes);
      entry.bytes += aligned(bytes);
    }
    entry.next = static_cast<int>(entries_.size() % entries.size());
    total += entry.bytes;
    largest = std::max(largest, entry.bytes);
  }
  file_ = std::make_unique<ScratchFile>(directory, std::max(total, kAlignment), options.direct);
  const auto count = static_cast<size_t>(options.buffers);
  memory_ = huge_pages(std::max(largest, kAlignment) * options.buffers);
  if (!memory_)
    throw Error(formatted("not enough memory for {} buffers of {} for state on disk.", count,
                          human_bytes(static_cast<double>(largest))),
                "use smaller or fewer buffers.");
  std::vector<std::span<char>> parts;
  for (size_t i = 0; i < count; ++i) {
    buffers_.emplace_back().memory = memory_.get() + i * static_cast<size_t>(largest);
    parts.emplace_back(buffers_.back().memory, static_cast<size_t>(largest));
  }
  memory_bytes_ = largest * options.buffers;
  engine_ = make_engine(*file_, options.engine, parts);
}

StoreCounts StateStore::counts() const {
  const Lock lock(mutex_);
  return counts_;
}

template <typename Work>
auto StateStore::guarded(Work work) {
  const Lock lock(mutex_);
  if (failure_) throw *failure_;
  try {
    return work();
  } catch (const Error& problem) {
    failure_ = problem;
    throw;
  }
}

std::span<char* const> StateStore::get(int entry) {
  return guarded([&]() FSDP_REQUIRES(mutex_) {
    place(entry);
    ++counts_.gets;
    if (last_ >= 0) entries_[static_cast<size_t>(last_)].next = entry;
    last_ = entry;
    Buffer* buffer = holding(entry);
    if (buffer) {
      if (buffer->state == State::kHeld)
        throw Error(formatted("entry {} of the state on disk is already held.", entry),
                    "put it back before the next get.");
      ++counts_.ahead;
    } else {
      buffer = &claim(entry);
      read(*buffer, entry);
    }
    if (buffer->state == State::kReading) read_ahead(entry);  // keeps the disk busy while we wait
    await(*buffer);  // a write too: it must not see the caller's changes
    become(*buffer, State::kHeld);
    read_ahead(entry);
    return std::span<char* const>(buffer->tensors);
  });
}

void StateStore::put(int entry, bool changed) {
  guarded([&]() FSDP_REQUIRES(mutex_) {
    Buffer* buffer = holding(entry);
    if (!buffer || buffer->state != State::kHeld)
      throw Error(formatted("entry {} of the state on disk is not held.", entry), "get it first.");
    become(*buffer, changed ? State::kWriting : State::kFree);
    if (changed) {
      const Entry& to = place(entry);
      buffer->ticket = engine_->start(Direction::kWrite, to.offset, buffer->memory, to.bytes);
      counts_.bytes_written += to.bytes;
    }
    read_ahead(last_);
  });
}

void StateStore::flush() {
  guarded([&]() FSDP_REQUIRES(mutex_) {
    for (Buffer& buffer : buffers_)
      if (buffer.state == State::kWriting) {
        await(buffer);
        become(buffer, State::kFree);
      }
  });
}

void StateStore::become(Buffer& buffer, State state) {
  buffer.state = state;
  buffer.since = ++clock_;
}

const StateStore::Entry& StateStore::place(int entry) const {
  if (entry < 0 || static_cast<size_t>(entry) >= entries_.size())
    throw Error(formatted("the state on disk has {} entries; there is no entry {}.",
                          entries_.size(), entry),
                "entries count from 0.");
  return entries_[static_cast<size_t>(entry)];
}

StateStore::Buffer* StateStore::holding(int entry) {
  for (Buffer& buffer : buffers_)
    if (buffer.entry == entry) return &buffer;
  return nullptr;
}

StateStore::Buffer* StateStore::oldest(State state) {
  Buffer* found = nullptr;
  for (Buffer& buffer : buffers_)
    if (buffer.state == state && (!found || buffer.since < found->since)) found = &buffer;
  return found;
}

void StateStore::await(Buffer& buffer) {
  if (!buffer.ticket) return;
  engine_->wait(buffer.ticket);
  buffer.ticket.reset();
}

void StateStore::collect() {
  for (Buffer& buffer : buffers_)
    if (buffer.state == State::kWriting && engine_->done(buffer.ticket)) {
      await(buffer);
      become(buffer, State::kFree);
    }
}

StateStore::Buffer* StateStore::free_one() {
  collect();
  return oldest(State::kFree);
}

// If nothing is free, waits for a write; without writes, evicts an entry that was read ahead.
StateStore::Buffer& StateStore::claim(int entry) {
  Buffer* buffer = free_one();
  if (!buffer) buffer = oldest(State::kWriting);
  if (!buffer) buffer = oldest(State::kReading);
  if (!buffer)
    throw Error(formatted("all {} buffers for state on disk are held, and entry {} needs one.",
                          buffers_.size(), entry),
                "put back entries that are done, or use more buffers.");
  await(*buffer);
  return *buffer;
}

void StateStore::read(Buffer& buffer, int entry) {
  const Entry& from = place(entry);
  buffer.entry = entry;
  buffer.tensors.clear();
  for (const int64_t begin : from.begins) buffer.tensors.push_back(buffer.memory + begin);
  become(buffer, State::kReading);
  buffer.ticket = engine_->start(Direction::kRead, from.offset, buffer.memory, from.bytes);
  counts_.bytes_read += from.bytes;
}

void StateStore::read_ahead(int entry) {
  if (entry < 0) return;
  int next = place(entry).next;
  for (size_t far = 1; far < buffers_.size() && next != entry; ++far) {
    if (!holding(next)) {
      Buffer* buffer = free_one();
      if (!buffer) return;
      read(*buffer, next);
    }
    next = place(next).next;
  }
}

}  // namespace fsdp::disk
