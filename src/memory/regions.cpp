#include "memory/regions.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "base/format.h"
#include "base/log.h"
#include "base/mutex.h"
#include "memory/activation_offload.h"
#include "memory/region.h"
#include "shard/deferred_tape.h"
#include "shard/tape_hook.h"

namespace fsdp::memory {
namespace {

constexpr size_t kMostSteps = 1 << 20;  // bounds the memory of a region that never ends

// --- the modules ---

using Modules = std::vector<std::shared_ptr<Chosen>>;

struct Watched {
  // A weak reference keeps the address from being reused by another tensor.
  WeakTensor parameter;
  std::shared_ptr<const Modules> modules;
};

class Recomputation final : public shard::TapeHooks {
 public:
  // Installed on first use. Never destroyed: threads may outlive static destructors.
  static Recomputation& get() {
    static Recomputation* all = [] {
      auto* made = new Recomputation;
      shard::set_tape_hooks(made);
      return made;
    }();
    return *all;
  }

  std::unique_ptr<shard::TapeHook> for_thread() override;

  bool watches(const at::Tensor& parameter) const override {
    Lock lock(mutex_);
    return parameters_.contains(parameter.unsafeGetTensorImpl());
  }

  // The modules that a use of the parameter opens; null: it isn't watched.
  std::shared_ptr<const Modules> modules_of(const c10::TensorImpl* parameter) const {
    Lock lock(mutex_);
    auto known = parameters_.find(parameter);
    return known == parameters_.end() ? nullptr : known->second.modules;
  }

  void watch(const at::Tensor& parameter, Modules modules) {
    Lock lock(mutex_);
    std::erase_if(parameters_, [](const auto& entry) { return entry.second.parameter.expired(); });
    Watched watched{WeakTensor(parameter.getIntrusivePtr()),
                    std::make_shared<const Modules>(std::move(modules))};
    for (const auto& module : *watched.modules) module->parameters.push_back(watched.parameter);
    parameters_.insert_or_assign(parameter.unsafeGetTensorImpl(), std::move(watched));
  }

  void unwatch(const at::Tensor& parameter) {
    Lock lock(mutex_);
    parameters_.erase(parameter.unsafeGetTensorImpl());
  }

  void say_once(const std::string& text) {
    Lock lock(mutex_);
    if (said_.insert(text).second) log::info(text);
  }

 private:
  mutable Mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Watched> parameters_ FSDP_GUARDED_BY(mutex_);
  std::set<std::string> said_ FSDP_GUARDED_BY(mutex_);
};

void say_once(const std::string& text) {
  Recomputation::get().say_once(text);
}

// --- the open regions of a thread ---

struct Open {
  std::shared_ptr<Region> region;            // null: activations are kept or offloaded
  std::shared_ptr<OffloadedRegion> offload;  // null: activations aren't offloaded
  std::shared_ptr<Chosen> module;            // null: a piece of code
  const c10::TensorImpl* first = nullptr;    // the parameter that opened it
  bool inner = false;                        // inside of other open regions
};

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

class Regions final : public shard::TapeHook {
 public:
  static Regions& of_thread() {
    Recomputation::get();  // or the thread has no hook
    return static_cast<Regions&>(*shard::tape_hook());
  }

  void touched(c10::TensorImpl* parameter) override {
    if (replaying_ || in_backward() || !shard::GraphWanted::now()) return;
    const auto modules = Recomputation::get().modules_of(parameter);
    if (!modules) return;
    auto runs = [&](const Open& entry) {
      return entry.module &&
             std::find(modules->begin(), modules->end(), entry.module) != modules->end();
    };
    std::shared_ptr<Chosen> next;
    if (std::any_of(open_.begin(), open_.end(), runs)) {
      // The parameter that opened the region is used again: the module runs once more.
      const Open& again = open_.back();
      if (again.first != parameter || !runs(again)) return;
      next = again.module;
    } else if (!modules->empty()) {
      next = modules->front();
    }
    if (!open_.empty() && open_.back().module) end();
    if (next) begin(next, parameter);
  }

  void operate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
               torch::jit::Stack* stack) override {
    keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, shard::deferred::kRecordKey);
    const OperatorFacts& facts = facts_of(op);
    if (facts.composite) return op.redispatchBoxed(keys, stack);
    if (facts.view || facts.kept) {
      c10::impl::ExcludeDispatchKeyGuard inside(shard::deferred::kRecordKey);
      return op.redispatchBoxed(keys, stack);
    }
    Open& last = open_.back();
    if (facts.unknown)  // it may write memory of any region
      give_up_all(formatted("the side effects of {} are unknown", op.schema().name()));
    else if (last.region && last.region->abandoned())
      stop(last);  // an exception ended the pass, or no gradient is needed
    else if (last.region && last.region->steps() >= kMostSteps)
      give_up_all("it has more than a million operators");
    choose_key();
    c10::impl::ExcludeDispatchKeyGuard inside(shard::deferred::kRecordKey);
    bool once = shard::InGraph::now() && draws(facts, *stack);  // its results are kept
    if (last.region && !once) return record(facts, keys, stack);
    if (facts.writes && shard::taping()) protect_written(facts, *stack);
    op.redispatchBoxed(keys, stack);
  }

  std::unique_ptr<shard::SavedPlace> pack(const at::Tensor& tensor) override {
    return place_in(open_.size(), tensor);
  }

  // Closes all regions, inner ones first: backward isn't recorded.
  void backward_begins() override {
    for (auto entry = open_.rbegin(); entry != open_.rend(); ++entry) stop(*entry);
    while (!open_.empty() && open_.back().module) end();
    choose_key();
  }

  // --- regions of pieces of code ---

  size_t open_scope(Recompute mode) {
    const size_t depth = open_.size();
    const bool records = shard::GraphWanted::now() && !in_backward() && !replaying_;
    begin(mode, "fsdp::recompute", records);
    return depth;
  }
  void close_scope(size_t depth) {
    while (open_.size() > depth) end();
  }

 private:
  // The key is included while a region records. If that isn't the innermost one, it only watches
  // for writes to tensors that it has recorded.
  void choose_key() {
    bool records = false, offloads = false;
    for (const Open& entry : open_) {
      records |= entry.region != nullptr;
      offloads |= entry.offload != nullptr;
    }
    shard::set_taping(records);
    shard::this_thread().packing = offloads || records;
  }

  void begin(Recompute mode, const std::string& name, bool records,
             std::shared_ptr<Chosen> module = nullptr, const c10::TensorImpl* first = nullptr) {
    Open entry{nullptr, nullptr, std::move(module), first, !open_.empty()};
    if (records && (mode == Recompute::OFFLOAD || mode == Recompute::FULL_OFFLOAD))
      entry.offload = std::make_shared<OffloadedRegion>(name, leaving_);
    if (records && mode != Recompute::OFFLOAD)
      entry.region = std::make_shared<Region>(name, mode == Recompute::SELECTIVE);
    for (auto* regions : {&closed_, &inner_})
      std::erase_if(*regions, [](const auto& region) { return region.expired(); });
    open_.push_back(std::move(entry));
    choose_key();
  }

  void end() {
    stop(open_.back());
    if (open_.back().module) see_all(*open_.back().module);
    open_.pop_back();
    choose_key();
  }

  // A place for the tensor in one of the first `count` open regions, the innermost that has one.
  std::unique_ptr<shard::SavedPlace> place_in(size_t count, const at::Tensor& tensor) const {
    std::unique_ptr<shard::SavedPlace> place;
    while (!place && count-- > 0) {
      const Open& entry = open_[count];
      if (entry.region) place = entry.region->place(tensor);
      if (!place && entry.offload) return entry.offload->place(tensor);
    }
    return place;
  }

  void stop(Open& entry) {
    const std::shared_ptr<Region> region = std::exchange(entry.region, nullptr);
    if (region)
      region->close([&](const at::Tensor& tensor) {
        return place_in(static_cast<size_t>(&entry - open_.data()) + 1, tensor);
      });
    if (auto offload = std::move(entry.offload); offload && !offload->empty()) {
      if (auto before = leaving_.lock()) before->leave();
      leaving_ = offload;
    }
    entry.offload.reset();
    if (!region || region.use_count() == 1) return;
    closed_.push_back(region);  // a place holds it
    if (entry.inner) inner_.push_back(region);
  }

  // Stops recording a region for good, and makes right away what autograd has a place for.
  void give_up(Open& entry, const std::string& why) {
    if (!entry.region) return;
    std::shared_ptr<Region> region = std::move(entry.region);
    entry.region.reset();
    choose_key();
    replaying_ = true;
    try {
      region->settle();
    } catch (...) {
      replaying_ = false;
      throw;
    }
    replaying_ = false;
    std::string what = "a piece of code under fsdp::recompute";
    if (entry.module) {
      entry.module->kept = true;
      what = formatted("module \"{}\"", entry.module->path);
    }
    say_once(formatted("recompute: {} keeps its activations instead of recomputing them: {}.", what,
                       why));
  }

  // Outer regions first: an inner one may read what they have made.
  void give_up_all(const std::string& why) {
    for (Open& entry : open_) give_up(entry, why);
  }

  void begin(const std::shared_ptr<Chosen>& module, const c10::TensorImpl* first) {
    begin(module->mode, module->path, !module->kept, module, first);
    see_only(*module, first);
  }

  void record(const OperatorFacts& facts, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    Open& last = open_.back();
    std::shared_ptr<Region> region = last.region;
    Region::Fit fit = region->begin(facts, *stack);
    if (fit != Region::Fit::kRecorded) {
      region->drop();
      if (fit == Region::Fit::kMixed)
        give_up_all(facts.op.schema().name() +
                    " writes to tensors inside and outside of the region");
      protect_written(facts, *stack);
      return facts.op.redispatchBoxed(keys, stack);
    }
    // Regions inside of it or around it may have read its own tensors.
    if (facts.writes && (!inner_.empty() || open_.size() > 1))
      protect(inner_, region.get(), facts, *stack);
    try {
      facts.op.redispatchBoxed(keys, stack);
    } catch (...) {
      region->drop();
      throw;
    }
    region->finish(*stack);
  }

  void protect_written(const OperatorFacts& facts, const torch::jit::Stack& stack) {
    protect(closed_, /*but=*/nullptr, facts, stack);
  }

  // Makes the open regions and those in `closed`, except `but`, copy what their steps have read of
  // the tensors about to be written.
  void protect(const std::vector<std::weak_ptr<Region>>& closed, const Region* but,
               const OperatorFacts& facts, const torch::jit::Stack& stack) {
    size_t count = facts.arguments.size(), first = stack.size() - count;
    auto ask = [&](Region& region, c10::StorageImpl* storage) {
      if (&region != but && region.before_write(storage))
        say_once(
            formatted("recompute: {} writes to a tensor that region \"{}\" has read; the region "
                      "keeps a copy.",
                      facts.op.schema().name(), region.name()));
    };
    auto see = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) return;
      c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
      for (const auto& weak : closed)
        if (auto region = weak.lock()) ask(*region, storage);
      for (const Open& entry : open_)
        if (entry.region) ask(*entry.region, storage);
    };
    for (size_t i = 0; i < count; ++i) {
      const c10::IValue& value = stack[first + i];
      if (facts.arguments[i] == OperatorFacts::kReads) continue;
      if (value.isTensor()) see(value.toTensor());
      if (value.isTensorList())
        for (const at::Tensor& tensor : value.toTensorVector()) see(tensor);
    }
  }

  std::vector<Open> open_;
  std::vector<std::weak_ptr<Region>> closed_;  // regions whose tapes may still be replayed
  std::vector<std::weak_ptr<Region>> inner_;   // those of them that were inside of others
  std::weak_ptr<OffloadedRegion> leaving_;     // the last closed one, still on the device
  bool replaying_ = false;
};

std::unique_ptr<shard::TapeHook> Recomputation::for_thread() {
  return std::make_unique<Regions>();
}

}  // namespace

void watch(const at::Tensor& parameter, std::vector<std::shared_ptr<Chosen>> modules) {
  Recomputation::get().watch(parameter, std::move(modules));
}

void unwatch(const at::Tensor& parameter) {
  Recomputation::get().unwatch(parameter);
}

bool is_watched(const at::Tensor& parameter) {
  const shard::TapeHooks* hooks = shard::tape_hooks();
  return hooks && hooks->watches(parameter);
}

size_t open_scope(Recompute mode) {
  return Regions::of_thread().open_scope(mode);
}

void close_scope(size_t depth) {
  Regions::of_thread().close_scope(depth);
}

}  // namespace fsdp::memory
