// fsdp-bench as a program: fsdp bench starts it, and every benchmark has help.
#include <gtest/gtest.h>

#include <filesystem>

#include "bench/said.h"

namespace fsdp::bench {
namespace {

namespace fs = std::filesystem;

TEST(Bench, FsdpBenchIsFsdpDashBench) {
  EXPECT_EQ(bench({"--version"}).out, "fsdp-bench " FSDP_PROJECT_VERSION "\n");
  Said help = said_by({FSDP_BENCH, "--help"});
  EXPECT_EQ(help.code, 0) << help.err;
  for (const auto& arguments : std::vector<std::vector<std::string>>{{}, {"help"}, {"--help"}})
    EXPECT_EQ(bench(arguments).out, help.out);
}

TEST(Bench, WhereItIsNotBuiltTheErrorSaysHowToBuildIt) {
  launch::Folder folder;
  fs::copy_file(FSDP_BINARY, folder / "fsdp");
  expect_refusal(said_by({folder / "fsdp", "bench", "comm"}), 1,
                 "there is no " + folder / "fsdp-bench" + ": the benchmarks aren't built.",
                 "./fsdp bench builds them");
}

TEST(Bench, EveryBenchmarkHasHelp) {
  for (const char* name :
       {"train", "comm", "units", "strategies", "offload", "nvme", "update", "checkpoint"}) {
    Said said = bench({name, "--help"});
    EXPECT_EQ(said.code, 0) << name;
    EXPECT_NE(said.out.find("Usage: fsdp bench " + std::string(name)), std::string::npos)
        << said.out;
  }
}

TEST(Bench, AnUnknownBenchmarkIsRefused) {
  expect_refusal(bench({"x"}), 2, "there is no command \"fsdp bench x\"", "fsdp bench has: train");
}

}  // namespace
}  // namespace fsdp::bench
