// fsdp bench comm from the outside.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench/said.h"

namespace fsdp::bench {
namespace {

using nlohmann::ordered_json;

TEST(BenchComm, RefusesAnInvalidSize) {
  expect_refusal(bench({"comm", "--from", "x"}), 1, "\"x\" isn't a size.",
                 "write bytes with K, M or G");
  expect_refusal(bench({"comm", "--from", "2M", "--to", "1M"}), 1,
                 "--from 2M --to 1M isn't a range.", "--from");
}

TEST(BenchComm, RefusesNoRanks) {
  expect_refusal(bench({"comm", "--ranks", "0"}), 1, "--ranks 0 is too few.", "give 1");
  expect_refusal(bench({"comm", "--ranks", "two"}), 2, "two", "fsdp bench comm --help");
}

TEST(BenchComm, RefusesABackendThatDoesNotExist) {
  expect_refusal(bench({"comm", "--backend", "nonsense"}), 1,
                 "there is no backend \"nonsense\" to measure.", "choose from shm, mpi and nccl");
}

TEST(BenchComm, EveryJsonLineHasTheStableKeysInOrder) {
  Said said = bench({"comm", "--backend", "shm", "--ranks", "2", "--from", "1K", "--to", "16K",
                     "--no-peer", "--json"});
  EXPECT_EQ(said.code, 0) << said.err;
  std::istringstream lines(said.out);
  std::vector<int64_t> sizes;
  for (std::string line; std::getline(lines, line);) {
    auto row = ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(row.is_object()) << line;
    std::vector<std::string> keys;
    for (const auto& [key, value] : row.items()) keys.push_back(key);
    ASSERT_EQ(keys, (std::vector<std::string>{"backend", "ranks", "bytes", "operation", "buffers",
                                              "time_us", "gb_s", "copy_us", "share_of_copy",
                                              "gloo_us", "times_gloo"}));
    EXPECT_EQ(row["backend"], "shm");
    EXPECT_EQ(row["ranks"], 2);
    EXPECT_GT(row["time_us"].get<double>(), 0) << line;
    EXPECT_TRUE(row["gloo_us"].is_null()) << line;
    sizes.push_back(row["bytes"]);
  }
  // Two operations, each in private and in shared buffers, at 1K, 4K and 16K.
  EXPECT_EQ(sizes.size(), 12u) << said.out;
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  EXPECT_EQ(sizes, (std::vector<int64_t>{1024, 4096, 16384}));
}

}  // namespace
}  // namespace fsdp::bench
