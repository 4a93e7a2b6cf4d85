#include "base/hidden_sve.h"

#include <gtest/gtest.h>

#include <string>

namespace fsdp {
namespace {

std::string cpuinfo(const std::string& features, const std::string& part) {
  std::string core = "BogoMIPS\t: 2100.00\nFeatures\t: " + features +
                     "\nCPU implementer\t: 0x41\nCPU part\t: " + part + "\nCPU revision\t: 1\n\n";
  return "processor\t: 0\n" + core + "processor\t: 1\n" + core;
}

TEST(HiddenSve, IsANeoverseV1OrV2WithoutTheFeature) {
  EXPECT_TRUE(hides_sve(cpuinfo("fp asimd i8mm bf16", "0xd40")));
  EXPECT_TRUE(hides_sve(cpuinfo("fp asimd i8mm bf16", "0xd4f")));
}

TEST(HiddenSve, IsNotAMachineThatShowsIt) {
  EXPECT_FALSE(hides_sve(cpuinfo("fp asimd sve i8mm", "0xd40")));
  EXPECT_FALSE(hides_sve(cpuinfo("fp asimd i8mm sve", "0xd4f")));
}

TEST(HiddenSve, FeaturesThatOnlyStartAlikeAreNotIt) {
  EXPECT_TRUE(hides_sve(cpuinfo("fp svebf16 svei8mm", "0xd40")));
}

TEST(HiddenSve, IsNotAnotherCpu) {
  EXPECT_FALSE(hides_sve(cpuinfo("fp asimd", "0xd0c")));  // Neoverse N1 has none
  EXPECT_FALSE(hides_sve(""));
  EXPECT_FALSE(hides_sve("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2\n"));
}

TEST(HiddenSve, CutTextIsRead) {
  EXPECT_TRUE(hides_sve("CPU part\t: 0xd40"));
  EXPECT_FALSE(hides_sve("CPU part"));
  EXPECT_FALSE(hides_sve("CPU part\t:"));
}

}  // namespace
}  // namespace fsdp
