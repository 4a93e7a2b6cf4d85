// metrics.jsonl: the content of a line, and what a resumed run keeps.
#include "observe/metrics.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/deadline.h"
#include "fsdp/error.h"
#include "observe/folder.h"

namespace fsdp::observe {
namespace {

class Metrics : public InFolder {
 protected:
  std::vector<int64_t> steps() const {
    std::istringstream in(read(path("m.jsonl")));
    std::vector<int64_t> all;
    for (std::string line; std::getline(in, line);)
      all.push_back(nlohmann::json::parse(line)["step"].get<int64_t>());
    return all;
  }
};

StepRecord record(int64_t step) {
  StepRecord record;
  record.step = step;
  record.loss = 2.5;
  return record;
}

TEST_F(Metrics, AFifoInPlaceOfTheFileIsRefused) {
  const fsdp::test::WithDeadline deadline;
  for (const char* name : {"m.jsonl", "m.jsonl.partial"}) {
    ASSERT_EQ(::mkfifo(path(name).c_str(), 0600), 0);
    for (const int64_t step : {0, 5}) {
      if (step == 0 && name == std::string("m.jsonl")) continue;  // it is replaced
      try {
        MetricsLog(path("m.jsonl"), step);
        ADD_FAILURE() << name;
      } catch (const Error& problem) {
        EXPECT_NE(problem.message().find(std::string(name) + ": it is a FIFO"), std::string::npos)
            << problem.message();
      }
    }
    std::filesystem::remove(path(name));
  }
}

TEST_F(Metrics, ALineHoldsWhatIsKnownWithAllItsBits) {
  StepRecord full = record(12);
  full.loss = 0.1 + 0.2;
  full.grad_norm = 1.0 / 3;
  full.lr = 3e-4;
  full.tokens = 9'000'000'000'000;
  full.tokens_per_s = 12345.678;
  full.tflops = 401.5;
  full.mfu = 0.41;
  full.memory_mb = 1024;
  full.step_ms = 10.5;
  full.data_ms = 0.25;
  full.comm_ms = 1.5;
  full.epoch = 1.25;
  full.skipped = true;
  full.eval_loss = 2;
  full.eval_perplexity = 7.389;
  full.scale = 65536;
  auto line = nlohmann::json::parse(to_json(full));
  EXPECT_EQ(line["step"], 12);
  EXPECT_EQ(line["loss"].get<double>(), 0.1 + 0.2);
  EXPECT_EQ(line["grad_norm"].get<double>(), 1.0 / 3);
  EXPECT_EQ(line["tokens"], 9'000'000'000'000);
  for (const char* key : {"lr", "tokens_per_s", "tflops", "mfu", "memory_mb", "step_ms", "data_ms",
                          "comm_ms", "epoch", "eval_loss", "eval_perplexity", "scale"})
    EXPECT_TRUE(line.at(key).is_number()) << key;
  EXPECT_EQ(line["skipped"], true);

  auto brief = nlohmann::json::parse(to_json(record(1)));
  for (const char* key :
       {"grad_norm", "tflops", "mfu", "comm_ms", "eval_loss", "eval_perplexity", "scale"})
    EXPECT_FALSE(brief.contains(key)) << key;
}

TEST_F(Metrics, WhatIsNotFiniteIsAText) {
  StepRecord odd = record(1);
  odd.loss = std::numeric_limits<double>::quiet_NaN();
  odd.grad_norm = std::numeric_limits<double>::infinity();
  odd.lr = -std::numeric_limits<double>::infinity();
  auto line = nlohmann::json::parse(to_json(odd));
  EXPECT_EQ(line["loss"], "NaN");
  EXPECT_EQ(line["grad_norm"], "Infinity");
  EXPECT_EQ(line["lr"], "-Infinity");
}

TEST_F(Metrics, EveryLineIsInTheFileAtOnce) {
  MetricsLog log(path("m.jsonl"));
  for (int64_t step = 1; step <= 3; ++step) {
    log.write(record(step));
    EXPECT_EQ(steps().back(), step);
  }
}

TEST_F(Metrics, AResumedRunCutsOffLaterStepsAndATornLine) {
  {
    MetricsLog log(path("m.jsonl"));
    for (int64_t step = 1; step <= 9; ++step) log.write(record(step));
  }
  std::string whole = read(path("m.jsonl"));
  write(path("m.jsonl"), whole + "{\"step\":10,\"lo");
  {
    MetricsLog log(path("m.jsonl"), 6);
    EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
    EXPECT_EQ(whole.find(read(path("m.jsonl"))), 0u) << "kept lines stay as they were";
    log.write(record(7));
  }
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7}));
  EXPECT_FALSE(std::filesystem::exists(path("m.jsonl.partial")));
}

TEST_F(Metrics, ATornLineGoesEvenWhereItsStepWouldStay) {
  write(path("m.jsonl"), "{\"step\":1}\n{\"step\":2}");
  MetricsLog log(path("m.jsonl"), 5);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
}

TEST_F(Metrics, LinesThatAreNoRecordsGo) {
  write(path("m.jsonl"),
        "{\"step\":1}\n\nrubbish\n[1]\n{\"loss\":1}\n{\"step\":\"2\"}\n{\"step\":2}\n");
  MetricsLog log(path("m.jsonl"), 5);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2}));
}

TEST_F(Metrics, ANewRunBeginsWithAnEmptyFile) {
  write(path("m.jsonl"), "{\"step\":1}\n");
  MetricsLog log(path("m.jsonl"));
  EXPECT_EQ(steps(), (std::vector<int64_t>{}));
  MetricsLog other(path("none.jsonl"), 7);
  EXPECT_EQ(read(path("none.jsonl")), "");
}

TEST_F(Metrics, AFolderThatIsNotThereIsAnErrorWithItsName) {
  try {
    MetricsLog log(path("none/m.jsonl"));
    FAIL();
  } catch (const Error& problem) {
    EXPECT_NE(problem.message().find("none/m.jsonl"), std::string::npos);
    EXPECT_FALSE(problem.hint().empty());
  }
}

}  // namespace
}  // namespace fsdp::observe
