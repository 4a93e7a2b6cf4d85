#include "observe/advice.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "base/format.h"
#include "base/samples.h"
#include "base/table.h"
#include "fsdp/error.h"

namespace fsdp::observe {
namespace {

using Found = std::optional<Advice>;

constexpr int64_t kFewSteps = 10;  // fewer are too few to measure a share of time
constexpr double kMuch = 0.2;      // of a step's time

std::string percent(double share) {
  return formatted("{:.0f} %", 100 * share);
}

Found exposed_communication(const RunFacts& facts) {
  if (facts.world < 2 || facts.steps < kFewSteps || facts.step_s <= 0) return {};
  double share = facts.exposed_comm_s / facts.step_s;
  if (share <= kMuch) return {};
  return Advice{"exposed-communication",
                percent(share) + " of the time is communication that overlaps no computation.",
                "larger micro-batches or a larger train.batch give it more to overlap with; "
                "shard.forward_prefetch and shard.backward_prefetch = 2 start it earlier; "
                "shard_grad_op gathers once instead of twice, if memory allows."};
}

Found data_wait(const RunFacts& facts) {
  if (facts.steps < kFewSteps || facts.step_s <= 0) return {};
  double share = facts.data_s / facts.step_s;
  if (share <= kMuch) return {};
  return Advice{"data-wait", percent(share) + " of the time is spent waiting for data.",
                "raise data.prefetch; turn text into a token file once with fsdp tokenize; use a "
                "faster disk."};
}

Found small_units(const RunFacts& facts) {
  // A collective starts in tens of microseconds on a network and in 1 to 2 between processes of one
  // host (bench/results/2026-11-15-cpu-collectives.md). These sizes take about as long to move.
  const int64_t least = facts.backend == "shm" ? 64 << 10 : 1 << 20;
  if (facts.world < 2) return {};
  std::vector<UnitSize> small;
  for (const UnitSize& unit : facts.units)
    if (unit.bytes < least) small.push_back(unit);
  if (small.empty()) return {};
  std::stable_sort(small.begin(), small.end(),
                   [](const UnitSize& a, const UnitSize& b) { return a.bytes < b.bytes; });
  std::string names;
  for (size_t i = 0; i < std::min<size_t>(small.size(), 3); ++i)
    names +=
        formatted("{}{} ({})", i ? ", " : "", small[i].name.empty() ? "the root" : small[i].name,
                  human_bytes(static_cast<double>(small[i].bytes)));
  return Advice{
      "small-units",
      formatted("{} of {} units gather less than {}: {}{}.", small.size(), facts.units.size(),
                human_bytes(static_cast<double>(least)), names, small.size() > 3 ? ", …" : ""),
      "a gather that small is mostly start-up cost: shard.wrap = \"size\" merges modules "
      "up to shard.wrap_min_params, \"root\" makes the whole model one unit."};
}

Found fp16_without_scaler(const RunFacts& facts) {
  if (facts.precision != shard::Precision::kFp16 || facts.grad_scaler) return {};
  return Advice{"fp16-without-scaler",
                "gradients are computed in fp16 without a scaler: those below 6e-8 become zero.",
                "set optim.grad_scaler to true, or shard.precision to bf16."};
}

Found bf16_reduction(const RunFacts& facts) {
  constexpr int kMany = 16;
  if (facts.reduce != shard::Reduce::kBf16 || facts.replicas < kMany) return {};
  return Advice{
      "bf16-reduction-many-ranks",
      formatted(
          "gradients of {} replicas are summed in bf16, which keeps 8 bits of every partial sum.",
          facts.replicas),
      "set shard.reduce to fp32; only the bytes of reductions double."};
}

Found loss_spike(const RunFacts& facts) {
  constexpr size_t kWindow = 10;  // losses before the latest
  if (!facts.clip || *facts.clip > 0 || facts.losses.size() <= kWindow) return {};
  std::vector<double> before;
  for (size_t i = 0; i + 1 < facts.losses.size(); ++i)
    if (std::isfinite(facts.losses[i])) before.push_back(facts.losses[i]);
  double last = facts.losses.back();
  if (before.size() < kWindow || !std::isfinite(last)) return {};
  double usual = median(before);
  if (usual <= 0 || last <= 2 * usual) return {};
  return Advice{"loss-spike-without-clipping",
                formatted("the loss jumped to {:.4g} from a median of {:.4g}.", last, usual),
                "gradients aren't clipped: train.clip = 1.0 limits what one bad batch can do; "
                "otherwise lower optim.lr or raise optim.warmup_steps."};
}

Found dead_experts(const RunFacts& facts) {
  constexpr int64_t kIdle = 50;  // steps
  const auto& idle = facts.expert_idle_steps;
  const auto dead =
      std::count_if(idle.begin(), idle.end(), [](int64_t steps) { return steps >= kIdle; });
  if (dead == 0) return {};
  return Advice{
      "dead-experts",
      formatted("{} of {} experts got no token in the last {} steps.", dead, idle.size(), kIdle),
      "raise model.balance (dots1: or model.bias_rate); lower optim.lr if it began "
      "after a jump of the loss."};
}

Found omp_one_thread(const RunFacts& facts) {
  bool spare = facts.cores > facts.ranks_on_host;
  if (facts.gpu || !facts.torchrun || facts.omp_threads != 1 || !spare) return {};
  return Advice{
      "omp-one-thread",
      formatted("torchrun set OMP_NUM_THREADS=1, so only {} of {} cores compute.",
                facts.ranks_on_host, facts.cores),
      formatted("set OMP_NUM_THREADS={} before torchrun, or launch with fsdp run, which sets it.",
                facts.cores / std::max(facts.ranks_on_host, 1))};
}

// A rank, or all ranks of a host, that the others wait for.
struct Straggler {
  std::string who;
  double own_wait = 0, others_wait = 0;  // shares of a step
  bool operator==(const Straggler& other) const { return who == other.who; }
};

// The slow rank is the one that waits least: it comes last. `inside` says who is meant.
std::optional<Straggler> judge(const std::vector<RankSpeed>& ranks, const std::string& who,
                               const std::function<bool(size_t)>& inside) {
  std::vector<double> others;
  double own = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].step_ms <= 0) return {};
    const double share = ranks[i].wait_ms / ranks[i].step_ms;
    if (inside(i))
      own = std::max(own, share);
    else
      others.push_back(share);
  }
  if (others.empty()) return {};
  const double usual = median(others);
  constexpr double kMore = 0.1, kRatio = 0.67;
  if (usual - own < kMore || own > kRatio * usual) return {};
  return Straggler{who, own, usual};
}

std::optional<Straggler> slowest(const std::vector<RankSpeed>& ranks) {
  std::map<std::string, size_t> hosts;  // and how many ranks they have
  for (const RankSpeed& rank : ranks) ++hosts[rank.host];
  for (const auto& entry : hosts) {
    if (hosts.size() < 2 || entry.second < 2) continue;
    auto here = [&](size_t i) { return ranks[i].host == entry.first; };
    if (auto found = judge(ranks, formatted("host {}", entry.first), here)) return found;
  }
  const auto least = std::min_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) {
    return a.wait_ms < b.wait_ms;
  });
  if (ranks.size() < 2) return {};
  const auto rank = static_cast<size_t>(least - ranks.begin());
  return judge(ranks, formatted("rank {} on {}", rank, least->host),
               [&](size_t i) { return i == rank; });
}

Found slow_rank(const RunFacts& facts) {
  constexpr size_t kTimes = 3;  // comparisons in a row
  if (facts.speeds.size() < kTimes) return {};
  std::optional<Straggler> found;
  for (size_t i = facts.speeds.size() - kTimes; i < facts.speeds.size(); ++i) {
    const auto now = slowest(facts.speeds[i]);
    if (!now || (found && !(*now == *found))) return {};
    found = now;
  }
  return Advice{
      "slow-rank",
      formatted("{} is slow: the others wait for {} of a step, and it for {}.", found->who,
                percent(found->others_wait), percent(found->own_wait)),
      "look at that machine: other programs on its cores, a GPU that is hot or capped (nvidia-smi "
      "-q "
      "-d PERFORMANCE), a slow disk under its data; rank_step_ms and rank_wait_ms in metrics.jsonl "
      "have all ranks."};
}

Found small_micro_batch(const RunFacts& facts) {
  constexpr double kHalf = 0.5;
  if (!facts.gpu || facts.accumulation < 2 || facts.steps < kFewSteps) return {};
  if (!facts.memory_share || *facts.memory_share >= kHalf) return {};
  return Advice{
      "small-micro-batch",
      formatted(
          "a step takes {} micro-batches of {} per rank, but only {} of the GPU's memory is used.",
          facts.accumulation, facts.micro_batch, percent(*facts.memory_share)),
      "double train.micro_batch: fewer, larger operators are faster, and the result is the same."};
}

Found allocator_retries(const RunFacts& facts) {
  if (facts.allocator_retries == 0) return {};
  return Advice{
      "allocator-retries",
      formatted("the GPU ran out of memory {} times since the first steps; each time it stopped "
                "until cached memory had been freed.",
                facts.allocator_retries),
      "halve train.micro_batch or set activations.mode to full; fsdp plan shows what fits."};
}

Found steps_skipped(const RunFacts& facts) {
  constexpr double kOften = 0.05;
  constexpr int64_t kEnough = 20;
  if (facts.steps < kEnough) return {};
  double share = static_cast<double>(facts.skipped) / static_cast<double>(facts.steps);
  if (share <= kOften) return {};
  return Advice{
      "steps-skipped",
      formatted("{} of the last {} steps were skipped: the loss or a gradient wasn't finite.",
                facts.skipped, facts.steps),
      "lower optim.lr, clip gradients (train.clip = 1.0), or set shard.precision to bf16 or fp32."};
}

struct Rule {
  const char* name;
  Found (*look)(const RunFacts&);
};

constexpr Rule kRules[] = {
    {"omp-one-thread", omp_one_thread},
    {"fp16-without-scaler", fp16_without_scaler},
    {"bf16-reduction-many-ranks", bf16_reduction},
    {"small-units", small_units},
    {"exposed-communication", exposed_communication},
    {"data-wait", data_wait},
    {"slow-rank", slow_rank},
    {"small-micro-batch", small_micro_batch},
    {"allocator-retries", allocator_retries},
    {"loss-spike-without-clipping", loss_spike},
    {"steps-skipped", steps_skipped},
    {"dead-experts", dead_experts},
};

}  // namespace

std::vector<Advice> advice(const RunFacts& facts) {
  std::vector<Advice> all;
  for (const Rule& rule : kRules)
    if (auto found = rule.look(facts)) all.push_back(*std::move(found));
  return all;
}

const std::vector<std::string>& advice_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Rule& rule : kRules) all.emplace_back(rule.name);
    return all;
  }();
  return names;
}

Adviser::Adviser(const std::vector<std::string>& silenced) {
  const auto& names = advice_names();
  for (const auto& name : silenced) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      std::string all;
      for (const auto& one : names) all += (all.empty() ? "" : ", ") + one;
      throw Error(formatted("log.silence names a warning that doesn't exist: \"{}\".", name),
                  formatted("warnings are {}.", all));
    }
    known_.insert(name);
  }
}

std::vector<Advice> Adviser::news(const RunFacts& facts) {
  std::vector<Advice> all;
  for (auto& one : advice(facts))
    if (known_.insert(one.name).second) all.push_back(std::move(one));
  return all;
}

std::string describe(const Advice& advice) {
  return formatted(
      "warning: {}: {}\n  HINT: {} (docs/warnings.md; log.silence = [\"{}\"] hides this)",
      advice.name, advice.text, advice.hint, advice.name);
}

}  // namespace fsdp::observe
