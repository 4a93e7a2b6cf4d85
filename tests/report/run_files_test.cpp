// Reading a run's directory: old runs, killed runs, damaged files.
#include "report/run_files.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>

#include "base/deadline.h"
#include "base/format.h"
#include "fsdp/error.h"
#include "observe/folder.h"

namespace fsdp::report {
namespace {

namespace fs = std::filesystem;

class RunFolder : public observe::InFolder {
 protected:
  bool has_note(const RunFiles& run, const std::string& part) {
    for (const std::string& note : run.notes)
      if (note.find(part) != std::string::npos) return true;
    return false;
  }
};

TEST_F(RunFolder, WhatIsNoRunIsAnErrorWithAHint) {
  for (const std::string& place : {path("nowhere"), folder_.string()}) {
    try {
      read_run(place);
      FAIL() << place;
    } catch (const Error& problem) {
      EXPECT_NE(problem.hint().find("runs/NAME"), std::string::npos);
      EXPECT_NE(problem.message().find(folder_.string()), std::string::npos);
    }
  }
}

TEST_F(RunFolder, MetricsOfARunThatWasKilled) {
  write(path("metrics.jsonl"),
        "{\"step\":1,\"loss\":4.5,\"skipped\":false}\n"
        "not json\n"
        "{\"step\":2,\"loss\":\"NaN\",\"skipped\":true}\n"
        "{\"loss\":1}\n"
        "{\"step\":3,\"loss\":4.25,\"eval_loss\":4}\n"
        "{\"step\":4,\"lo");
  const RunFiles run = read_run(folder_);
  EXPECT_EQ(run.steps, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(run.skipped, (std::vector<int64_t>{2}));
  EXPECT_EQ(run.values.at("loss")[0], 4.5);
  EXPECT_TRUE(std::isnan(run.values.at("loss")[1]));
  EXPECT_EQ(run.values.at("eval_loss").size(), 3u);
  EXPECT_TRUE(std::isnan(run.values.at("eval_loss")[0]));
  EXPECT_EQ(run.finite("loss"), (std::vector<double>{4.5, 4.25}));
  EXPECT_TRUE(has_note(run, "1 line of metrics.jsonl"));
  EXPECT_TRUE(has_note(run, "no events.jsonl"));
  EXPECT_TRUE(has_note(run, "no config.toml"));
}

TEST_F(RunFolder, EventsThatNobodyKnowsAreKeptAndOthersLeftOut) {
  write(path("metrics.jsonl"), "");
  write(path("events.jsonl"),
        "{\"event\":\"start\",\"step\":0}\n{\"step\":1}\n{\"event\":7}\n[]\n"
        "{\"event\":\"from the future\"}\n{\"event\":\"start\",\"step\":5}\n");
  const RunFiles run = read_run(folder_);
  EXPECT_EQ(run.events.size(), 3u);
  EXPECT_EQ((*run.last_event("start"))["step"], 5);
  EXPECT_EQ(run.last_event("end"), nullptr);
  EXPECT_TRUE(has_note(run, "metrics.jsonl has no steps"));
}

TEST_F(RunFolder, SettingsAreThoseOfTheFile) {
  const auto settings = read_settings(
      "# comment\n\n[train]  # Training\n# help\nsteps = 100\nprompt = \"a # b\"  # c\n"
      "name = 'x'\n[data]\nfiles = [\"a\", \"b\"]\nquoted = \"a \\\" b\"\n");
  const std::vector<std::pair<std::string, std::string>> expected = {
      {"train.steps", "100"},
      {"train.prompt", "a # b"},
      {"train.name", "'x'"},
      {"data.files", "[\"a\", \"b\"]"},
      {"data.quoted", "\"a \\\" b\""}};
  EXPECT_EQ(settings, expected);
}

TEST_F(RunFolder, CheckpointsAreListedByStep) {
  write(path("config.toml"), "[train]\nsteps = 3\n");
  for (const char* name : {"step-10", "step-9", "step-x", "other"})
    fs::create_directories(folder_ / "checkpoints" / name);
  write(path("checkpoints/step-9/.metadata"), "12345");
  fs::create_directory_symlink("step-9", folder_ / "checkpoints/latest");
  const RunFiles run = read_run(folder_);
  ASSERT_EQ(run.checkpoints.size(), 2u);
  EXPECT_EQ(run.checkpoints[0].name, "step-9");
  EXPECT_TRUE(run.checkpoints[0].complete);
  EXPECT_EQ(run.checkpoints[0].bytes, 5);
  EXPECT_FALSE(run.checkpoints[1].complete);
  EXPECT_EQ(run.setting("train.steps"), "3");
}

TEST_F(RunFolder, WhatIsNotAFileIsANoteAtOnce) {
  const fsdp::test::WithDeadline deadline;
  for (const char* name : {"metrics.jsonl", "events.jsonl", "config.toml", "profile.json"})
    ASSERT_EQ(::mkfifo(path(name).c_str(), 0600), 0);
  const RunFiles run = read_run(folder_);
  for (const char* name : {"metrics.jsonl", "events.jsonl", "config.toml", "profile.json"})
    EXPECT_TRUE(has_note(run, std::string(name) + ": it is a FIFO")) << name;
}

// A value of each step for each of as many keys as there are lines would be gigabytes.
TEST_F(RunFolder, MetricsHaveFewKeysAndLevels) {
  std::string lines, deep(100'000, '[');
  for (int i = 0; i < 1'000; ++i)
    lines += formatted("{{\"step\":{},\"key{}\":1,\"key0\":2}}\n", i, i);
  lines += "{\"step\":1000,\"deep\":" + deep + std::string(deep.size(), ']') + "}\n";
  write(path("metrics.jsonl"), lines);
  write(path("events.jsonl"),
        "{\"event\":\"start\",\"deep\":" + deep + std::string(deep.size(), ']') + "}\n");
  const RunFiles run = read_run(folder_);
  EXPECT_EQ(run.steps.size(), 1'000u);
  EXPECT_EQ(run.values.size(), 200u);
  EXPECT_EQ(run.values.at("key0")[999], 2);
  EXPECT_TRUE(has_note(run, "more than 200 keys"));
  EXPECT_TRUE(has_note(run, "1 line of metrics.jsonl"));
  EXPECT_TRUE(has_note(run, "1 line of events.jsonl"));
}

TEST_F(RunFolder, ADamagedProfileIsANote) {
  write(path("config.toml"), "");
  write(path("profile.json"), "{\"step\":");
  const RunFiles run = read_run(folder_);
  EXPECT_TRUE(run.profile.is_null());
  EXPECT_TRUE(has_note(run, "profile.json"));
}

}  // namespace
}  // namespace fsdp::report
