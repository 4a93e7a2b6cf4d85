#include "observe/advice.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/table.h"
#include "fsdp/error.h"

namespace fsdp::observe {
namespace {

using Found = std::optional<Advice>;

constexpr int64_t kFewSteps = 10;  // fewer say nothing about a share of time
constexpr double kMuch = 0.2;      // of a step's time

std::string percent(double share) {
  char text[16];
  std::snprintf(text, sizeof text, "%.0f %%", 100 * share);
  return text;
}

Found exposed_communication(const RunFacts& facts) {
  if (facts.world < 2 || facts.steps < kFewSteps || facts.step_s <= 0) return {};
  double share = facts.exposed_comm_s / facts.step_s;
  if (share <= kMuch) return {};
  return Advice{"exposed-communication",
                percent(share) +
                    " of the time goes to communication that nothing is computed "
                    "beside.",
                "larger micro-batches or more train.batch a rank give it more to hide behind; "
                "shard.forward_prefetch and shard.backward_prefetch = 2 start it earlier; "
                "shard_grad_op gathers once instead of twice, where memory allows."};
}

Found data_wait(const RunFacts& facts) {
  if (facts.steps < kFewSteps || facts.step_s <= 0) return {};
  double share = facts.data_s / facts.step_s;
  if (share <= kMuch) return {};
  return Advice{"data-wait", percent(share) + " of the time goes to waiting for data.",
                "raise data.prefetch; turn text into a token file once with fsdp tokenize; put it "
                "on a faster disk."};
}

Found small_units(const RunFacts& facts) {
  constexpr int64_t kSmall = 1 << 20;
  if (facts.world < 2) return {};
  std::vector<UnitSize> small;
  for (const UnitSize& unit : facts.units)
    if (unit.bytes < kSmall) small.push_back(unit);
  if (small.empty()) return {};
  std::stable_sort(small.begin(), small.end(),
                   [](const UnitSize& a, const UnitSize& b) { return a.bytes < b.bytes; });
  std::string names;
  for (size_t i = 0; i < std::min<size_t>(small.size(), 3); ++i) {
    names += (i ? ", " : "") + (small[i].name.empty() ? "the root" : small[i].name) + " (" +
             human_bytes(static_cast<double>(small[i].bytes)) + ")";
  }
  return Advice{"small-units",
                std::to_string(small.size()) + " of " + std::to_string(facts.units.size()) +
                    " units have less than 1 MiB to gather: " + names +
                    (small.size() > 3 ? ", …" : "") + ".",
                "a gather that small costs mostly its start: shard.wrap = \"size\" joins modules "
                "up to shard.wrap_min_params, \"root\" makes one unit of all."};
}

Found fp16_without_scaler(const RunFacts& facts) {
  if (facts.precision != "fp16" || facts.grad_scaler) return {};
  return Advice{"fp16-without-scaler",
                "gradients are computed in fp16 and not scaled: those below 6e-8 become zero.",
                "set optim.grad_scaler to true, or shard.precision to bf16."};
}

Found bf16_reduction(const RunFacts& facts) {
  constexpr int kMany = 16;
  if (facts.reduce != "bf16" || facts.reduce_ranks < kMany) return {};
  return Advice{"bf16-reduction-many-ranks",
                "gradients of " + std::to_string(facts.reduce_ranks) +
                    " ranks are added up in bf16, which keeps 8 bits of every partial sum.",
                "set shard.reduce to fp32; it costs twice the bytes of the reductions only."};
}

double median(std::vector<double> values) {
  auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Found loss_spike(const RunFacts& facts) {
  constexpr size_t kWindow = 10;  // losses before the one that is looked at
  if (!facts.clip || *facts.clip > 0 || facts.losses.size() <= kWindow) return {};
  std::vector<double> before;
  for (size_t i = 0; i + 1 < facts.losses.size(); ++i)
    if (std::isfinite(facts.losses[i])) before.push_back(facts.losses[i]);
  double last = facts.losses.back();
  if (before.size() < kWindow || !std::isfinite(last)) return {};
  double usual = median(before);
  if (usual <= 0 || last <= 2 * usual) return {};
  char text[96];
  std::snprintf(text, sizeof text, "the loss jumped to %.4g, from %.4g before (the median).", last,
                usual);
  return Advice{"loss-spike-without-clipping", text,
                "gradients are not clipped: train.clip = 1.0 keeps one bad batch from doing that; "
                "else lower optim.lr or lengthen optim.warmup_steps."};
}

Found omp_one_thread(const RunFacts& facts) {
  bool spare = facts.cores > facts.ranks_on_host;
  if (facts.gpu || !facts.torchrun || facts.omp_threads != 1 || !spare) return {};
  return Advice{
      "omp-one-thread",
      "torchrun sets OMP_NUM_THREADS=1, so " + std::to_string(facts.ranks_on_host) + " of " +
          std::to_string(facts.cores) + " cores compute.",
      "set OMP_NUM_THREADS=" + std::to_string(facts.cores / std::max(facts.ranks_on_host, 1)) +
          " before torchrun, or start with fsdp run, which does."};
}

Found small_micro_batch(const RunFacts& facts) {
  constexpr double kHalf = 0.5;
  if (!facts.gpu || facts.accumulation < 2 || facts.steps < kFewSteps) return {};
  if (!facts.memory_share || *facts.memory_share >= kHalf) return {};
  return Advice{"small-micro-batch",
                "a step is computed in " + std::to_string(facts.accumulation) +
                    " micro-batches of " + std::to_string(facts.micro_batch) + ", and only " +
                    percent(*facts.memory_share) + " of the GPU's memory are used.",
                "double train.micro_batch: fewer, larger operators are faster, and the result is "
                "the same."};
}

Found steps_skipped(const RunFacts& facts) {
  constexpr double kOften = 0.05;
  constexpr int64_t kEnough = 20;
  if (facts.steps < kEnough) return {};
  double share = static_cast<double>(facts.skipped) / static_cast<double>(facts.steps);
  if (share <= kOften) return {};
  return Advice{"steps-skipped",
                std::to_string(facts.skipped) + " of the last " + std::to_string(facts.steps) +
                    " steps were skipped: loss or gradient was not finite.",
                "lower optim.lr, clip gradients (train.clip = 1.0), or set shard.precision to bf16 "
                "or fp32."};
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
    {"small-micro-batch", small_micro_batch},
    {"loss-spike-without-clipping", loss_spike},
    {"steps-skipped", steps_skipped},
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
      throw Error("log.silence names a warning that does not exist: \"" + name + "\".",
                  "there are: " + all + ".");
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
  return "warning: " + advice.name + ": " + advice.text + "\n  HINT: " + advice.hint +
         " (docs/warnings.md; log.silence = [\"" + advice.name + "\"] hides this)";
}

}  // namespace fsdp::observe
