// Masters: who writes to a model's master shards.
//
// Our optimizers write to them between begin_update and end_update (update.h). Others may have got
// them as tensors (Sharded::parameters); nobody may while summon_full_params() is alive.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::shard {

class CommContext;
class Unit;

enum class HandedOut {
  kNowhere,
  kToOptimizer,  // written by update_parameters() only
  kToAnybody,    // and at any time: every gather looks for changes
};

class Masters {
 public:
  // `units`: of the model; they may change.
  Masters(CommContext& comm, const std::vector<std::shared_ptr<Unit>>& units)
      : comm_(comm), units_(units) {}
  Masters(const Masters&) = delete;
  Masters& operator=(const Masters&) = delete;

  // --- tensors of others ---
  HandedOut handed_out() const { return handed_out_; }
  bool watched() const { return handed_out_ == HandedOut::kToAnybody; }
  void hand_out(HandedOut to);
  // Makes the unit's shards equal to its masters, which their owner may have updated without
  // notice. Collective where ranks share memory.
  void follow(Unit& unit, const char* by);
  // An Error unless an operator may write to a handed-out master of this unit now.
  void check_write(const Unit& unit, const char* by);
  void backward_ended() { writer_known_ = false; }

  // --- summon_full_params ---
  void summon() { ++summoned_; }
  void dismiss() { --summoned_; }
  void refuse_while_summoned(const std::string& what) const;

  // --- our optimizers ---
  // Both functions return bytes of an optimizer's states: of all, and of those in host memory.
  void attach(const void* optimizer, std::function<int64_t()> all, std::function<int64_t()> host);
  void detach(const void* optimizer) { optimizers_.erase(optimizer); }
  int64_t state_bytes() const;
  int64_t host_state_bytes() const;
  // Whether the next update will multiply gradients by a clip factor. Others read the gradients
  // themselves.
  bool apply_factors() const { return !optimizers_.empty() && handed_out_ == HandedOut::kNowhere; }

 private:
  struct StateBytes {
    std::function<int64_t()> all, host;
  };

  CommContext& comm_;
  const std::vector<std::shared_ptr<Unit>>& units_;
  HandedOut handed_out_ = HandedOut::kNowhere;
  bool writer_known_ = false;  // whoever writes was checked since the last backward
  int summoned_ = 0;           // number of FullParams alive
  std::map<const void*, StateBytes> optimizers_;
};

}  // namespace fsdp::shard
