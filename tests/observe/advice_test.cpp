// Warnings: each is given for a reason, not just short of it, and only once.
#include "observe/advice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <map>

#include "fsdp/error.h"
#include "paths.h"

namespace fsdp::observe {
namespace {

using Names = std::vector<std::string>;

Names names_of(const std::vector<Advice>& all) {
  Names names;
  for (const Advice& one : all) {
    names.push_back(one.name);
    EXPECT_FALSE(one.text.empty());
    EXPECT_FALSE(one.hint.empty());
  }
  return names;
}

// Facts that cause exactly one warning, and a change that removes the cause.
struct Reason {
  RunFacts facts;
  std::function<void(RunFacts&)> removed;
  std::string part;  // of the text
};

std::map<std::string, std::vector<Reason>> reasons() {
  RunFacts comm{.world = 2, .steps = 10, .step_s = 10, .exposed_comm_s = 2.1};
  RunFacts data{.steps = 10, .step_s = 10, .data_s = 2.1};
  RunFacts units{
      .world = 2,
      .units = {{"a", 1 << 20}, {"b", 500'000}, {"", 100}, {"c", 90'000}, {"d", 200'000}}};
  RunFacts shared{.world = 2, .backend = "shm", .units = {{"a", 10'000}, {"b", 442'368}}};
  RunFacts fp16{.precision = shard::Precision::kFp16};
  RunFacts bf16{.reduce = shard::Reduce::kBf16, .replicas = 16};
  RunFacts spike{.clip = 0.0, .losses = {3, 3, 3, 2, 2, 3, 100, 3, 3, 3, 6.1}};
  RunFacts omp{.ranks_on_host = 2, .cores = 16, .torchrun = true, .omp_threads = 1};
  RunFacts micro{
      .gpu = true, .micro_batch = 1, .accumulation = 8, .steps = 10, .memory_share = 0.49};
  // Rank 2 is slow three times in a row; then all of host b.
  const std::vector<RankSpeed> one = {
      {"a", 100, 30}, {"a", 100, 28}, {"b", 100, 5}, {"b", 100, 31}};
  const std::vector<RankSpeed> host = {
      {"a", 100, 30}, {"a", 100, 28}, {"b", 100, 5}, {"b", 100, 9}};
  const std::vector<RankSpeed> even = {
      {"a", 100, 30}, {"a", 100, 28}, {"b", 100, 25}, {"b", 100, 31}};
  RunFacts slow{.speeds = {one, one, one}}, slow_host{.speeds = {host, host, host}};
  RunFacts skipped{.steps = 20, .skipped = 2}, retries{.allocator_retries = 3};
  return {
      {"exposed-communication",
       {{comm, [](RunFacts& f) { f.exposed_comm_s = 2.0; }, "21 %"},
        {comm, [](RunFacts& f) { f.world = 1; }, ""},
        {comm, [](RunFacts& f) { f.steps = 9; }, ""}}},
      {"data-wait",
       {{data, [](RunFacts& f) { f.data_s = 2.0; }, "21 %"},
        {data, [](RunFacts& f) { f.step_s = 0; }, ""}}},
      {"small-units",
       {{units, [](RunFacts& f) { f.units.resize(1); },
         "4 of 5 units gather less than 1 MiB: the root (100 B), c (87.9 KiB), d (195 KiB), …"},
        {units, [](RunFacts& f) { f.world = 1; }, ""},
        {shared, [](RunFacts& f) { f.units[0].bytes = 64 << 10; },
         "1 of 2 units gather less than 64 KiB: a (9.8 KiB)."},
        {shared, [](RunFacts& f) { f.units.erase(f.units.begin()); }, ""}}},
      {"fp16-without-scaler",
       {{fp16, [](RunFacts& f) { f.grad_scaler = true; }, "fp16"},
        {fp16, [](RunFacts& f) { f.precision = shard::Precision::kBf16; }, ""}}},
      {"bf16-reduction-many-ranks",
       {{bf16, [](RunFacts& f) { f.replicas = 15; }, "16 replicas"},
        {bf16, [](RunFacts& f) { f.reduce = shard::Reduce::kFp32; }, ""}}},
      {"loss-spike-without-clipping",
       {{spike, [](RunFacts& f) { f.losses.back() = 6; }, "jumped to 6.1 from a median of 3."},
        {spike, [](RunFacts& f) { f.clip = 1; }, ""},
        {spike, [](RunFacts& f) { f.clip.reset(); }, ""},
        {spike, [](RunFacts& f) { f.losses.erase(f.losses.begin()); }, ""},
        {spike, [](RunFacts& f) { f.losses.back() = NAN; }, ""}}},
      {"omp-one-thread",
       {{omp, [](RunFacts& f) { f.torchrun = false; }, "2 of 16 cores compute"},
        {omp, [](RunFacts& f) { f.gpu = true; }, ""},
        {omp, [](RunFacts& f) { f.cores = 2; }, ""},
        {omp, [](RunFacts& f) { f.omp_threads = 2; }, ""},
        {omp, [](RunFacts& f) { f.omp_threads.reset(); }, ""}}},
      {"small-micro-batch",
       {{micro, [](RunFacts& f) { f.memory_share = 0.5; }, "8 micro-batches of 1"},
        {micro, [](RunFacts& f) { f.memory_share.reset(); }, ""},
        {micro, [](RunFacts& f) { f.accumulation = 1; }, ""}}},
      {"slow-rank",
       {{slow, [=](RunFacts& f) { f.speeds[1] = even; },
         "rank 2 on b is slow: the others wait for 30 % of a step, and it for 5 %."},
        {slow, [](RunFacts& f) { f.speeds.pop_back(); }, ""},
        {slow,
         [](RunFacts& f) {
           for (auto& now : f.speeds) now[2].wait_ms = 21;
         },
         ""},
        {slow,
         [](RunFacts& f) {
           for (auto& now : f.speeds) now[2].step_ms = 0;
         },
         ""},
        {slow, [=](RunFacts& f) { f.speeds[2] = host; }, ""},  // not the same twice
        {slow_host, [](RunFacts& f) { f.speeds.clear(); }, "host b is slow"}}},
      {"allocator-retries",
       {{retries, [](RunFacts& f) { f.allocator_retries = 0; }, "out of memory 3 times"}}},
      {"steps-skipped",
       {{skipped, [](RunFacts& f) { f.skipped = 1; }, "2 of the last 20 steps"},
        {skipped, [](RunFacts& f) { f.steps = 19; }, ""}}},
      {"dead-experts",
       {{RunFacts{.expert_idle_steps = {0, 50, 49, 71}},
         [](RunFacts& f) {
           f.expert_idle_steps = {0, 49, 49, 0};
         },
         "2 of 4 experts got no token"}}},
  };
}

TEST(Advice, IsGivenWithReasonAndNotWithout) {
  auto all = reasons();
  for (const auto& name : advice_names()) {
    ASSERT_TRUE(all.contains(name)) << "no test for " << name;
    for (const Reason& reason : all[name]) {
      auto given = advice(reason.facts);
      ASSERT_EQ(names_of(given), Names{name});
      EXPECT_NE(given[0].text.find(reason.part), std::string::npos) << given[0].text;
      RunFacts less = reason.facts;
      reason.removed(less);
      EXPECT_EQ(names_of(advice(less)), Names{}) << name;
    }
  }
  EXPECT_EQ(all.size(), advice_names().size());
}

TEST(Advice, NothingKnownGivesNone) {
  EXPECT_EQ(names_of(advice({})), Names{});
}

TEST(Advice, HintsAtTheThreadsThatFit) {
  RunFacts facts{.ranks_on_host = 2, .cores = 16, .torchrun = true, .omp_threads = 1};
  EXPECT_NE(advice(facts)[0].hint.find("OMP_NUM_THREADS=8"), std::string::npos);
}

TEST(Adviser, GivesEachOnceAndSilencedOnesNever) {
  RunFacts facts{
      .precision = shard::Precision::kFp16, .reduce = shard::Reduce::kBf16, .replicas = 64};
  Adviser adviser;
  EXPECT_EQ(names_of(adviser.news(facts)),
            (Names{"fp16-without-scaler", "bf16-reduction-many-ranks"}));
  EXPECT_EQ(names_of(adviser.news(facts)), Names{});
  facts.steps = 20, facts.skipped = 10;
  EXPECT_EQ(names_of(adviser.news(facts)), Names{"steps-skipped"});

  Adviser quiet({"fp16-without-scaler", "steps-skipped"});
  EXPECT_EQ(names_of(quiet.news(facts)), Names{"bf16-reduction-many-ranks"});
}

TEST(Adviser, RefusesToSilenceWhatDoesNotExist) {
  try {
    Adviser adviser({"small-unit"});
    FAIL();
  } catch (const Error& problem) {
    EXPECT_NE(problem.message().find("\"small-unit\""), std::string::npos);
    EXPECT_NE(problem.hint().find("small-units"), std::string::npos);
  }
}

TEST(Document, HasAChapterForEveryWarningAndNoOther) {
  std::ifstream in(paths::source("docs/warnings.md"));
  Names chapters;
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("## ")) chapters.push_back(line.substr(3));
  EXPECT_EQ(chapters, advice_names());
}

TEST(Advice, ShowsItsNameAndHowToSilenceIt) {
  EXPECT_EQ(describe(Advice{"a-name", "Something was seen.", "do that."}),
            "warning: a-name: Something was seen.\n  HINT: do that. (docs/warnings.md; "
            "log.silence = [\"a-name\"] hides this)");
}

}  // namespace
}  // namespace fsdp::observe
