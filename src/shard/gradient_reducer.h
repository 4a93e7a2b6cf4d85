// GradientReducer: takes gradients from autograd into flat buffers and reduces them.
//
//   gradients.cpp        one gradient, one reduction, the beginning and end of a backward
//   gradient_slots.cpp   the buffers in which full gradients wait for their reduction
//   gradient_wire.cpp    reductions in fewer bits
//   reduction_order.cpp  the order of reductions, which all ranks share
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fsdp/reduce_op.h"
#include "shard/buffers.h"
#include "shard/gradient_route.h"

namespace fsdp {
struct MemoryReport;
}

namespace fsdp::shard {

class CommContext;
class Flat;
class HostOffload;
class Unit;

// The leaves into which a backward accumulates gradients.
using GradientsToCome = std::unordered_set<const c10::TensorImpl*>;

class GradientReducer {
 public:
  // `units`: of the model; they may change.
  GradientReducer(CommContext& comm, HostOffload& offload,
                  const std::vector<std::shared_ptr<Unit>>& units)
      : comm_(comm), offload_(offload), units_(units) {}
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // --- settings ---
  bool syncs() const { return sync_; }  // false: gradients are kept whole and not reduced
  void set_sync(bool sync) { sync_ = sync; }
  double divide_factor() const { return divide_factor_; }  // 0: the number of ranks
  void set_divide_factor(double factor) { divide_factor_ = factor; }
  void set_hook(std::function<void(at::Tensor, const std::string&)> hook) {
    hook_ = std::move(hook);
  }
  // While another model's step is recorded and this one has gradients, nothing may add to them.
  void keep_gradients(bool keep) { keeps_gradients_ = keep; }
  bool keeps_gradients() const { return keeps_gradients_; }

  // --- a pass: a forward (or several), and the backward after it ---
  void note_use(Unit& unit);  // in forward
  void begin_backward(const GradientsToCome& coming);
  void end_backward(bool failed);
  void reduce_what_is_done();  // the flats whose turn has come
  void repeat(Flat& flat);     // takes part in a reduction without a gradient
  void finish_reductions();    // the compute stream waits for them

  // --- one gradient ---
  void arrived(Flat& flat, size_t parameter);        // from autograd
  GradientPlace open(Flat& flat, size_t parameter);  // see gradient_route.h
  void close(Flat& flat, size_t parameter);

  // --- all gradients ---
  bool has_gradients() const;  // reduced or not
  void drop();                 // of a failed backward
  void forget_cleared();       // cleared by a zero_grad() that isn't ours
  void zero(bool set_to_none);
  // Gradients are still to be multiplied by a factor, which an update takes or settle_factor()
  // applies. Undefined: by nothing.
  const at::Tensor& factor() const { return factor_; }
  void set_factor(at::Tensor factor) { factor_ = std::move(factor); }
  at::Tensor take_factor() { return std::exchange(factor_, at::Tensor()); }
  void settle_factor();

  // --- reports and captures ---
  void add_memory(MemoryReport& report) const;
  void forget_events();
  void forget_units();  // another model has them now

 private:
  // reduction_order.cpp
  void expect(const GradientsToCome& coming);
  void agree_on_use();
  void order_reductions();
  void complete(Flat& flat, size_t parameter);
  void take_turn(Flat& flat);

  // gradients.cpp
  void refuse_if_kept(const Flat& flat) const;
  bool stays(const Flat& flat) const;
  void reduce(Flat& flat);
  at::Tensor scatter(Flat& flat);
  void sum_over_replicas(Flat& flat, const at::Tensor& reduced);
  ReduceOp op() const { return divide_factor_ > 0 ? ReduceOp::SUM : ReduceOp::AVG; }
  static std::string label_of(const Unit& unit);
  void accumulate(Flat& flat, at::Tensor reduced);
  at::Tensor leaving_part(Flat& flat);

  // gradient_wire.cpp
  void make_messages();
  at::Tensor scatter_coded(Flat& flat);

  // gradient_slots.cpp
  GradientSlot* make_slot(const Flat& flat, bool ring, bool shared);
  GradientSlot* find_ring_slot(const Flat& flat, bool shared_only);
  void prepare_slots();
  void take_slot(Flat& flat);
  void share_slot(Flat& flat);
  void release_slot(Flat& flat);

  CommContext& comm_;
  HostOffload& offload_;
  const std::vector<std::shared_ptr<Unit>>& units_;
  bool sync_ = true;
  double divide_factor_ = 0;
  std::function<void(at::Tensor, const std::string&)> hook_;
  bool keeps_gradients_ = false;
  at::Tensor factor_;

  std::vector<std::unique_ptr<GradientSlot>> slots_;
  std::map<Flat*, GradientSlot*> own_slots_;
  uint64_t slot_uses_ = 0;
  at::Tensor sent_, received_;  // messages of reductions in fewer bits, one reduction at a time

  std::vector<Unit*> used_;  // in the forward of this pass, by first use
  uint64_t pass_ = 1;
  bool pass_over_ = false;       // the next forward begins a new one
  std::vector<Unit*> sequence_;  // all even units, by first use as far as it is known
  std::vector<Flat*> turns_;     // the reductions of this backward, in the order all ranks know
  size_t next_turn_ = 0;         // those before it were issued, or had no gradient

  StreamEvent reduced_, replicated_;  // every reduction so far, on each of the two streams
  StreamEvent before_, scattered_;    // hand-over from one stream to the next
};

}  // namespace fsdp::shard
