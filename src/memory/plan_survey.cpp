// Which settings fit, and which of those is the fastest: for one world, each with its largest
// micro-batch; for several worlds, where only the most promising settings are searched that far.
#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "memory/plan_search.h"
#include "memory/plan_time.h"

namespace fsdp {
namespace {

using memory::AtBatch;
using memory::DryRun;
using memory::find_largest;
using memory::Found;
using memory::Slope;
using memory::Slopes;

void check_survey(const PlanOptions& options, const char* who) {
  if (!options.gpu)
    throw Error(std::string(who) + "() needs a GPU, for its memory.", "set options.gpu.");
}

// Whether HYBRID_SHARD is possible and differs from FULL_SHARD.
bool has_hybrid(const PlanOptions& options) {
  int ranks = options.shard_ranks > 0 ? options.shard_ranks : options.ranks_per_node;
  return ranks > 1 && ranks < options.world && options.world % ranks == 0;
}

// Each strategy and recomputation; all choices of offload share their dry runs.
std::vector<PlanOptions> runs_of(const PlanOptions& options, const SurveyOptions& survey) {
  std::vector<PlanOptions> runs;
  for (ShardingStrategy strategy : survey.strategies) {
    if (strategy == ShardingStrategy::HYBRID_SHARD && !has_hybrid(options)) continue;
    for (const PlanRecompute& recompute : survey.recompute) {
      if (recompute.inner && !options.inner_modules) continue;
      runs.push_back(options);
      runs.back().shard.strategy = strategy;
      runs.back().recompute = recompute;
    }
  }
  return runs;
}

// Unsharded parameters stay on the device. A disk is the last resort: if the same offload fits in
// host memory, a disk is only slower.
bool worth_looking_at(const DryRun& one_sample, PlanOptions options, const SurveyOptions& survey) {
  if (survey.offload.size() == 1) return true;  // the only choice asked for
  Offload& offload = options.shard.offload;
  if (offload.parameters && options.shard.strategy == ShardingStrategy::NO_SHARD) return false;
  if (offload.directory.empty()) return true;
  offload.directory.clear();
  const auto same = [&](const Offload& other) {
    return other.directory.empty() && other.parameters == offload.parameters &&
           other.gradients == offload.gradients && other.optimizer == offload.optimizer;
  };
  if (std::none_of(survey.offload.begin(), survey.offload.end(), same)) return true;
  options.batch = 1;
  return memory::lacks_host_memory(memory::plan_from(one_sample, options).memory, options);
}

PlanChoice choice_of(const PlanOptions& options, Found found) {
  return {options.shard.strategy, options.recompute, options.shard.offload, found.batch,
          std::move(found.plan)};
}

// Extrapolates a choice planned with one sample to as many as fit.
PlanChoice stretched(PlanChoice choice, const PlanOptions& options, const Slope& slope) {
  auto room = static_cast<double>(options.gpu->memory - choice.plan.memory.total());
  int64_t most = options.batch > 0 ? options.batch : memory::kMostSamples;
  int64_t further = slope.bytes > 0 ? static_cast<int64_t>(room / slope.bytes) : 0;
  if (options.host_memory > 0 && slope.host > 0) {
    auto share =
        static_cast<double>(options.host_memory / std::min(options.ranks_per_node, options.world));
    auto free = share - static_cast<double>(choice.plan.memory.host);
    further = std::min(further, static_cast<int64_t>(free / slope.host));
  }
  choice.largest_batch = std::min(most, 1 + further);
  auto added = static_cast<double>(choice.largest_batch - 1) * options.micro_batches;
  choice.plan.samples *= choice.largest_batch;
  choice.plan.time.compute += slope.compute * added;
  choice.plan.time.offload += slope.offload * added;
  memory::hide_communication(choice.plan.time, choice.plan.units);
  return choice;
}

// Dry runs of one sample per world, derived from a similar world's where possible.
class OneSample {
 public:
  explicit OneSample(const PlanModel& model) : model_(model) {}

  const DryRun& operator()(const PlanOptions& options) {
    auto& [known, there] = runs_[{options.shard.strategy, options.recompute}];
    if (there && memory::can_spread(there->run, *known, options))
      return there->spread = memory::spread(there->run, *known, options);
    known = options;
    PlanOptions one = options;
    one.batch = 1;
    there = Runs{memory::dry_run(model_, one), {}};
    return there->run;
  }

 private:
  struct Runs {
    DryRun run, spread;
  };
  const PlanModel& model_;
  std::map<std::pair<ShardingStrategy, PlanRecompute>,
           std::pair<std::optional<PlanOptions>, std::optional<Runs>>>
      runs_;
};

// Plans every setting with one sample and estimates how fast those that fit would be with more;
// fastest first.
std::vector<PlanChoice> guesses(const PlanModel& model, OneSample& one_sample,
                                const PlanOptions& options, const SurveyOptions& survey,
                                Slopes& slopes, WorldChoice& row) {
  std::vector<PlanChoice> all;
  for (PlanOptions& chosen : runs_of(options, survey)) {
    const DryRun& run = one_sample(chosen);
    Slope& slope = slopes[chosen.recompute];
    for (const Offload& offload : survey.offload) {
      chosen.shard.offload = offload;
      if (!worth_looking_at(run, chosen, survey)) continue;
      PlanOptions one = chosen;
      one.batch = 1;
      PlanChoice choice = choice_of(chosen, {1, memory::plan_from(run, one)});
      ++row.settings;
      row.host_lacks |= !choice.plan.fits && choice.plan.memory.total() <= options.gpu->memory;
      if (!choice.plan.fits) continue;
      ++row.fitting;
      if (slope.bytes == 0) {
        AtBatch at_batch(model);
        find_largest(at_batch, chosen, slope);
      }
      all.push_back(stretched(std::move(choice), options, slope));
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const PlanChoice& a, const PlanChoice& b) {
    return a.samples_per_second() > b.samples_per_second();
  });
  return all;
}

// Plans the best guesses exactly and returns the fastest.
PlanChoice fastest_of(const PlanModel& model, const std::vector<PlanChoice>& guessed,
                      const PlanOptions& options, Slopes& slopes) {
  constexpr size_t kLookedAt = 4;  // guesses are less accurate for small batches
  PlanChoice fastest;
  std::map<std::pair<ShardingStrategy, PlanRecompute>, AtBatch> runs;
  for (size_t i = 0; i < std::min(kLookedAt, guessed.size()); ++i) {
    PlanOptions chosen = options;
    chosen.shard.strategy = guessed[i].strategy;
    chosen.recompute = guessed[i].recompute;
    chosen.shard.offload = guessed[i].offload;
    AtBatch& at_batch =
        runs.try_emplace({chosen.shard.strategy, chosen.recompute}, model).first->second;
    PlanChoice planned =
        choice_of(chosen, find_largest(at_batch, chosen, slopes[chosen.recompute]));
    if (planned.largest_batch > 0 && planned.samples_per_second() > fastest.samples_per_second())
      fastest = std::move(planned);
  }
  fastest.fastest = fastest.largest_batch > 0;
  return fastest;
}

}  // namespace

KeepLast most_kept(const PlanModel& model, const PlanOptions& options) {
  if (!options.recompute.mode) return {};
  std::map<int, int64_t> known;  // bytes
  constexpr int64_t kTooMany = std::numeric_limits<int64_t>::max();
  auto bytes = [&](int kept) {
    auto [entry, fresh] = known.try_emplace(kept, kTooMany);
    if (!fresh) return entry->second;
    PlanOptions changed = options;
    changed.keep_last = kept;
    try {
      const PlannedMemory memory = plan(model, changed).memory;
      entry->second = options.gpu ? memory.total() : memory.peak();
    } catch (const Error&) {  // more than there are modules
      if (kept == options.keep_last) throw;
    }
    return entry->second;
  };
  // Memory never falls with the number of modules kept.
  auto most = [&](int64_t limit) {
    int good = options.keep_last, step = 1;
    while (bytes(good + step) <= limit) good += std::exchange(step, 2 * step);
    for (; step > 0; step /= 2)
      if (bytes(good + step) <= limit) good += step;
    return good;
  };
  const int64_t now = bytes(options.keep_last);
  KeepLast found;
  found.free = most(now);
  found.fits = options.gpu ? most(std::max(now, options.gpu->memory)) : found.free;
  return found;
}

int64_t largest_batch(const PlanModel& model, const PlanOptions& options) {
  check_survey(options, "largest_batch");
  AtBatch at_batch(model);
  Slope slope;
  PlanOptions any = options;
  any.batch = 0;
  return find_largest(at_batch, any, slope).batch;
}

double PlanChoice::samples_per_second() const {
  return plan.time.total() > 0 ? static_cast<double>(plan.samples) / plan.time.total() : 0;
}

std::vector<PlanChoice> survey(const PlanModel& model, const PlanOptions& options,
                               const SurveyOptions& survey) {
  check_survey(options, "survey");
  std::vector<PlanChoice> choices;
  Slopes slopes;
  for (PlanOptions& chosen : runs_of(options, survey)) {
    AtBatch at_batch(model);
    for (const Offload& offload : survey.offload) {
      chosen.shard.offload = offload;
      if (!worth_looking_at(at_batch.run(chosen, 1), chosen, survey)) continue;
      Found found = find_largest(at_batch, chosen, slopes[chosen.recompute]);
      choices.push_back(choice_of(chosen, std::move(found)));
    }
  }
  PlanChoice* fastest = nullptr;
  for (PlanChoice& choice : choices)
    if (choice.largest_batch > 0 &&
        (!fastest || choice.samples_per_second() > fastest->samples_per_second()))
      fastest = &choice;
  if (fastest) fastest->fastest = true;
  return choices;
}

std::vector<WorldChoice> survey_worlds(const PlanModel& model,
                                       const std::vector<PlanOptions>& worlds,
                                       const SurveyOptions& survey) {
  std::vector<WorldChoice> rows;
  Slopes slopes;
  OneSample one_sample(model);
  for (const PlanOptions& options : worlds) {
    check_survey(options, "survey_worlds");
    WorldChoice row{.world = options.world};
    AtBatch asked(model);
    row.largest_batch = find_largest(asked, options, slopes[options.recompute]).batch;
    row.fastest = fastest_of(model, guesses(model, one_sample, options, survey, slopes, row),
                             options, slopes);
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace fsdp
