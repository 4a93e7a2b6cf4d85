#include "base/environment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "fsdp/error.h"

namespace fsdp::environment {
namespace {

TEST(Environment, ReadsNumbersAndFlags) {
  setenv("FSDP_TEST_N", "42", 1);
  setenv("FSDP_TEST_FLAG", "True", 1);
  unsetenv("FSDP_TEST_NONE");
  EXPECT_EQ(integer("FSDP_TEST_N"), 42);
  EXPECT_EQ(integer("FSDP_TEST_NONE"), std::nullopt);
  EXPECT_TRUE(flag("FSDP_TEST_FLAG", false));
  EXPECT_TRUE(flag("FSDP_TEST_NONE", true));
}

TEST(Environment, AValueThatDoesNotParseNamesItsVariable) {
  for (const char* bad : {"4x", "x", "1.5", " 1"}) {
    setenv("FSDP_TEST_N", bad, 1);
    try {
      integer("FSDP_TEST_N");
      FAIL() << bad;
    } catch (const Error& error) {
      EXPECT_NE(error.message().find("FSDP_TEST_N"), std::string::npos);
    }
  }
  setenv("FSDP_TEST_FLAG", "maybe", 1);
  EXPECT_THROW(flag("FSDP_TEST_FLAG", false), Error);
}

TEST(Environment, ChangesReplaceAddAndRemove) {
  setenv("FSDP_TEST_OLD", "1", 1);
  setenv("FSDP_TEST_GONE", "1", 1);
  auto lines =
      changed({{"FSDP_TEST_OLD", "2"}, {"FSDP_TEST_NEW", "a=b"}, {"FSDP_TEST_GONE", std::nullopt}});
  auto count = [&](const std::string& line) {
    return std::count(lines.begin(), lines.end(), line);
  };
  EXPECT_EQ(count("FSDP_TEST_OLD=2"), 1);
  EXPECT_EQ(count("FSDP_TEST_OLD=1"), 0);
  EXPECT_EQ(count("FSDP_TEST_NEW=a=b"), 1);
  EXPECT_EQ(count("FSDP_TEST_GONE=1"), 0);
}

}  // namespace
}  // namespace fsdp::environment
