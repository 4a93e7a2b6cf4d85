// events.jsonl: lines that survive restarts and kills.
#include "observe/event_log.h"

#include <gtest/gtest.h>

#include <sstream>

#include "fsdp/error.h"
#include "observe/folder.h"

namespace fsdp::observe {
namespace {

class RunEvents : public InFolder {
 protected:
  std::vector<nlohmann::json> lines() const {
    std::istringstream in(read(path("events.jsonl")));
    std::vector<nlohmann::json> all;
    for (std::string line; std::getline(in, line);) all.push_back(nlohmann::json::parse(line));
    return all;
  }
};

TEST_F(RunEvents, ALineHasTimeStepEventAndFacts) {
  EventLog(path("events.jsonl")).write("warning", 7, {{"name", "x"}, {"text", "a\nb"}});
  ASSERT_EQ(lines().size(), 1u);
  const auto line = lines().front();
  EXPECT_EQ(line["event"], "warning");
  EXPECT_EQ(line["step"], 7);
  EXPECT_EQ(line["text"], "a\nb");
  EXPECT_GT(line["time"].get<double>(), 1.6e9);
}

TEST_F(RunEvents, ARestartAppends) {
  EventLog(path("events.jsonl")).write("start", 0);
  EventLog(path("events.jsonl")).write("resume", 5);
  ASSERT_EQ(lines().size(), 2u);
  EXPECT_EQ(lines()[1]["event"], "resume");
}

TEST_F(RunEvents, ALineThatWasCutOffIsRemoved) {
  write(path("events.jsonl"), "{\"event\":\"start\"}\n{\"event\":\"warn");
  EventLog(path("events.jsonl")).write("resume", 5);
  ASSERT_EQ(lines().size(), 2u);
  EXPECT_EQ(lines()[0]["event"], "start");
  EXPECT_EQ(lines()[1]["event"], "resume");
}

TEST_F(RunEvents, TextThatIsNotUtf8IsStillALine) {
  EventLog(path("events.jsonl")).write("warning", 1, {{"text", "bad \xff byte"}});
  EXPECT_EQ(lines().size(), 1u);
}

TEST_F(RunEvents, AFileThatCannotBeWrittenIsAnError) {
  EXPECT_THROW(EventLog(path("no/folder/events.jsonl")), Error);
}

}  // namespace
}  // namespace fsdp::observe
