#include "memory/activation_offload.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>

#include "base/format.h"
#include "base/mutex.h"
#include "base/seams.h"
#include "fsdp/error.h"
#include "memory/host_pool.h"
#include "memory/region.h"
#include "shard/capture.h"
#include "shard/deferred_tape.h"
#include "shard/device_stream.h"
#include "shard/saved_activations.h"
#include "shard/tensor_access.h"

namespace fsdp::memory {

namespace {

void plan_away(int64_t bytes) {
  auto& planned = shard::this_thread().dry_run.offloaded;
  planned.now += bytes;
  planned.most = std::max(planned.most, planned.now);
  planned.moved += std::max<int64_t>(0, bytes);
}

// Two tensors with one version counter see each other's writes. Tensors with different counters may
// still share a storage (unsafe_chunk); a write to one doesn't change the other's version.
const void* identity_of(const c10::VariableVersion& counter);
template <auto Member>
struct Reach {
  friend const void* identity_of(const c10::VariableVersion& counter) {
    return (counter.*Member).get();
  }
};
template struct Reach<&c10::VariableVersion::version_counter_>;

// A device's copy stream and host pool.
struct Lane {
  explicit Lane(at::Device device) : side(device), pool(device) {}
  shard::SideStream side;
  HostPool pool;
};

// Operators go straight to the backends, unseen by everything that watches operators.
struct Quiet {
  shard::Unseen unseen;
  c10::impl::ExcludeDispatchKeyGuard below{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::DispatchKeySet(shard::deferred::kRecordKey)};
};

// Storages that backward found alive. A weak reference keeps the address from being reused.
class Residents {
 public:
  bool has(const c10::StorageImpl* storage) {
    Lock lock(mutex_);
    return known_.count(storage) > 0;
  }
  void add(const Memory& memory) {
    Lock lock(mutex_);
    if (known_.size() >= most_) {
      std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
      most_ = std::max<size_t>(64, 2 * known_.size());
    }
    known_.emplace(memory.get(), WeakMemory(memory));
  }

 private:
  Mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, WeakMemory> known_ FSDP_GUARDED_BY(mutex_);
  size_t most_ FSDP_GUARDED_BY(mutex_) = 64;
};

// What all threads share. Never destroyed: autograd graphs may outlive static destructors.
struct Shared {
  std::atomic<int64_t> copies_out{0}, copies_in{0};
  Residents residents;
  Mutex mutex;
  std::unordered_map<at::Device, std::unique_ptr<Lane>> lanes FSDP_GUARDED_BY(mutex);
  // The newest copy of each storage.
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<AwayStorage>> away
      FSDP_GUARDED_BY(mutex);
};

Shared& shared() {
  static auto* all = new Shared;
  return *all;
}

Lane& lane_of(at::Device device) {
  Lock lock(shared().mutex);
  std::unique_ptr<Lane>& lane = shared().lanes[device];
  if (!lane) lane = std::make_unique<Lane>(device);
  return *lane;
}

}  // namespace

// A saved storage: on the device, or a copy of its contents at the time of saving in host memory.
class AwayStorage {
 public:
  explicit AwayStorage(const at::Tensor& tensor)
      : memory_(Memory::reclaim_copy(tensor.storage().unsafeGetStorageImpl())),
        weak_(memory_),
        device_(memory_->device()),
        bytes_(static_cast<int64_t>(memory_->nbytes())),
        counter_(tensor.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()),
        lane_(lane_of(device_)) {
    count(true);
    ++shared().copies_out;
    if (device_.is_meta()) {  // a dry run: there is nothing to copy
      plan_away(planned_ = bytes_);
      return;
    }
    Quiet quiet;
    host_ = lane_.pool.take(bytes_);
    shard::StreamEvent saved;
    saved.record(device_);
    {
      shard::OnStream side(lane_.side);
      saved.wait(device_);
      host_.copy_(bytes_of(memory_), /*non_blocking=*/true);
      out_.record(device_);
    }
  }

  // Runs with the last place, on any thread. The streams must be done with the device memory first;
  // only the side stream touches the host memory, in order.
  ~AwayStorage() {
    try {
      drop();
    } catch (...) {  // a failed graph capture
    }
    if (host_.defined()) lane_.pool.give(host_);
    plan_away(-planned_);
    forget(*this);
  }
  AwayStorage(const AwayStorage&) = delete;
  AwayStorage& operator=(const AwayStorage&) = delete;

  void leave() {
    Lock lock(mutex_);
    if (!back_) drop();
  }

  // Starts the copy back to the device.
  void bring() {
    Lock lock(mutex_);
    if (back_) return;
    back_ = true;
    if (memory_) return;  // still on the device
    if (Memory living = weak_.lock()) {
      shared().residents.add(living);
      memory_ = std::move(living);
      return count(true);
    }
    Quiet quiet;
    at::Tensor room = at::empty({bytes_}, at::TensorOptions(at::kByte).device(device_));
    if (host_.defined()) fill(room);
    plan_away(-std::exchange(planned_, 0));
    ++shared().copies_in;
    memory_ = Memory::reclaim_copy(room.storage().unsafeGetStorageImpl());
    count(true);
  }

  Memory here() {
    bring();
    Lock lock(mutex_);
    in_.wait(device_);
    return memory_;
  }

  // --- the newest AwayStorage of a storage, shared by all its views ---

  static std::shared_ptr<AwayStorage> of(const at::Tensor& tensor, bool* made) {
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    std::shared_ptr<AwayStorage> away;  // declared here to be destroyed outside of the lock
    {
      Lock lock(shared().mutex);
      auto known = shared().away.find(storage);
      if (known != shared().away.end()) away = known->second.lock();
    }
    if (away && away->holds(tensor)) return away;
    away = std::make_shared<AwayStorage>(tensor);
    *made = true;
    Lock lock(shared().mutex);
    shared().away.insert_or_assign(storage, away);
    return away;
  }

 private:
  static void forget(const AwayStorage& away) {
    Lock lock(shared().mutex);
    auto known = shared().away.find(away.weak_._unsafe_get_target());
    if (known != shared().away.end() && known->second.expired()) shared().away.erase(known);
  }

  void fill(const at::Tensor& room) FSDP_REQUIRES(mutex_) {
    shard::StreamEvent free;  // earlier work of the compute stream in this memory is done
    free.record(device_);
    {
      shard::OnStream side(lane_.side);
      free.wait(device_);
      room.copy_(host_, /*non_blocking=*/true);
      in_.record(device_);
    }
    lane_.pool.give(host_);
    host_.reset();
  }

  // Whether this is the tensor's current content; a later write makes it stale.
  bool holds(const at::Tensor& tensor) const {
    const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
    return identity_of(counter) == identity_of(counter_) && counter.current_version() == version_;
  }

  void drop() FSDP_REQUIRES(mutex_) {
    if (!memory_) return;
    out_.wait(device_);
    in_.wait(device_);
    count(false);
    memory_.reset();
  }

  void count(bool on) FSDP_REQUIRES(mutex_) {
    if (on && shard::saved_activations::counting())
      shard::saved_activations::add(counted_ = memory_.get(), static_cast<size_t>(bytes_));
    if (!on && counted_) shard::saved_activations::remove(counted_);
    if (!on) counted_ = nullptr;
  }

  Mutex mutex_;
  // Device memory; null while the contents are on the host only.
  Memory memory_ FSDP_GUARDED_BY(mutex_);
  const WeakMemory weak_;
  const at::Device device_;
  const int64_t bytes_;
  const c10::VariableVersion counter_;
  const uint32_t version_;
  Lane& lane_;
  at::Tensor host_ FSDP_GUARDED_BY(mutex_);
  shard::StreamEvent out_ FSDP_GUARDED_BY(mutex_), in_ FSDP_GUARDED_BY(mutex_);
  bool back_ FSDP_GUARDED_BY(mutex_) = false;
  int64_t planned_ FSDP_GUARDED_BY(mutex_) = 0;  // bytes in host memory in a dry run
  const void* counted_ FSDP_GUARDED_BY(mutex_) = nullptr;
};

namespace {

class OffloadedPlace final : public shard::SavedPlace {
 public:
  OffloadedPlace(std::shared_ptr<OffloadedRegion> region, std::shared_ptr<AwayStorage> away,
                 const at::Tensor& tensor)
      : region_(std::move(region)),
        away_(std::move(away)),
        sizes_(tensor.sizes()),
        strides_(tensor.strides()),
        offset_(tensor.storage_offset()),
        type_(tensor.scalar_type()),
        counter_(tensor.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()) {}

  at::Tensor get() override {
    if (counter_.current_version() != version_)
      throw Error(
          formatted("a tensor that backward needs was changed in place after forward saved it "
                    "(offloaded region \"{}\"): version {}, expected {}.",
                    region_->name(), counter_.current_version(), version_),
          "replace the in-place operation (add_, relu_, …) with one that returns a new tensor.");
    region_->come_back();
    return shard::tensor_over(away_->here(), type_, sizes_, strides_, offset_);
  }

 private:
  std::shared_ptr<OffloadedRegion> region_;
  std::shared_ptr<AwayStorage> away_;
  c10::DimVector sizes_, strides_;
  int64_t offset_;
  at::ScalarType type_;
  c10::VariableVersion counter_;
  uint32_t version_;
};

bool is_worth_it(const at::Tensor& tensor) {
  if (!is_plain(tensor) || tensor.is_inference() || tensor.is_conj() || tensor.is_neg() ||
      shard::tag_of(tensor))
    return false;
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  auto bytes = static_cast<int64_t>(storage->nbytes());
  return bytes > 0 && bytes >= seams().smallest_offloaded && !shared().residents.has(storage);
}

}  // namespace

std::unique_ptr<shard::SavedPlace> OffloadedRegion::place(const at::Tensor& tensor) {
  if (!is_worth_it(tensor)) return nullptr;
  if (shard::RecordsStep::now())
    throw Error("offloaded activations can't be part of a CUDA graph.",
                "recompute them instead (Recompute::FULL or SELECTIVE).");
  bool made = false;
  std::shared_ptr<AwayStorage> away = AwayStorage::of(tensor, &made);
  if (made) {
    Lock lock(mutex_);
    storages_.push_back(away);
  }
  return std::make_unique<OffloadedPlace>(shared_from_this(), std::move(away), tensor);
}

bool OffloadedRegion::empty() const {
  Lock lock(mutex_);
  return storages_.empty();
}

void OffloadedRegion::leave() {
  Lock lock(mutex_);
  if (reached_) return;
  for (const auto& weak : storages_)
    if (auto away = weak.lock()) away->leave();
}

// In reverse order: backward needs the last ones first.
void OffloadedRegion::bring() {
  Lock lock(mutex_);
  if (brought_) return;
  brought_ = true;
  for (auto weak = storages_.rbegin(); weak != storages_.rend(); ++weak)
    if (auto away = weak->lock()) away->bring();
}

void OffloadedRegion::come_back() {
  {
    Lock lock(mutex_);
    if (reached_) return;
    reached_ = true;
  }
  bring();
  if (auto before = before_.lock()) before->bring();
}

namespace offload {

Use use_of(at::Device device) {
  const HostPool& pool = lane_of(device).pool;
  return {pool.used(), pool.size()};
}

Copies copies() {
  return {shared().copies_out, shared().copies_in};
}

}  // namespace offload
}  // namespace fsdp::memory
