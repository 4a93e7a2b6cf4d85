#include "fsdp/out_of_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/format.h"
#include "base/table.h"
#include "memory/shortage.h"
#include "shard/model.h"

namespace fsdp {
namespace {

constexpr size_t kSavings = 3;  // that are told

std::string size(int64_t bytes) {
  return human_bytes(static_cast<double>(bytes));
}

std::string first_line(const std::exception& problem) {
  const auto* error = dynamic_cast<const c10::Error*>(&problem);
  std::string text = error ? error->what_without_backtrace() : problem.what();
  text = text.substr(0, text.find('\n'));
  return text.size() > 300 ? text.substr(0, 300) + "…" : text;
}

// Peak bytes of the device's allocator; on CPUs, which have no such counter, the peak resident size
// of the process.
int64_t most_allocated(at::Device device) {
  if (device.is_cpu()) {
    rusage usage{};
    return ::getrusage(RUSAGE_SELF, &usage) == 0 ? int64_t{usage.ru_maxrss} * 1024 : 0;
  }
  auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)]
      .peak;
}

std::string held_by(const memory::Shortage& shortage) {
  const MemoryReport& held = shortage.held;
  std::string text;
  auto add = [&](const char* kind, int64_t bytes) {
    if (bytes > 0) text += formatted("{}{} {}", text.empty() ? "" : ", ", size(bytes), kind);
  };
  add("parameters", held.parameters + held.gathered_from);
  add("gradients", held.gradients);
  add("optimizer states", held.optimizer);
  add("gathered units", held.unsharded + held.secondary);
  add("gradients being reduced", held.reduce_buffers + held.accumulated);
  add("activations", held.activations);
  if (text.empty()) text = "nothing in the engine";
  if (held.host > 0) text += formatted(" (of these {} in host memory)", size(held.host));
  // The error has already freed memory, but the allocator remembers its peak.
  const int64_t ours = held.total() - held.host + held.activations;
  const bool cpu = shortage.cpu;
  if (shortage.allocated > ours)
    text += formatted("; the {} peaked at {}, the other {} for {}{}", cpu ? "process" : "allocator",
                      size(shortage.allocated), size(shortage.allocated - ours),
                      held.activations > 0 ? "temporaries" : "activations and temporaries",
                      cpu ? " and the program itself" : "");
  return text;
}

// Whether host memory ran out in a run that has a GPU.
bool lacks_host(const std::exception& problem, const PlanOptions& options) {
  if (!options.gpu || dynamic_cast<const c10::OutOfMemoryError*>(&problem)) return false;
  const char* what = problem.what();
  return dynamic_cast<const std::bad_alloc*>(&problem) || std::strstr(what, "allocate memory") ||
         std::strstr(what, "not enough memory") || std::strstr(what, "HostAllocator");
}

struct Change {
  std::string what;  // includes the flags of `fsdp train` that make the change
  PlanOptions options;
};

class Changes {
 public:
  explicit Changes(const PlanOptions& now) : now_(now) {}

  // Fewer activations at a time.
  void of_activations() {
    const int64_t share = now_.batch * now_.micro_batches;
    int64_t less = now_.batch / 2;
    while (less > 1 && share % less != 0) --less;
    if (now_.batch > 1)
      add(formatted("micro-batches of {} (--train.micro_batch {})", less, less),
          [&](PlanOptions& o) {
            o.batch = less;
            o.micro_batches = static_cast<int>(share / less);
          });
    const bool keeps = !now_.recompute.mode;
    if (keeps && now_.inner_modules)
      add("recomputation of feed-forwards (--activations.mode feed_forward)", [](PlanOptions& o) {
        o.recompute = {Recompute::FULL, /*inner=*/true};
      });
    if (keeps && !now_.inner_modules)
      add("selective recomputation (--activations.mode selective)",
          [](PlanOptions& o) { o.recompute = Recompute::SELECTIVE; });
    if (now_.recompute != PlanRecompute(Recompute::FULL))
      add("full recomputation (--activations.mode full)",
          [](PlanOptions& o) { o.recompute = Recompute::FULL; });
    if (!keeps && now_.keep_last > 0)
      add("recomputation of the last blocks too (--activations.keep_last 0)",
          [](PlanOptions& o) { o.keep_last = 0; });
    if (keeps && now_.gpu)
      add("activations in host memory (--activations.mode offload)",
          [](PlanOptions& o) { o.recompute = Recompute::OFFLOAD; });
  }

  // Less state on each device.
  void of_states() {
    if (now_.shard.strategy != ShardingStrategy::FULL_SHARD && now_.world > 1)
      add(formatted("FULL_SHARD (--shard.strategy full_shard{})",
                    now_.shard_ranks > 0 ? " --shard.shard_ranks 0" : ""),
          [](PlanOptions& o) { o.shard.strategy = ShardingStrategy::FULL_SHARD; });
    if (!now_.shard.offload.optimizer && now_.gpu)
      add("offload of the optimizer (--offload.optimizer true)",
          [](PlanOptions& o) { o.shard.offload.optimizer = true; });
    if (!now_.shard.offload.parameters && now_.gpu &&
        now_.shard.strategy != ShardingStrategy::NO_SHARD)  // which would save nothing
      add("offload of parameters, gradients and optimizer (--offload.parameters true "
          "--offload.gradients true --offload.optimizer true)",
          [](PlanOptions& o) {
            o.shard.offload.parameters = o.shard.offload.gradients = o.shard.offload.optimizer =
                true;
          });
    if (now_.shard.offload.optimizer && now_.shard.offload.directory.empty())
      add("masters and states on disk (--offload.directory DIR)",
          [](PlanOptions& o) { o.shard.offload.directory = "disk"; });
    if (now_.shard.offload.any())
      add(formatted("offload of half as much (--offload.fraction {:.2f})",
                    now_.shard.offload.fraction / 2),
          [](PlanOptions& o) { o.shard.offload.fraction /= 2; });
    if (now_.recompute.mode == Recompute::OFFLOAD)
      add(formatted("activations on the device (--activations.mode none{}{})",
                    now_.keep_last > 0 ? " --activations.keep_last 0" : "",
                    now_.every > 1 ? " --activations.every 1" : ""),
          [](PlanOptions& o) {
            o.recompute = {};
            o.keep_last = 0;
            o.every = 1;
          });
    if (now_.recompute.mode == Recompute::FULL_OFFLOAD)
      add("inputs of blocks on the device (--activations.mode full)",
          [](PlanOptions& o) { o.recompute = Recompute::FULL; });
    if (now_.shard.strategy != ShardingStrategy::NO_SHARD)
      add("twice the ranks", [](PlanOptions& o) { o.world *= 2; });
  }

  std::vector<Change> changes;

 private:
  void add(std::string what, const std::function<void(PlanOptions&)>& make) {
    Change change{std::move(what), now_};
    make(change.options);
    changes.push_back(std::move(change));
  }

  const PlanOptions& now_;
};

std::vector<Change> changes_of(const PlanOptions& now) {
  Changes all(now);
  all.of_activations();
  all.of_states();
  return std::move(all.changes);
}

int64_t planned_bytes(const Plan& plan, bool host) {
  return host ? plan.memory.host : plan.memory.peak();
}

std::string effect(const Plan& before, const Plan& after, bool host) {
  int64_t saved = planned_bytes(before, host) - planned_bytes(after, host);
  std::string line = formatted(
      "saves {} ({:.0f} %)", size(saved),
      100.0 * static_cast<double>(saved) / static_cast<double>(planned_bytes(before, host)));
  if (before.time.total() > 0) {
    // Per sample: another number of ranks does a different amount of work.
    double slower = after.time.total() / static_cast<double>(after.samples) /
                    (before.time.total() / static_cast<double>(before.samples));
    line += formatted(", and a sample takes {:.2f} times as long", slower);
  }
  return line;
}

// The three changes that save the most device (or host) memory.
std::vector<memory::Saving> savings_of(const PlanModel& model, const PlanOptions& options,
                                       const Plan& now, bool host) {
  std::vector<std::pair<std::string, Plan>> plans;
  for (const Change& change : changes_of(options)) {
    try {
      plans.emplace_back(change.what, plan(model, change.options));
    } catch (const std::exception&) {
      continue;  // impossible settings don't help
    }
  }
  std::stable_sort(plans.begin(), plans.end(), [&](const auto& a, const auto& b) {
    return planned_bytes(a.second, host) < planned_bytes(b.second, host);
  });
  std::vector<memory::Saving> savings;
  for (const auto& [what, after] : plans) {
    const int64_t bytes = planned_bytes(now, host) - planned_bytes(after, host);
    if (savings.size() == kSavings || bytes <= 0) break;
    savings.push_back({what, effect(now, after, host), bytes});
  }
  return savings;
}

std::string planned_text(const memory::Shortage& shortage) {
  const PlannedMemory& planned = shortage.plan->memory;
  std::string text = formatted(
      "\n  planned: {} at the peak ({} parameters and masters, {} gradients, {} states, {} "
      "buffers, {} activations, {} logits, {} temporaries)",
      size(planned.peak()), size(planned.parameters + planned.master), size(planned.gradients),
      size(planned.states), size(planned.gather_buffers + planned.communication),
      size(planned.activations), size(planned.logits), size(planned.temporaries));
  if (planned.host > 0) text += formatted(", and {} in host memory", size(planned.host));
  if (shortage.of_host) text += "\n  host memory ran out, not device memory";
  int told = 0;
  for (const memory::Saving& saving : shortage.savings)
    text += formatted("\n  {}. {} {}", ++told, saving.what, saving.effect);
  return text;
}

}  // namespace

bool is_out_of_memory(const std::exception& problem) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&problem)) return true;
  if (dynamic_cast<const std::bad_alloc*>(&problem)) return true;
  const char* what = problem.what();
  return dynamic_cast<const c10::Error*>(&problem) &&
         (std::strstr(what, "can't allocate memory") || std::strstr(what, "not enough memory") ||
          std::strstr(what, "out of memory"));
}

memory::Shortage memory::find_shortage(const Sharded& sharded, const std::exception& problem,
                                       const PlanModel& model, const PlanOptions& options) {
  Shortage shortage{.problem = first_line(problem), .held = {}};
  try {
    if (sharded) {
      const at::Device device = shard::model_of(sharded)->device();
      shortage.held = sharded.memory();
      shortage.allocated = most_allocated(device);
      shortage.cpu = device.is_cpu();
    }
    if (!model) return shortage;
    shortage.of_host = lacks_host(problem, options);
    shortage.plan = plan(model, options);
    shortage.savings = savings_of(model, options, *shortage.plan, shortage.of_host);
  } catch (const std::exception& further) {
    shortage.no_plan = first_line(further);
  }
  return shortage;
}

Error memory::to_error(const Shortage& shortage, bool has_model) {
  std::string what =
      formatted("out of memory: {}\n  held: {}", shortage.problem, held_by(shortage));
  if (shortage.plan) what += planned_text(shortage);
  if (!shortage.no_plan.empty()) what += formatted("\n  (no plan: {})", shortage.no_plan);
  return Error(what, has_model
                         ? "the flags are those of fsdp train; fsdp plan shows more settings and "
                           "which fit; see docs/memory.md."
                         : "pass a model to explain_out_of_memory to see what would help; see "
                           "docs/memory.md.");
}

Error explain_out_of_memory(const Sharded& sharded, const std::exception& problem,
                            const PlanModel& model, const PlanOptions& options) {
  return to_error(memory::find_shortage(sharded, problem, model, options), bool(model));
}

}  // namespace fsdp
