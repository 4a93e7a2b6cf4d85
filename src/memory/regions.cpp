#include "memory/regions.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <unordered_map>

#include "base/log.h"
#include "memory/region.h"
#include "shard/deferred_tape.h"
#include "shard/tape_hook.h"

namespace fsdp::memory {
namespace {

constexpr size_t kMostSteps = 1 << 20;  // a region that never ends must not keep everything

// --- the modules ---

struct Watched {
  // Weak, so that no other tensor comes to lie at the same address.
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> parameter;
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
  std::shared_ptr<Region> region;          // null: what runs here is kept
  std::shared_ptr<Chosen> module;          // null: a piece of code
  const c10::TensorImpl* first = nullptr;  // the parameter that it began with
};

struct Thread {
  std::vector<Open> open;
  std::vector<std::weak_ptr<Region>> closed;  // whose tapes may still be run
  bool replaying = false;

  // The key is included while the innermost region records.
  void choose_key() { shard::set_taping(!open.empty() && open.back().region != nullptr); }

  void begin(Open entry) {
    std::erase_if(closed, [](const auto& region) { return region.expired(); });
    open.push_back(std::move(entry));
    choose_key();
  }

  void end() {
    stop(open.back());
    open.pop_back();
    choose_key();
  }

  void stop(Open& entry) {
    if (!entry.region) return;
    std::shared_ptr<Region> region = std::move(entry.region);
    entry.region.reset();
    region->close();
    if (region.use_count() > 1) closed.push_back(region);  // a place holds it
  }

  // The innermost region cannot be recorded any further. What autograd has a place for is made now.
  void give_up(const std::string& why) {
    Open& entry = open.back();
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
    say_once("recompute: " + what + " is kept, not computed again: " + why + ".");
  }
};

Thread& this_thread() {
  static thread_local Thread thread;
  return thread;
}

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

// --- what the engine tells ---

class Hook final : public shard::TapeHook {
 public:
  void touched(c10::TensorImpl* parameter) override {
    Thread& thread = this_thread();
    if (thread.replaying || in_backward() || !shard::GraphWanted::now()) return;
    std::vector<std::shared_ptr<Chosen>> modules;
    {
      Watch& all = all_watched();
      std::lock_guard lock(all.mutex);
      auto known = all.parameters.find(parameter);
      if (known == all.parameters.end()) return;
      modules = known->second.modules;
    }
    auto runs = [&](const Open& entry) {
      return entry.module &&
             std::find(modules.begin(), modules.end(), entry.module) != modules.end();
    };
    if (std::any_of(thread.open.begin(), thread.open.end(), runs)) {
      // The parameter that a region began with, once more: the module runs again.
      Open again = thread.open.back();
      if (!runs(again) || again.first != parameter) return;
      thread.end();
      return begin(again.module, parameter);
    }
    if (!thread.open.empty() && thread.open.back().module) thread.end();
    if (!modules.empty()) begin(modules.front(), parameter);
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
    if (facts.unknown)
      thread.give_up("nothing tells what " + op.schema().name() + " does besides its results");
    else if (Region& region = *thread.open.back().region; region.abandoned())
      thread.stop(thread.open.back());  // an exception ended the pass, or nobody wants a gradient
    else if (region.steps() >= kMostSteps)
      thread.give_up("it has more than a million operators");
    thread.choose_key();
    c10::impl::ExcludeDispatchKeyGuard inside(shard::deferred::kRecordKey);
    if (!shard::taping()) return op.redispatchBoxed(keys, stack);
    record(thread, facts, keys, stack);
  }

  std::unique_ptr<shard::SavedPlace> pack(const at::Tensor& tensor) override {
    Thread& thread = this_thread();
    const std::shared_ptr<Region>& region = thread.open.back().region;
    return region ? region->place(tensor) : nullptr;
  }

  // Whatever is open ends here: backward is not to be recorded.
  void backward_begins() override {
    Thread& thread = this_thread();
    for (Open& entry : thread.open) thread.stop(entry);
    while (!thread.open.empty() && thread.open.back().module) thread.open.pop_back();
    thread.choose_key();
  }

  bool watches(const at::Tensor& parameter) const override {
    Watch& all = all_watched();
    std::lock_guard lock(all.mutex);
    return all.parameters.count(parameter.unsafeGetTensorImpl()) > 0;
  }

 private:
  static void begin(const std::shared_ptr<Chosen>& module, const c10::TensorImpl* first) {
    auto region =
        module->kept ? nullptr : std::make_shared<Region>(module->path, module->selective);
    this_thread().begin({std::move(region), module, first});
  }

  static void record(Thread& thread, const OperatorFacts& facts, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
    std::shared_ptr<Region> region = thread.open.back().region;
    Region::Fit fit = region->begin(facts, *stack);
    if (fit != Region::Fit::kRecorded) {
      region->drop();
      std::vector<c10::StorageImpl*> written = region->written_outside();
      if (fit == Region::Fit::kMixed)
        thread.give_up(facts.op.schema().name() +
                       " writes to tensors from inside and outside of it");
      else
        protect(thread, *region, written, facts);
      return facts.op.redispatchBoxed(keys, stack);
    }
    try {
      facts.op.redispatchBoxed(keys, stack);
    } catch (...) {
      region->drop();
      throw;
    }
    region->finish(*stack);
  }

  // Steps have read what is about to be written: they keep a copy.
  static void protect(Thread& thread, Region& current,
                      const std::vector<c10::StorageImpl*>& written, const OperatorFacts& facts) {
    for (c10::StorageImpl* storage : written) {
      auto ask = [&](Region& region) {
        if (region.before_write(storage))
          say_once("recompute: " + facts.op.schema().name() + " writes to a tensor that region \"" +
                   region.name() + "\" has read; a copy of it is kept.");
      };
      ask(current);
      for (const auto& closed : thread.closed)
        if (auto region = closed.lock()) ask(*region);
      for (const Open& entry : thread.open)
        if (entry.region && entry.region.get() != &current) ask(*entry.region);
    }
  }
};

void install() {
  static Hook* hook = [] {
    auto* made = new Hook;
    shard::set_tape_hook(made);
    return made;
  }();
  static_cast<void>(hook);
}

}  // namespace

void watch(const at::Tensor& parameter, std::vector<std::shared_ptr<Chosen>> modules) {
  install();
  Watch& all = all_watched();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.parameters, [](const auto& entry) { return entry.second.parameter.expired(); });
  Watched watched{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                      parameter.getIntrusivePtr()),
                  std::move(modules)};
  all.parameters.insert_or_assign(parameter.unsafeGetTensorImpl(), std::move(watched));
}

void unwatch(const at::Tensor& parameter) {
  Watch& all = all_watched();
  std::lock_guard lock(all.mutex);
  all.parameters.erase(parameter.unsafeGetTensorImpl());
}

size_t open_scope(bool selective) {
  install();
  Thread& thread = this_thread();
  size_t depth = thread.open.size();
  bool records = shard::GraphWanted::now() && !in_backward() && !thread.replaying;
  thread.begin({records ? std::make_shared<Region>("fsdp::recompute", selective) : nullptr});
  return depth;
}

void close_scope(size_t depth) {
  Thread& thread = this_thread();
  while (thread.open.size() > depth) thread.end();
}

}  // namespace fsdp::memory
