// Gatherer: gathers units when something needs their parameters, ahead of time where the order of
// use is known, and reshards them when others need the memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "shard/buffers.h"
#include "shard/order.h"
#include "shard/unit.h"

namespace fsdp {
struct MemoryReport;
struct ShardOptions;
}  // namespace fsdp

namespace fsdp::shard {

class CommContext;
class HostOffload;
class Masters;

class Gatherer {
 public:
  // `units`: of the model; they may change.
  Gatherer(CommContext& comm, HostOffload& offload, Masters& masters, const ShardOptions& options,
           const std::vector<std::shared_ptr<Unit>>& units);
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  // --- one unit ---
  // Gathers a unit, with its family, and makes it usable. `by` names the operator (or other caller)
  // that needs it.
  void ensure(Unit& unit, const char* by, bool backward);
  void issue(Unit& unit, const char* by);  // starts the gather of a sharded unit
  void issue_ahead(Unit& unit);            // the same at the user's request
  // Frees a unit's gathered memory. Views of its parameters that still exist throw when read.
  void reshard(Unit& unit);
  void pin(Unit& unit, bool writable);  // gathered until unpinned, in memory of its own
  void unpin(Unit& unit);

  // --- all units ---
  void reshard_all();  // pinned units are gathered again at their next use
  void begin_backward();
  void end_backward(bool failed);
  bool in_backward() const { return in_backward_; }

  // --- writes to masters and shards ---
  void changed(Unit& unit);  // its masters were written: its shards and readers follow
  void shards_written();     // all were: ranks that share memory meet before the next gather
  // Collective where ranks share memory: no rank reads parameters from here to the next gather.
  void synchronize_readers(const char* why);
  void meet_stale_readers(const char* why) {
    if (stale_readers_) synchronize_readers(why);
  }

  // The full buffer, from every rank's `shard` (the flat's master or gradient). Collective.
  at::Tensor gather_shard(Flat& flat, const at::Tensor& shard, const char* what);

  void add_memory(MemoryReport& report) const;
  void forget_events();
  void forget_units();  // another model has them now

 private:
  void ensure_family(Unit& unit, const char* by, bool backward);
  void start(Unit& unit, Slot& slot, const char* by);
  void finish(Unit& unit);
  // gather_wire.cpp: flats that travel in fewer bits
  at::Tensor codes_of(const Unit& unit, const Flat& flat, Slot& slot);
  void decode(const Unit& unit, Flat& flat, const at::Tensor& full, Slot& slot);
  void prefetch(Unit& unit, bool backward);
  bool may_leave(const Unit& unit) const;
  Slot* find_slot(Unit& unit, bool may_grow);
  Slot* add_ring_slot(int64_t bytes);
  size_t ring_capacity() const;
  void pin_writable(Unit& unit);
  void keep_secondary(Unit& unit);
  void check_handles(const Unit& unit, const char* when) const;

  CommContext& comm_;
  HostOffload& offload_;
  Masters& masters_;
  const ShardOptions& options_;
  const std::vector<std::shared_ptr<Unit>>& units_;
  Order order_;
  std::vector<std::unique_ptr<Slot>> ring_;
  at::Tensor codes_;        // on a GPU: of every gather in turn, on the gather stream
  Unit* family_ = nullptr;  // the even unit whose uneven ones are gathered
  uint64_t uses_ = 0;
  bool stale_readers_ = false;  // shards were written since the ranks last met
  bool in_backward_ = false;
  bool grown_ = false;
  StreamEvent before_;  // hand-over from one stream to the next
};

}  // namespace fsdp::shard
