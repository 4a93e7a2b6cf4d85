// Which settings fit, and which of those is the fastest.
//
// What a step needs grows with its samples nearly along a line. The line through two dry runs
// promises a number, a third checks it, at most four times as many samples at a time; the numbers
// between the last that fits and the first that does not are looked at until 2 % are left.
#include <algorithm>
#include <map>

#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "memory/plan_run.h"

namespace fsdp {
namespace {

constexpr int64_t kMost = 4096;  // samples; beyond that nobody looks

struct Found {
  int64_t batch = 0;
  Plan plan;
};

// Plans of one model by the number of samples. What is offloaded makes no other dry run.
class AtBatch {
 public:
  explicit AtBatch(const PlanModel& model) : model_(model) {}

  Plan operator()(PlanOptions options, int64_t batch) {
    options.batch = batch;
    auto known = runs_.find(batch);
    if (known == runs_.end()) known = runs_.emplace(batch, memory::dry_run(model_, options)).first;
    return memory::plan_from(known->second, options);
  }

 private:
  const PlanModel& model_;
  std::map<int64_t, memory::DryRun> runs_;
};

// The largest batch up to `most`, with its plan; with the plan of one sample where none fits.
Found find_largest(AtBatch& at_batch, const PlanOptions& options, int64_t most) {
  auto room = static_cast<double>(options.gpu->memory);
  Found best{0, at_batch(options, 1)};
  if (!best.plan.fits) return best;
  best.batch = 1;
  int64_t bad = most + 1;
  auto before = std::pair(0.0, 0.0);  // samples and bytes of the number tried before
  auto last = std::pair(1.0, static_cast<double>(best.plan.memory.total()));
  while (best.batch + 1 < bad) {
    if (bad <= most && (bad - best.batch) * 50 <= best.batch) break;
    double slope = (last.second - before.second) / (last.first - before.first);
    double promised = before.first > 0 && slope > 0 ? last.first + (room - last.second) / slope
                                                    : static_cast<double>(2 * best.batch);
    auto next = static_cast<int64_t>(std::min(promised, 4.0 * static_cast<double>(best.batch)));
    if (bad <= most && next >= bad) next = (best.batch + bad) / 2;
    next = std::clamp(next, best.batch + 1, bad - 1);
    Plan tried = at_batch(options, next);
    before = last;
    last = {static_cast<double>(next), static_cast<double>(tried.memory.total())};
    if (tried.fits)
      best = {next, std::move(tried)};
    else
      bad = next;
  }
  return best;
}

}  // namespace

int64_t largest_batch(const PlanModel& model, const PlanOptions& options) {
  if (!options.gpu)
    throw Error("largest_batch() needs to know how much memory there is.", "set options.gpu.");
  AtBatch at_batch(model);
  return find_largest(at_batch, options, kMost).batch;
}

double PlanChoice::samples_per_second() const {
  return plan.time.total() > 0 ? static_cast<double>(plan.samples) / plan.time.total() : 0;
}

std::vector<PlanChoice> survey(const PlanModel& model, const PlanOptions& options,
                               const SurveyOptions& survey) {
  if (!options.gpu)
    throw Error("survey() needs to know how much memory there is.", "set options.gpu.");
  std::vector<PlanChoice> choices;
  for (ShardingStrategy strategy : survey.strategies)
    for (const std::optional<Recompute>& recompute : survey.recompute) {
      AtBatch at_batch(model);
      for (const Offload& offload : survey.offload) {
        PlanOptions chosen = options;
        chosen.shard.strategy = strategy;
        chosen.recompute = recompute;
        chosen.shard.offload = offload;
        Found found = find_largest(at_batch, chosen, options.batch > 0 ? options.batch : kMost);
        choices.push_back({strategy, recompute, offload, found.batch, std::move(found.plan)});
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

}  // namespace fsdp
