#include "base/format.h"

#include <gtest/gtest.h>

#include <filesystem>

namespace fsdp {
namespace {

TEST(Formatted, TakesTextPathsAndNumbersOfAnyWidth) {
  const std::filesystem::path path = "/run/step-1";
  const std::string name = "norm";
  EXPECT_EQ(
      formatted("{}: \"{}\" of {} has {} of {} bytes", path, name, "the model", -1, UINT64_MAX),
      "/run/step-1: \"norm\" of the model has -1 of 18446744073709551615 bytes");
  EXPECT_EQ(formatted("{:.1f} s, {:>4}|{:<3}|{:02x}", 2.25, "ab", "c", 10u), "2.2 s,   ab|c  |0a");
}

TEST(Formatted, CountsPlaceholdersWhenItIsCompiled) {
  static_assert(placeholders("nothing {{}} to fill in") == 0);
  static_assert(placeholders("{} of {:>{}}") == 3);
  static_assert(placeholders("{}}} and {{{}") == 2);
  static_assert(placeholders("{} and {") == -1);
  static_assert(placeholders("} {}") == -1);
  EXPECT_EQ(formatted("{{}} {{{}}}", 1), "{} {1}");
}

}  // namespace
}  // namespace fsdp
