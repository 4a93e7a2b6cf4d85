#include "memory/regions.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <unordered_map>

#include "base/log.h"
#include "memory/activation_offload.h"
#include "memory/region.h"
#include "shard/deferred_tape.h"
#include "shard/tape_hook.h"

namespace fsdp::memory {
namespace {

constexpr size_t kMostSteps = 1 << 20;  // bounds the memory of a region that never ends

// --- the modules ---

struct Watched {
  // A weak reference keeps the address from being reused by another tensor.
  WeakTensor parameter;
  std::vector<std::shared_ptr<Chosen>> modules;
};

struct Watch {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Watched> parameters;
};

Watch& all_watched() {
  static Watch* all = new Watch;  // threads may outlive static destructors
  return *all;
}

void say_once(const std::string& text) {
  static std::mutex mutex;
  static auto* said = new std::set<std::string>;
  std::lock_guard lock(mutex);
  if (said->insert(text).second) log::info(text);
}

// --- the open regions of a thread ---

struct Open {
  std::shared_ptr<Region> region;            // null: activations are kept or offloaded
  std::shared_ptr<OffloadedRegion> offload;  // null: activations aren't offloaded
  std::shared_ptr<Chosen> module;            // null: a piece of code
  const c10::TensorImpl* first = nullptr;    // the parameter that opened it
  bool inner = false;                        // inside of other open regions
};

struct Thread {
  std::vector<Open> open;
  std::vector<std::weak_ptr<Region>> closed;  // regions whose tapes may still be replayed
  std::vector<std::weak_ptr<Region>> inner;   // those of them that were inside of others
  std::weak_ptr<OffloadedRegion> leaving;     // the last closed one, still on the device
  bool replaying = false;

  // The key is included while a region records. If that isn't the innermost one, it only watches
  // for writes to tensors that it has recorded.
  void choose_key() {
    bool records = false, offloads = false;
    for (const Open& entry : open) {
      records |= entry.region != nullptr;
      offloads |= entry.offload != nullptr;
    }
    shard::set_taping(records);
    shard::set_packing(offloads || (records && open.back().region));
  }

  void begin(Recompute mode, const std::string& name, bool records,
             std::shared_ptr<Chosen> module = nullptr, const c10::TensorImpl* first = nullptr) {
    Open entry{nullptr, nullptr, std::move(module), first, !open.empty()};
    if (records && mode == Recompute::OFFLOAD)
      entry.offload = std::make_shared<OffloadedRegion>(name, leaving);
    else if (records)
      entry.region = std::make_shared<Region>(name, mode == Recompute::SELECTIVE);
    for (auto* regions : {&closed, &inner})
      std::erase_if(*regions, [](const auto& region) { return region.expired(); });
    open.push_back(std::move(entry));
    choose_key();
  }

  void end() {
    stop(open.back());
    if (open.back().module) see_all(*open.back().module);
    open.pop_back();
    choose_key();
  }

  void stop(Open& entry) {
    if (auto offload = std::move(entry.offload); offload && !offload->empty()) {
      if (auto before = leaving.lock()) before->leave();
      leaving = offload;
    }
    entry.offload.reset();
    if (!entry.region) return;
    std::shared_ptr<Region> region = std::move(entry.region);
    entry.region.reset();
    region->close();
    if (region.use_count() == 1) return;
    closed.push_back(region);  // a place holds it
    if (entry.inner) inner.push_back(region);
  }

  // Stops recording a region for good, and makes everything now that autograd has a place for.
  void give_up(Open& entry, const std::string& why) {
    if (!entry.region) return;
    std::shared_ptr<Region> region = std::move(entry.region);
    entry.region.reset();
    choose_key();
    replaying = true;
    try {
      region->settle();
    } catch (...) {
      replaying = false;
      throw;
    }
    replaying = false;
    std::string what = "a piece of code under fsdp::recompute";
    if (entry.module) {
      entry.module->kept = true;
      what = "module \"" + entry.module->path + "\"";
    }
    say_once("recompute: " + what + " keeps its activations instead of recomputing them: " + why +
             ".");
  }
};

Thread& this_thread() {
  static thread_local Thread thread;
  return thread;
}

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

// --- calls from the engine ---

class Hook final : public shard::TapeHook {
 public:
  void touched(c10::TensorImpl* parameter) override {
    Thread& thread = this_thread();
    if (thread.replaying || in_backward() || !shard::GraphWanted::now()) return;
    std::shared_ptr<Chosen> next;
    {
      Watch& all = all_watched();
      std::lock_guard lock(all.mutex);
      auto known = all.parameters.find(parameter);
      if (known == all.parameters.end()) return;
      const auto& modules = known->second.modules;
      auto runs = [&](const Open& entry) {
        return entry.module &&
               std::find(modules.begin(), modules.end(), entry.module) != modules.end();
      };
      if (std::any_of(thread.open.begin(), thread.open.end(), runs)) {
        // The parameter that opened the region is used again: the module runs once more.
        const Open& again = thread.open.back();
        if (again.first != parameter || !runs(again)) return;
        next = again.module;
      } else if (!modules.empty()) {
        next = modules.front();
      }
    }
    if (!thread.open.empty() && thread.open.back().module) thread.end();
    if (next) begin(next, parameter);
  }

  void operate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
               torch::jit::Stack* stack) override {
    keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, shard::deferred::kRecordKey);
    const OperatorFacts& facts = facts_of(op);
    if (facts.composite) return op.redispatchBoxed(keys, stack);
    Thread& thread = this_thread();
    if (facts.view || facts.kept) {
      c10::impl::ExcludeDispatchKeyGuard inside(shard::deferred::kRecordKey);
      return op.redispatchBoxed(keys, stack);
    }
    Open& last = thread.open.back();
    if (facts.unknown)  // it may write memory of any region
      for (Open& entry : thread.open)
        thread.give_up(entry, "the side effects of " + op.schema().name() + " are unknown");
    else if (last.region && last.region->abandoned())
      thread.stop(last);  // an exception ended the pass, or no gradient is needed
    else if (last.region && last.region->steps() >= kMostSteps)
      thread.give_up(last, "it has more than a million operators");
    thread.choose_key();
    c10::impl::ExcludeDispatchKeyGuard inside(shard::deferred::kRecordKey);
    bool once = shard::InGraph::now() && draws(facts, *stack);  // its results are kept
    if (last.region && !once) return record(thread, facts, keys, stack);
    if (facts.writes && shard::taping()) protect_written(thread, facts, *stack);
    op.redispatchBoxed(keys, stack);
  }

  std::unique_ptr<shard::SavedPlace> pack(const at::Tensor& tensor) override {
    Thread& thread = this_thread();
    std::unique_ptr<shard::SavedPlace> place;
    if (const auto& region = thread.open.back().region) place = region->place(tensor);
    for (auto entry = thread.open.rbegin(); !place && entry != thread.open.rend(); ++entry)
      if (entry->offload) return entry->offload->place(tensor);
    return place;
  }

  // Closes all regions: backward isn't recorded.
  void backward_begins() override {
    Thread& thread = this_thread();
    for (Open& entry : thread.open) thread.stop(entry);
    while (!thread.open.empty() && thread.open.back().module) thread.end();
    thread.choose_key();
  }

  bool watches(const at::Tensor& parameter) const override { return is_watched(parameter); }

 private:
  static void begin(const std::shared_ptr<Chosen>& module, const c10::TensorImpl* first) {
    this_thread().begin(module->mode, module->path, !module->kept, module, first);
    see_only(*module, first);
  }

  static void record(Thread& thread, const OperatorFacts& facts, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
    Open& last = thread.open.back();
    std::shared_ptr<Region> region = last.region;
    Region::Fit fit = region->begin(facts, *stack);
    if (fit != Region::Fit::kRecorded) {
      region->drop();
      if (fit == Region::Fit::kMixed)
        thread.give_up(
            last, facts.op.schema().name() + " writes to tensors inside and outside of the region");
      protect_written(thread, facts, *stack);
      return facts.op.redispatchBoxed(keys, stack);
    }
    // Regions inside of it or around it may have read its own tensors.
    if (facts.writes && (!thread.inner.empty() || thread.open.size() > 1))
      protect(thread, thread.inner, region.get(), facts, *stack);
    try {
      facts.op.redispatchBoxed(keys, stack);
    } catch (...) {
      region->drop();
      throw;
    }
    region->finish(*stack);
  }

  static void protect_written(Thread& thread, const OperatorFacts& facts,
                              const torch::jit::Stack& stack) {
    protect(thread, thread.closed, /*but=*/nullptr, facts, stack);
  }

  // Makes the open regions and those in `closed`, except `but`, copy what their steps have read of
  // the tensors about to be written.
  static void protect(Thread& thread, const std::vector<std::weak_ptr<Region>>& closed,
                      const Region* but, const OperatorFacts& facts,
                      const torch::jit::Stack& stack) {
    size_t count = facts.arguments.size(), first = stack.size() - count;
    auto ask = [&](Region& region, c10::StorageImpl* storage) {
      if (&region != but && region.before_write(storage))
        say_once("recompute: " + facts.op.schema().name() + " writes to a tensor that region \"" +
                 region.name() + "\" has read; the region keeps a copy.");
    };
    auto see = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) return;
      c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
      for (const auto& weak : closed)
        if (auto region = weak.lock()) ask(*region, storage);
      for (const Open& entry : thread.open)
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
};

void install_regions() {
  static Hook* hook = [] {
    auto* made = new Hook;
    shard::set_tape_hook(made);
    return made;
  }();
  static_cast<void>(hook);
}

}  // namespace

void watch(const at::Tensor& parameter, std::vector<std::shared_ptr<Chosen>> modules) {
  install_regions();
  Watch& all = all_watched();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.parameters, [](const auto& entry) { return entry.second.parameter.expired(); });
  Watched watched{WeakTensor(parameter.getIntrusivePtr()), std::move(modules)};
  for (const auto& module : watched.modules) module->parameters.push_back(watched.parameter);
  all.parameters.insert_or_assign(parameter.unsafeGetTensorImpl(), std::move(watched));
}

void unwatch(const at::Tensor& parameter) {
  Watch& all = all_watched();
  std::lock_guard lock(all.mutex);
  all.parameters.erase(parameter.unsafeGetTensorImpl());
}

bool is_watched(const at::Tensor& parameter) {
  Watch& all = all_watched();
  std::lock_guard lock(all.mutex);
  return all.parameters.count(parameter.unsafeGetTensorImpl()) > 0;
}

size_t open_scope(Recompute mode) {
  install_regions();
  Thread& thread = this_thread();
  size_t depth = thread.open.size();
  bool records = shard::GraphWanted::now() && !in_backward() && !thread.replaying;
  thread.begin(mode, "fsdp::recompute", records);
  return depth;
}

void close_scope(size_t depth) {
  Thread& thread = this_thread();
  while (thread.open.size() > depth) thread.end();
}

}  // namespace fsdp::memory
