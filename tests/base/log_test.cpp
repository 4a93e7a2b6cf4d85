// What an error looks like on stderr, and the exit code that it gives.
#include "base/log.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "base/exit_code.h"
#include "base/jit_profile.h"
#include "base/rank_status.h"

namespace fsdp {
namespace {

std::string printed(const std::exception& failure) {
  testing::internal::CaptureStderr();
  log::error(failure);
  return testing::internal::GetCapturedStderr();
}

TEST(Log, AnErrorIsPrintedOnce) {
  const Error first("the first.", "do this."), second("the second.", "");
  EXPECT_EQ(printed(first), "fsdp: error: the first.\n  HINT: do this.\n");
  EXPECT_EQ(printed(first), "");  // main catches what was printed where the run failed
  EXPECT_EQ(printed(second), "fsdp: error: the second.\n");
  EXPECT_TRUE(rank_status::current().failing);
}

TEST(Log, TheStackThatLibTorchAppendsIsLeftOut) {
  const std::runtime_error lost(
      "failed to recv, got 0 bytes\nException raised from recvBytes at Utils.hpp:678 (most recent "
      "call first):\nframe #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80\n");
  EXPECT_EQ(log::plain(lost), "failed to recv, got 0 bytes");
  EXPECT_EQ(printed(lost), "fsdp: error: failed to recv, got 0 bytes\n");
  const std::runtime_error symbolized("no memory\nframe #0: main + 1\n");
  EXPECT_EQ(log::plain(symbolized), "no memory");
  EXPECT_EQ(log::plain(Error("a \n message.", "and a hint.")),
            "a \n message.\n  HINT: and a hint.");
}

TEST(ExitCode, IsThatOfTheError) {
  EXPECT_EQ(exit_code(Error("failed.", "")), 1);
  EXPECT_EQ(exit_code(std::runtime_error("failed")), 1);
  EXPECT_EQ(exit_code(std::bad_alloc()), 71);
  EXPECT_EQ(exit_code(CodedError(kExitLostRank, "gone.", "")), 69);
}

TEST(ExitCode, ErrorsWhileTheConfigIsReadAreThoseOfTheUser) {
  const auto code_of = [](auto work) {
    try {
      checking_usage(work);
    } catch (const std::exception& failure) {
      return exit_code(failure);
    }
    return kExitDone;
  };
  EXPECT_EQ(checking_usage([] { return 5; }), 5);
  EXPECT_EQ(code_of([] { throw Error("no such key.", "look."); }), 2);
  EXPECT_EQ(code_of([] { throw CodedError(kExitDamaged, "damaged.", ""); }), 65);
  EXPECT_EQ(code_of([] { throw std::bad_alloc(); }), 71);
}

TEST(JitProfile, IsOffUnlessTheUserSaysOtherwise) {
  if (!jit_profile_was_turned_off()) GTEST_SKIP() << "the environment has its own value";
  EXPECT_STREQ(std::getenv(kJitProfileVariable), "0");
}

}  // namespace
}  // namespace fsdp
