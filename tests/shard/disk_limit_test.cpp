// Masters and states on disk, in a process with less memory than they take: the results have the
// same bits as in a process without a limit and without a disk. With states in host memory the
// process runs out of memory, so the limit is effective.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "launch/launched.h"
#include "paths.h"
#include "shard/limited.h"

namespace fsdp::testing {
namespace {

struct Ended {
  int code = 0;
  std::string out, err, result, checkpoint;
};

class DiskLimit : public ::testing::TestWithParam<const char*> {
 protected:
  // Bytes of masters beyond the parameters, and of states.
  int64_t state_bytes() const {
    return kLimitedParameters * (8 + (std::string(GetParam()) == "split" ? 2 : 4));
  }

  Ended train(const std::string& states, int64_t limit) {
    // Threads inherit the stack limit; with 8 MiB each they would take most of the memory.
    launch::Launched program(
        {"sh", "-c", "ulimit -s 1024 && exec \"$@\"", "sh", paths::program("limited_program"),
         GetParam(), states, std::to_string(limit), folder_ / "result"},
        {"RANK", "WORLD_SIZE", "LOCAL_RANK", "FSDP_BACKEND", "OMP_NUM_THREADS=1"});
    Ended ended{.code = program.wait(std::chrono::minutes(4))};  // a disk may be slow
    ended.out = program.out(), ended.err = program.err();
    if (ended.code == 0) {
      ended.result = folder_.read("result");
      ended.checkpoint = folder_.read("result.checkpoint/__0_0.distcp");
    }
    return ended;
  }

  launch::Folder folder_;
};

TEST_P(DiskLimit, TwentyStepsInHalfOfTheStatesMemoryAreThoseWithoutLimit) {
  const Ended plain = train("device", 0);
  ASSERT_EQ(plain.code, 0) << plain.err;
  // Parameters by name in float32, then per unit the float32 masters and both states.
  ASSERT_EQ(static_cast<int64_t>(plain.result.size()), kLimitedParameters * 16);
  const Ended disk = train(folder_.path(), state_bytes() / 2);
  if (disk.code == 77) GTEST_SKIP() << disk.out;
  ASSERT_EQ(disk.code, 0) << disk.out << disk.err;
  EXPECT_TRUE(disk.result == plain.result);
  EXPECT_FALSE(plain.checkpoint.empty());
  EXPECT_TRUE(disk.checkpoint == plain.checkpoint);
}

TEST_P(DiskLimit, StatesInHostMemoryDoNotFitThere) {
  const Ended host = train("host", state_bytes() / 2);
  if (host.code == 77) GTEST_SKIP() << host.out;
  EXPECT_EQ(host.code, 3) << host.err;
  EXPECT_NE(host.out.find("memory"), std::string::npos) << host.out;
}

INSTANTIATE_TEST_SUITE_P(Masters, DiskLimit, ::testing::Values("split", "whole"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace fsdp::testing
