#include "checkpoint/staging.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "kernels/split.h"
#include "optim/states.h"
#include "shard/contents.h"
#include "shard/offload.h"

namespace fsdp::checkpoint {
namespace {

constexpr int64_t kAlignment = 64;  // of a tensor in a slot
// A step has hundreds of small copies of its own, and the device's copy engine takes all in the
// order of the calls. So a save asks for little at a time.
constexpr int64_t kDevicePiece = 1 << 20;  // bytes per copy off the device
constexpr size_t kInFlight = 2;            // of these
constexpr int64_t kCopyPiece = 2 << 20;    // bytes per copy of one thread

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Like memcpy, but bypasses the caches: memcpy would first read the memory that it overwrites.
void copy_through(char* to, const char* from, int64_t bytes) {
  int64_t at = 0;
#if defined(__SSE2__)
  for (; at + kAlignment <= bytes; at += kAlignment)
    for (int64_t word = at; word < at + kAlignment; word += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + word),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + word)));
  _mm_sfence();
#endif
  std::memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
}

void copy_on_host(char* to, const char* from, int64_t bytes) {
  const int64_t pieces = (bytes + kCopyPiece - 1) / kCopyPiece;
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kCopyPiece, last = std::min(end * kCopyPiece, bytes);
    copy_through(to + first, from + first, last - first);
  });
}

bool on_disk(const PlannedChunk& chunk) {
  return chunk.source && chunk.source->flat->host && chunk.source->flat->host->parked;
}

struct Cancelled {};

}  // namespace

Staging::Staging(std::shared_ptr<SavePool> pool, at::Device device)
    : pool_(std::move(pool)), device_(device) {}

Staging::~Staging() {
  cancel();
  if (copier_.joinable()) copier_.join();  // Ends: it sees that it is cancelled
  if (filling_.memory) pool_->give(filling_.memory);
  if (reading_.memory) pool_->give(reading_.memory);
  Lock lock(mutex_);
  for (const Slot& slot : slots_) {
    slot.copied->synchronize();
    pool_->give(slot.memory);
  }
}

at::Tensor Staging::Captured::read() const {
  return rest.defined() ? kernels::join_float(whole.to(rest.device()), rest) : whole;
}

void Staging::start(const SavePlan& plan) {
  int64_t room = 0;
  for (const auto& chunk : plan.chunks) {
    const auto bytes = static_cast<int64_t>(chunk.part.memory.nbytes());
    bytes_ += bytes;
    room += aligned(bytes);
  }
  pool_->expect(room);
  filling_.memory = pool_->take([] { return false; });  // throws if there is no memory at all
  if (std::any_of(plan.chunks.begin(), plan.chunks.end(), on_disk)) {
    ChunkReader reader(plan);
    for (const auto& chunk : plan.chunks) put(reader.read(chunk));
    return finish();
  }
  capture(plan);
  begun_.record(device_);
  stream_ = shard::SideStream(device_);
  copier_ = std::thread([this] { copy_items(std::move(items_)); });
}

// --- what is copied ---

// Copies it on the device if there is room.
bool Staging::copy_on_device(Captured& captured, int64_t& room) {
  const at::Tensor& resident = captured.rest.defined() ? captured.rest : captured.whole;
  if (resident.device() != device_ || !shard::has_streams(device_)) return false;
  const int64_t bytes = captured.rest.defined() ? captured.rest.numel() * 4
                                                : static_cast<int64_t>(captured.whole.nbytes());
  if (bytes > room) return false;
  try {
    captured.whole = captured.rest.defined() ? captured.read() : captured.whole.clone();
  } catch (const c10::OutOfMemoryError&) {  // others took it meanwhile
    room = 0;
    return false;
  }
  captured.rest.reset();
  room -= bytes;
  copied_there_ += bytes;
  return true;
}

void Staging::capture(const SavePlan& plan) {
  int64_t room = pool_->room_on_device();
  std::map<std::pair<const shard::Flat*, std::optional<size_t>>, std::shared_ptr<Captured>> known;
  for (const auto& chunk : plan.chunks) {
    const at::Tensor& part = chunk.part.memory;
    if (!chunk.source) {  // its owner may write to it at any time
      items_.push_back({std::make_shared<Captured>(Captured{part.clone(), {}}), 0, part.numel()});
      continue;
    }
    const shard::Flat& flat = *chunk.source->flat;
    auto& captured = known[{&flat, chunk.source->slot}];
    if (!captured) {
      flat.settle();
      captured = std::make_shared<Captured>();
      if (chunk.source->slot)
        captured->whole = optim::states_of(*plan.optimizer).slots(flat).at(*chunk.source->slot);
      else if (flat.rest.defined())
        *captured = {flat.shard, flat.rest};
      else
        captured->whole = flat.master;
      awaited_ |= !copy_on_device(*captured, room);
    }
    items_.push_back({captured, part.storage_offset(), part.numel()});
  }
  pool_->took_on_device(copied_there_);
}

// --- copying ---

void Staging::copy_items(std::vector<Item> items) {
  try {
    const shard::Unseen unseen;
    const shard::OnStream beside(stream_);
    begun_.wait(device_);
    std::shared_ptr<Captured> last;
    at::Tensor whole;
    for (Item& item : items) {
      if (item.from != last) whole = item.from->read();
      last = std::move(item.from);
      put(whole.as_strided({item.count}, {1}, whole.storage_offset() + item.begin));
    }
    finish();
    copied_.synchronize();  // the memory of the copies on the device may be reused only then
  } catch (const Cancelled&) {
    fail(nullptr);
  } catch (...) {
    fail(std::current_exception());
  }
}

void Staging::fail(std::exception_ptr why) {
  try {
    if (stream_.get()) stream_.get()->synchronize();  // copies into slots may be under way
  } catch (const std::exception&) {                   // the device is lost
  }
  Lock lock(mutex_);
  error_ = std::move(why);
  done_ = true;
  changed_.notify_all();
}

void Staging::put(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const at::Tensor bytes = tensor.as_strided({tensor.numel()}, {1}).view(at::kByte);
  for (int64_t at = 0; at < bytes.numel();) {
    if (!filling_.memory) filling_.memory = pool_->take([this] { return cancelled_.load(); });
    if (!filling_.memory) throw Cancelled();
    const int64_t count = std::min(bytes.numel() - at, SavePool::kSlot - filled_);
    put_piece(bytes.narrow(0, at, count));
    at += count;
    filled_ = aligned(filled_ + count);
    if (filled_ == SavePool::kSlot) pass_on_slot();
  }
}

void Staging::put_piece(const at::Tensor& bytes) {
  char* to = filling_.memory + filled_;
  if (bytes.is_cpu())
    return copy_on_host(to, static_cast<const char*>(bytes.const_data_ptr()), bytes.numel());
  for (int64_t at = 0; at < bytes.numel(); at += kDevicePiece) {
    const int64_t count = std::min(bytes.numel() - at, kDevicePiece);
    const at::Tensor piece = bytes.narrow(0, at, count);
    at::from_blob(to + at, {count}, at::kByte).copy_(piece, /*non_blocking=*/true);
    in_flight_.emplace_back().record(device_);
    if (in_flight_.size() <= kInFlight) continue;
    in_flight_.front().synchronize();
    in_flight_.pop_front();
  }
}

void Staging::pass_on_slot() {
  filling_.bytes = std::exchange(filled_, 0);
  filling_.copied = std::make_shared<shard::StreamEvent>();
  filling_.copied->record(device_);
  Lock lock(mutex_);
  slots_.push_back(std::exchange(filling_, {}));
  changed_.notify_all();
}

void Staging::finish() {
  if (filled_ > 0) pass_on_slot();
  copied_.record(device_);
  Lock lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

void Staging::cancel() {
  cancelled_ = true;
  pool_->wake();
  Lock lock(mutex_);
  changed_.notify_all();
}

void Staging::await_copies() {
  if (!awaited_) return;
  const auto begun = std::chrono::steady_clock::now();
  {
    Lock lock(mutex_);
    // Ends: the copier has copied, failed, or was cancelled by the writer.
    changed_.wait(lock, [&]() FSDP_REQUIRES(mutex_) { return done_; });
  }
  copied_.wait(device_);
  held_ += std::chrono::steady_clock::now() - begun;
}

// --- writing ---

Staging::Slot Staging::next_slot() {
  Slot slot;
  {
    Lock lock(mutex_);
    // Ends: the copier waits for the device, whose collectives end by the timeout, and for our
    // slots.
    changed_.wait(lock, [&]() FSDP_REQUIRES(mutex_) { return done_ || !slots_.empty(); });
    if (slots_.empty()) {
      if (error_) std::rethrow_exception(error_);
      TORCH_INTERNAL_ASSERT(false, "a save reads more than was copied");
    }
    slot = std::move(slots_.front());
    slots_.pop_front();
  }
  slot.copied->synchronize();
  return slot;
}

void Staging::read(int64_t bytes, const std::function<void(const void* bytes, size_t size)>& use) {
  while (bytes > 0) {
    if (!reading_.memory) reading_ = next_slot();
    const int64_t count = std::min(bytes, reading_.bytes - at_);
    use(reading_.memory + at_, static_cast<size_t>(count));
    bytes -= count;
    read_so_far_ += count;
    at_ = aligned(at_ + count);
    if (at_ < reading_.bytes) continue;
    pool_->give(std::exchange(reading_, {}).memory);
    at_ = 0;
  }
}

}  // namespace fsdp::checkpoint
