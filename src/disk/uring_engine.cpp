// The io_uring engine. Pieces are submitted by the thread that starts a transfer and by one reaper
// thread, which waits for completions and submits the next pieces.
//
// Two rules keep this simple. The submission side of the ring is touched only under `ring_mutex_`,
// the completion side only by the reaper. And no more pieces are in flight than there are slots, so
// neither side can overflow.
#include "disk/engine.h"

#ifdef FSDP_HAVE_URING
#include <liburing.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>

namespace fsdp::disk {
namespace {

constexpr uint64_t kWakeUp = ~uint64_t{0};                // user_data of the nop that ends a wait
constexpr int64_t kLargestRegistered = int64_t{1} << 30;  // the kernel's limit per buffer

// Returns 0 and opens `ring`, or returns a negative errno.
int open_ring(io_uring& ring, unsigned entries) {
  const int result = io_uring_queue_init(entries, &ring, 0);
  if (result < 0) return result;
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  const bool enough = probe && io_uring_opcode_supported(probe, IORING_OP_READ) &&
                      io_uring_opcode_supported(probe, IORING_OP_WRITE);
  if (probe) io_uring_free_probe(probe);
  if (enough) return 0;
  io_uring_queue_exit(&ring);
  return -ENOSYS;
}

class UringEngine final : public Engine {
 public:
  UringEngine(const OpenFile& file, const EngineOptions& options, const io_uring& ring,
              std::span<const std::span<char>> memory)
      : Engine(file, options), ring_(ring), slots_(static_cast<size_t>(options.depth)) {
    for (size_t i = 0; i < slots_.size(); ++i) free_.push_back(i);
    register_memory(memory);
    reaper_ = std::thread([this] { reap(); });
  }

  // Drops pieces that haven't started and waits for the others, because the kernel uses their
  // memory.
  ~UringEngine() override {
    {
      const Lock lock(mutex_);
      queue_.clear();
    }
    {
      const Lock lock(ring_mutex_);
      stopping_ = true;
      if (io_uring_sqe* entry = io_uring_get_sqe(&ring_)) {
        io_uring_prep_nop(entry);
        io_uring_sqe_set_data64(entry, kWakeUp);
      }
      submit();
    }
    reaper_.join();  // Ends: the kernel has ended what was submitted
    io_uring_queue_exit(&ring_);
  }

  const char* name() const override { return "io_uring"; }

 private:
  // Saves the kernel a page lookup for every piece. If it refuses (the limit on locked memory),
  // pieces use unregistered memory.
  void register_memory(std::span<const std::span<char>> memory) {
    std::vector<iovec> vectors;
    for (const auto& part : memory)
      for (size_t at = 0; at < part.size(); at += kLargestRegistered)
        vectors.push_back(
            {part.data() + at, std::min<size_t>(part.size() - at, kLargestRegistered)});
    if (vectors.empty()) return;
    const auto count = static_cast<unsigned>(vectors.size());
    if (io_uring_register_buffers(&ring_, vectors.data(), count) == 0) registered_ = vectors;
  }

  // Index of the registered buffer that contains the whole piece, or -1.
  int registered(const Piece& piece) const {
    for (size_t i = 0; i < registered_.size(); ++i) {
      const auto* begin = static_cast<const char*>(registered_[i].iov_base);
      if (piece.memory >= begin && piece.memory + piece.bytes <= begin + registered_[i].iov_len)
        return static_cast<int>(i);
    }
    return -1;
  }

  void wake() override FSDP_EXCLUDES(mutex_, ring_mutex_) {
    const Lock lock(ring_mutex_);
    hand_over();
  }

  void hand_over() FSDP_REQUIRES(ring_mutex_) FSDP_EXCLUDES(mutex_) {
    for (Piece piece; !free_.empty() && take(piece);) {
      const size_t slot = free_.back();
      free_.pop_back();
      slots_[slot] = std::move(piece);
      prepare(slot);
    }
    submit();
  }

  void prepare(size_t slot) FSDP_REQUIRES(ring_mutex_) {
    const Piece& piece = slots_[slot];
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);  // never null: there are more than slots
    const int fd = file_.descriptor, buffer = registered(piece);
    const auto bytes = static_cast<unsigned>(piece.bytes);
    const auto offset = static_cast<uint64_t>(piece.offset);
    if (piece.ticket->direction == Direction::kRead) {
      if (buffer >= 0)
        io_uring_prep_read_fixed(entry, fd, piece.memory, bytes, offset, buffer);
      else
        io_uring_prep_read(entry, fd, piece.memory, bytes, offset);
    } else {
      if (buffer >= 0)
        io_uring_prep_write_fixed(entry, fd, piece.memory, bytes, offset, buffer);
      else
        io_uring_prep_write(entry, fd, piece.memory, bytes, offset);
    }
    io_uring_sqe_set_data64(entry, slot);
  }

  // Retries while the kernel is briefly short of memory. If that lasts, wait() reaches its limit
  // and throws.
  void submit() FSDP_REQUIRES(ring_mutex_) {
    for (int tries = 0; io_uring_sq_ready(&ring_) > 0 && tries < 1000;)
      if (io_uring_submit(&ring_) <= 0) {
        ++tries;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // Ends: after 1000 tries
      }
  }

  // --- reaper thread ---

  void reap() {
    for (bool last = false; !last;) {
      io_uring_cqe* entry = nullptr;
      if (io_uring_wait_cqe(&ring_, &entry) < 0) continue;  // a signal
      do {
        const uint64_t slot = io_uring_cqe_get_data64(entry);
        const int result = entry->res;
        io_uring_cqe_seen(&ring_, entry);
        if (slot != kWakeUp) ended(static_cast<size_t>(slot), result);
      } while (io_uring_peek_cqe(&ring_, &entry) == 0);
      const Lock lock(ring_mutex_);
      hand_over();
      last = stopping_ && free_.size() == slots_.size();
    }
  }

  void ended(size_t slot, int result) {
    Piece piece;
    {
      const Lock lock(ring_mutex_);
      piece = slots_[slot];
    }
    const bool whole = finish(piece, result);
    const Lock lock(ring_mutex_);
    slots_[slot] = whole ? Piece{} : piece;
    if (whole)
      free_.push_back(slot);
    else
      prepare(slot);  // submitted by the next hand_over()
  }

  io_uring ring_;
  std::vector<iovec> registered_;
  Mutex ring_mutex_;  // taken before mutex_; also guards the submission side of ring_
  std::vector<Piece> slots_ FSDP_GUARDED_BY(ring_mutex_);
  std::vector<size_t> free_ FSDP_GUARDED_BY(ring_mutex_);
  bool stopping_ FSDP_GUARDED_BY(ring_mutex_) = false;
  std::thread reaper_;
};

}  // namespace

std::string why_no_uring() {
  io_uring ring{};
  const int result = open_ring(ring, 2);
  if (result == 0) {
    io_uring_queue_exit(&ring);
    return "";
  }
  switch (-result) {
    case EPERM:
    case EACCES:
      return "the system or its container forbids it";
    case ENOSYS:
      return "the kernel has no io_uring, or is older than 5.6";
    default:
      return std::generic_category().message(-result);
  }
}

std::unique_ptr<Engine> make_uring_engine(const OpenFile& file, const EngineOptions& options,
                                          std::span<const std::span<char>> memory) {
  io_uring ring{};
  if (open_ring(ring, static_cast<unsigned>(options.depth) + 1) < 0) return nullptr;
  return std::make_unique<UringEngine>(file, options, ring, memory);
}

}  // namespace fsdp::disk

#else
namespace fsdp::disk {

std::string why_no_uring() {
  return "fsdp was built without liburing";
}

std::unique_ptr<Engine> make_uring_engine(const OpenFile&, const EngineOptions&,
                                          std::span<const std::span<char>>) {
  return nullptr;
}

}  // namespace fsdp::disk
#endif
