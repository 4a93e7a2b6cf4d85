// fsdp-bench as a program: fsdp bench starts it, every benchmark has help, and ranks get a row.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/said.h"
#include "paths.h"

namespace fsdp::bench {
namespace {

namespace fs = std::filesystem;

TEST(Bench, FsdpBenchIsFsdpDashBench) {
  EXPECT_EQ(bench({"--version"}).out, "fsdp-bench " FSDP_PROJECT_VERSION "\n");
  Said help = said_by({paths::program("fsdp-bench"), "--help"});
  EXPECT_EQ(help.code, 0) << help.err;
  for (const auto& arguments : std::vector<std::vector<std::string>>{{}, {"help"}, {"--help"}})
    EXPECT_EQ(bench(arguments).out, help.out);
}

TEST(Bench, WhereItIsNotBuiltTheErrorSaysHowToBuildIt) {
  launch::Folder folder;
  fs::copy_file(paths::program("fsdp"), folder / "fsdp");
  expect_refusal(said_by({folder / "fsdp", "bench", "comm"}), 127,
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

TEST(Bench, ARankGetsItsRowAsJsonWithDefaults) {
  const std::string model =
      R"("on":{"backend":"shm"},"layers":1,"dim":32,"heads":2,"vocab":64,"seq":8,"batch":1)";
  std::map<std::string, nlohmann::json> lines;
  for (const std::string mode : {"eager", "plain"}) {
    Said said =
        said_by({paths::program("fsdp-bench"), "train", "--worker",
                 "{" + model + R"(,"steps":1,"warmup":1,"accumulate":2,"mode":")" + mode + "\"}"});
    ASSERT_EQ(said.code, 0) << said.err;
    const nlohmann::json line = nlohmann::json::parse(said.out);
    EXPECT_EQ(line["ours"], mode);
    EXPECT_EQ(line["losses"].size(), 2U);
    const double tokens = line["tok_s_rank"].get<double>() * line["step_ms"].get<double>() / 1e3;
    EXPECT_NEAR(tokens, 2 * 8, 1e-6) << "both micro-batches count";
    lines[mode] = line;
  }
  EXPECT_NEAR(lines["eager"]["loss"].get<double>(), lines["plain"]["loss"].get<double>(), 1e-4);
}

TEST(Bench, AnUnknownBenchmarkIsRefused) {
  expect_refusal(bench({"x"}), 2, "there is no command \"fsdp bench x\"", "fsdp bench has: train");
}

}  // namespace
}  // namespace fsdp::bench
