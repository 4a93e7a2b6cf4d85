#include "base/environment.h"

#include <gtest/gtest.h>

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
  EXPECT_EQ(first_integer({"FSDP_TEST_NONE", "FSDP_TEST_N"}), 42);
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

}  // namespace
}  // namespace fsdp::environment
