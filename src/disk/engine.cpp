#include "disk/engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "base/file_error.h"
#include "base/format.h"
#include "base/table.h"
#include "fsdp/error.h"

namespace fsdp::disk {
namespace {

const char* verb(Direction direction) {
  return direction == Direction::kRead ? "reading" : "writing";
}

}  // namespace

Ticket Engine::start(Direction direction, int64_t offset, char* memory, int64_t bytes) {
  auto ticket = std::make_shared<Transfer>(Transfer{direction, offset, bytes, bytes, 0, {}, {}});
  {
    const Lock lock(mutex_);
    for (int64_t at = 0; at < bytes; at += options_.piece, ++ticket->pieces)
      queue_.push_back({ticket, offset + at, memory + at, std::min(options_.piece, bytes - at)});
  }
  wake();
  return ticket;
}

bool Engine::done(const Ticket& ticket) {
  const Lock lock(mutex_);
  return ticket->pieces == 0;
}

void Engine::wait(const Ticket& ticket) {
  Lock lock(mutex_);
  while (ticket->pieces > 0) {
    const int64_t before = finished_;
    if (ended_.wait_for(lock, options_.limit, [&]() FSDP_REQUIRES(mutex_) {
          return finished_ != before || ticket->pieces == 0;
        }))
      continue;
    throw Error(formatted("{}: {} {} bytes at {}: no progress for {} s; {} bytes are missing.",
                          file_.path, verb(ticket->direction), with_separators(ticket->bytes),
                          with_separators(ticket->offset), options_.limit.count() / 1000,
                          with_separators(ticket->left)),
                "check the kernel log (dmesg) for disk errors; a network file system may have lost "
                "its connection.");
  }
  if (!ticket->problem.empty()) throw Error(ticket->problem, ticket->hint);
}

bool Engine::take(Piece& piece) {
  const Lock lock(mutex_);
  if (queue_.empty()) return false;
  piece = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

bool Engine::finish(Piece& piece, int64_t result) {
  const Direction direction = piece.ticket->direction;
  if (result >= 0)
    if (const int injected =
            ask_seam(direction == Direction::kRead ? "read" : "write", piece.offset))
      result = -injected;
  if (result == -EINTR || result == -EAGAIN) return false;
  if (result < 0) {
    const int code = static_cast<int>(-result);
    fail(piece, errno_text(code), file_hint(code));
    return true;
  }
  // With O_DIRECT the remainder must start at a block boundary.
  int64_t came = std::min(result, piece.bytes);
  if (came < piece.bytes && file_.direct) came -= came % kAlignment;
  if (came == 0) {
    fail(piece,
         direction == Direction::kRead ? "the file ends there" : "the disk accepted no bytes",
         "another program truncated the file, or the disk is failing (check dmesg).");
    return true;
  }
  const Lock lock(mutex_);
  piece.ticket->left -= came;
  piece.offset += came;
  piece.memory += came;
  piece.bytes -= came;
  if (piece.bytes > 0) return false;
  --piece.ticket->pieces;
  ++finished_;
  ended_.notify_all();
  return true;
}

void Engine::fail(Piece& piece, const std::string& why, const std::string& hint) {
  const Lock lock(mutex_);
  Transfer& transfer = *piece.ticket;
  if (transfer.problem.empty()) {
    transfer.problem = file_.path + ": " + verb(transfer.direction) + " " +
                       with_separators(piece.bytes) + " bytes at " + with_separators(piece.offset) +
                       " failed: " + why + ".";
    transfer.hint = hint;
  }
  --transfer.pieces;
  ++finished_;
  ended_.notify_all();
}

Memory huge_pages(int64_t bytes) {
  constexpr size_t kHugePage = 2 << 20;
  const size_t whole = (static_cast<size_t>(bytes) + kHugePage - 1) / kHugePage * kHugePage;
  Memory memory(static_cast<char*>(std::aligned_alloc(kHugePage, whole)),
                [](char* all) { std::free(all); });
  if (memory) ::madvise(memory.get(), whole, MADV_HUGEPAGE);  // only advice
  return memory;
}

std::unique_ptr<Engine> make_engine(const OpenFile& file, const EngineOptions& options,
                                    std::span<const std::span<char>> memory) {
  if (options.uring && file.direct)
    if (auto engine = make_uring_engine(file, options, memory)) return engine;
  return make_thread_engine(file, options);
}

}  // namespace fsdp::disk
