// Messages between launchers read back as they were, and anything else is an error.
#include "launch/messages.h"

#include <gtest/gtest.h>

#include <csignal>

#include "fsdp/error.h"

namespace fsdp::launch {
namespace {

template <typename T>
T sent(const T& message) {
  return std::get<T>(decode(encode(message)));
}

Failure killed() {
  Failure failure;
  failure.node = 1;
  failure.rank = 3;
  failure.pid = 99;
  failure.signal = SIGSEGV;
  failure.last_lines = {"one", "two"};
  return failure;
}

TEST(LauncherMessages, AFailureArrivesAsItWas) {
  const Failure back = sent(FailureNotice{killed()}).failure;
  EXPECT_EQ(describe(back, 2), "rank 3 (pid 99) on node 1 was killed by signal 11 (SIGSEGV)");
  EXPECT_EQ(back.last_lines, killed().last_lines);
  EXPECT_EQ(back.exit_code(), 139);
  Failure start;
  start.kind = FailureKind::kStart;
  EXPECT_EQ(sent(Verdict{true, start}).failure->kind, FailureKind::kStart);
  EXPECT_FALSE(sent(Verdict{true, std::nullopt}).failure);
  EXPECT_TRUE(sent(Verdict{true, std::nullopt}).restart);
}

TEST(LauncherMessages, APlanArrivesWithoutWhatEachNodeHasItself) {
  Plan plan;
  plan.run_id = "abc";
  plan.nprocs = {2, 4};
  plan.master_host = "node0";
  plan.master_port = 29500;
  plan.grace_s = 0.5;
  const Plan back = sent(plan);
  EXPECT_EQ(back.nprocs, plan.nprocs);
  EXPECT_EQ(back.master_port, 29500);
  EXPECT_EQ(back.grace_s, 0.5);
  EXPECT_EQ(back.master_host, "");
}

TEST(LauncherMessages, AnOrderToLetGoArrivesAsItWas) {
  EXPECT_EQ(sent(ReplaceRequest{4, killed()}).restart, 4);
  EXPECT_EQ(sent(ReplaceRequest{4, killed()}).failure.rank, 3);
  const LetGo back = sent(LetGo{5, 40001, killed()});
  EXPECT_EQ(back.restart, 5);
  EXPECT_EQ(back.master_port, 40001);
  EXPECT_EQ(back.failure.signal, SIGSEGV);
  EXPECT_EQ(sent(Reached{5, Stage::kJoining}).stage, Stage::kJoining);
}

TEST(LauncherMessages, AHelloOfAnotherVersionMayHaveMoreFields) {
  const auto hello = std::get<Hello>(decode(
      R"({"type": "hello", "version": 9, "nnodes": 2, "node": 1, "nproc": 1, "more": true})"));
  EXPECT_EQ(hello.version, 9);
}

TEST(LauncherMessages, LastLinesMayBeAbsentOrOfAnyBytes) {
  EXPECT_FALSE(sent(EndNotice{}).last_lines);
  const auto lines = sent(EndNotice{{{"\xff", ""}}}).last_lines;
  ASSERT_TRUE(lines);
  EXPECT_EQ(lines->size(), 2u);
}

TEST(LauncherMessages, AnythingElseIsAnErrorThatNamesTheField) {
  const auto refused = [](const std::string& line, const std::string& why) {
    try {
      decode(line);
      ADD_FAILURE() << line;
    } catch (const Error& error) {
      EXPECT_NE(error.message().find(why), std::string::npos) << error.message();
    }
  };
  refused("", "isn't an object");
  refused("[]", "isn't an object");
  refused("{}", "'type'");
  refused(R"({"type": 3})", "must be string");
  refused(R"({"type": "bye"})", "there is no type \"bye\"");
  const std::string hello =
      R"({"type": "hello", "nnodes": 2, "node": 1, "version": )" + std::to_string(kMessageVersion);
  refused(hello + "}", "'nproc'");
  refused(hello + R"(, "nproc": 1})", "\"hello\"");
  refused(R"({"type": "kill", "now": true})", "\"kill\" has other fields");
  std::string unknown = encode(FailureNotice{killed()});
  unknown.replace(unknown.find("\"kind\":0"), 8, "\"kind\":9");
  refused(unknown, "there is no kind of failure 9");
  refused(R"({"type": "let_go", "restart": 1, "master_port": 40001})", "'failure'");
  refused(R"({"type": "replace", "restart": "1"})", "must be number");
  for (const char* stage : {"0", "3", "-1"})
    refused(R"({"type": "reached", "restart": 1, "stage": )" + std::string(stage) + "}",
            "no node can reach stage " + std::string(stage));
}

}  // namespace
}  // namespace fsdp::launch
