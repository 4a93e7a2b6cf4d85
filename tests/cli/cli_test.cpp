// The command line as a whole: what every command shares, and fsdp bench comm from the outside.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/launched.h"

namespace fsdp {
namespace {

using nlohmann::ordered_json;

struct Said {
  int code = -1;
  std::string out, err;
};

Said fsdp(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), FSDP_BINARY);
  launch::Launched program(arguments, {"RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_TIMEOUT"});
  Said said;
  said.code = program.wait();
  said.out = program.out();
  said.err = program.err();
  return said;
}

// Refused before anything ran: non-zero, nothing on stdout, the reason and a hint on stderr.
void expect_refusal(const Said& said, int code, const std::string& reason,
                    const std::string& hint) {
  EXPECT_EQ(said.code, code);
  EXPECT_EQ(said.out, "");
  EXPECT_NE(said.err.find(reason), std::string::npos) << said.err;
  EXPECT_NE(said.err.find("HINT: " + hint), std::string::npos) << said.err;
}

TEST(Cli, VersionIsThatOfTheProject) {
  Said said = fsdp({"--version"});
  EXPECT_EQ(said.code, 0);
  EXPECT_EQ(said.out, "fsdp " FSDP_PROJECT_VERSION "\n");
}

TEST(Cli, AloneItPrintsHelp) {
  Said said = fsdp({});
  EXPECT_EQ(said.code, 0);
  for (const char* command : {"train", "generate", "tokenize", "explain", "run", "bench", "doctor"})
    EXPECT_NE(said.out.find("\n  " + std::string(command) + " "), std::string::npos) << said.out;
  EXPECT_EQ(said.out, fsdp({"--help"}).out);
}

TEST(Cli, AnUnknownCommandIsRefused) {
  expect_refusal(fsdp({"nonsense"}), 2, "there is no command \"fsdp nonsense\"", "fsdp has: train");
  expect_refusal(fsdp({"bench", "x"}), 2, "there is no command \"fsdp bench x\"",
                 "fsdp bench has: comm");
}

TEST(Cli, EveryCommandHasHelp) {
  using Words = std::vector<std::string>;
  for (Words words :
       {Words{"train"}, Words{"generate"}, Words{"tokenize"}, Words{"explain"}, Words{"run"},
        Words{"doctor"}, Words{"bench"}, Words{"bench", "comm"}, Words{"bench", "train"},
        Words{"bench", "units"}, Words{"bench", "strategies"}, Words{"bench", "offload"},
        Words{"bench", "update"}}) {
    words.push_back("--help");
    Said said = fsdp(words);
    EXPECT_EQ(said.code, 0) << words[0];
    EXPECT_NE(said.out.find("Usage: fsdp " + words[0]), std::string::npos) << said.out;
  }
}

TEST(BenchComm, RefusesASizeThatIsNone) {
  expect_refusal(fsdp({"bench", "comm", "--from", "x"}), 1, "\"x\" is no size.",
                 "write bytes with K, M or G");
  expect_refusal(fsdp({"bench", "comm", "--from", "2M", "--to", "1M"}), 1, "from 2M to 1M",
                 "--from");
}

TEST(BenchComm, RefusesNoRanks) {
  expect_refusal(fsdp({"bench", "comm", "--ranks", "0"}), 1, "--ranks 0 makes no sense.", "give 1");
  expect_refusal(fsdp({"bench", "comm", "--ranks", "two"}), 2, "two", "fsdp bench comm --help");
}

TEST(BenchComm, RefusesABackendThatDoesNotExist) {
  expect_refusal(fsdp({"bench", "comm", "--backend", "nonsense"}), 1,
                 "there is no backend \"nonsense\" to measure.", "choose from shm, mpi and nccl");
}

TEST(BenchComm, EveryJsonLineHasTheStableKeysInOrder) {
  Said said = fsdp({"bench", "comm", "--backend", "shm", "--ranks", "2", "--from", "1K", "--to",
                    "16K", "--no-peer", "--json"});
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
}  // namespace fsdp
