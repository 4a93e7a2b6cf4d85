// fsdp bench offload from the outside, on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp::bench {
namespace {

using nlohmann::json;

TEST(BenchOffload, MovesMemoryAndKeepsTheLoss) {
  launch::Launched program({paths::program("fsdp"),
                            "bench",
                            "offload",
                            "--layers",
                            "2",
                            "--dim",
                            "32",
                            "--heads",
                            "2",
                            "--vocab",
                            "64",
                            "--seq",
                            "8",
                            "--batch",
                            "1",
                            "--steps",
                            "2",
                            "--warmup",
                            "1",
                            "--ranks",
                            "2",
                            "--json"},
                           {"RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_TIMEOUT"});
  ASSERT_EQ(program.wait(), 0) << program.err();
  std::map<std::string, json> rows;
  std::map<std::string, double> percent;
  std::istringstream out(program.out());
  for (std::string line; std::getline(out, line);) {
    const json found = json::parse(line);
    if (found.contains("part"))
      percent[found["offload"]] += found["percent"].get<double>();
    else
      rows[found["offload"]] = found;
  }
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows["off"]["host_bytes"], 0);
  for (const char* away : {"optimizer", "everything"}) {
    EXPECT_EQ(rows[away]["loss"], rows["off"]["loss"]) << away;
    EXPECT_GT(rows[away]["host_bytes"], 0) << away;
    EXPECT_LT(rows[away]["device_bytes"], rows["off"]["device_bytes"]) << away;
  }
  EXPECT_LT(rows["everything"]["device_bytes"], rows["optimizer"]["device_bytes"]);
  ASSERT_EQ(percent.size(), 3u);
  for (const auto& [name, sum] : percent) EXPECT_NEAR(sum, 100, 1e-6) << name;
}

// A fake Python that prints a peer's line and records how it was called.
std::string stand_in(const launch::Folder& folder, const std::string& answer) {
  const std::string path = folder / "python3";
  std::ofstream file(path);
  file << "#!/bin/sh\n[ \"$1\" = -c ] && exit 0\necho \"$OMP_NUM_THREADS: $*\" >> "
       << folder / "calls"
       << "\n"
       << answer << "\n";
  file.close();
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return "FSDP_TEST_PYTHON=" + path;
}

struct Answer {
  int code = -1;
  std::string err;
  std::map<std::string, json> rows;       // by the column "what"
  std::map<std::string, double> percent;  // sum over the parts, by the column "offload"
};

Answer bench_offload_rows(std::vector<std::string> arguments, const std::string& python) {
  std::vector<std::string> words = {paths::program("fsdp"),
                                    "bench",
                                    "offload",
                                    "--steps",
                                    "1",
                                    "--warmup",
                                    "1",
                                    "--threads",
                                    "3",
                                    "--json",
                                    "--device",
                                    "cpu"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  launch::Launched program(words, {"RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_TIMEOUT", python});
  Answer answer;
  answer.code = program.wait();
  answer.err = program.err();
  std::istringstream out(program.out());
  for (std::string line; std::getline(out, line);) {
    const json found = json::parse(line);
    if (found.contains("part"))
      answer.percent[found["offload"]] += found["percent"].get<double>();
    else
      answer.rows[found["what"]] = found;
  }
  return answer;
}

TEST(BenchOffload, RowsStandBesideThePeerAndAreKept) {
  launch::Folder folder;
  const std::string python = stand_in(
      folder, R"(echo '{"peer":"fake","step_ms":4,"loss0":5.5,"loss":5.4,"peak_alloc_mb":2500}')");
  const std::vector<std::string> arguments = {
      "--rows", "tiny", "--peer", "--keep", folder / "kept.jsonl", "--write", folder / "page.md"};
  Answer answer = bench_offload_rows(arguments, python);
  ASSERT_EQ(answer.code, 0) << answer.err;
  ASSERT_EQ(answer.rows.size(), 4U);
  const json off = answer.rows["fsdp.cpp, no offload"], all = answer.rows["fsdp.cpp, everything"],
             peer = answer.rows["FSDP2, CPUOffloadPolicy"];
  EXPECT_EQ(all["last_loss"], off["last_loss"]);
  EXPECT_LT(all["peak_gb"], off["peak_gb"]);
  EXPECT_NEAR(all["times_peer"].get<double>(), all["step_ms"].get<double>() / 4, 0.01);
  EXPECT_NEAR(peer["peak_gb"].get<double>(), 2.5, 1e-9);
  ASSERT_EQ(answer.percent.size(), 3U);
  for (const auto& [name, sum] : answer.percent) EXPECT_NEAR(sum, 100, 1e-6) << name;

  const std::string calls = folder.read("calls");
  EXPECT_TRUE(launch::has(calls, "3: "));  // the same number of threads as ours
  EXPECT_TRUE(launch::has(calls,
                          "peer_fsdp2.py --device cpu --steps 1 --warmup 1 --clip 1 "
                          "--offload --batch 2"));
  EXPECT_TRUE(launch::has(folder.read("page.md"), "# Offload to host memory on the CPU"));
  EXPECT_TRUE(launch::has(folder.read("page.md"), "\"ours\":\"everything\""));

  Answer again = bench_offload_rows(arguments, python);
  EXPECT_EQ(again.rows, answer.rows) << "kept rows are not measured again";
  EXPECT_EQ(folder.read("calls"), calls);
}

TEST(BenchOffload, ACommandThatRowsShareIsMeasuredOnce) {
  launch::Folder folder;
  Answer answer = bench_offload_rows({"--rows", "tiny,tiny", "--only", "peer"},
                                     stand_in(folder, R"(echo '{"peer":"fake","step_ms":4}')"));
  ASSERT_EQ(answer.code, 0) << answer.err;
  const std::string calls = folder.read("calls");
  EXPECT_EQ(std::count(calls.begin(), calls.end(), '\n'), 1) << calls;
}

TEST(BenchOffload, APeerThatFailsCostsItsOwnLine) {
  launch::Folder folder;
  Answer answer = bench_offload_rows({"--rows", "tiny", "--which", "everything", "--peer"},
                                     stand_in(folder, "exit 3"));
  EXPECT_EQ(answer.code, 0) << answer.err;
  ASSERT_EQ(answer.rows.size(), 2U);
  EXPECT_GT(answer.rows["fsdp.cpp, everything"]["step_ms"], 0);
  EXPECT_TRUE(answer.rows["FSDP2, CPUOffloadPolicy: failed"]["step_ms"].is_null());
  EXPECT_TRUE(launch::has(answer.err, "exited with code"));
}

TEST(BenchOffload, WeightsDrawnOnTheDeviceTrainTheSameWithOffload) {
  Answer answer = bench_offload_rows(
      {"--rows", "tiny", "--which", "off,everything", "--init", "device", "--clip", "0"},
      "FSDP_TEST_PYTHON");
  ASSERT_EQ(answer.code, 0) << answer.err;
  ASSERT_EQ(answer.rows.size(), 2U);
  const json off = answer.rows["fsdp.cpp, no offload"], all = answer.rows["fsdp.cpp, everything"];
  EXPECT_EQ(off["row"], "Llama, tiny, no clip");
  EXPECT_NEAR(off["first_loss"].get<double>(), std::log(256), 0.1);
  EXPECT_GT(std::abs(off["first_loss"].get<double>() - std::log(256)), 1e-5) << "weights are zero";
  EXPECT_EQ(all["first_loss"], off["first_loss"]);
  EXPECT_EQ(all["last_loss"], off["last_loss"]);
}

TEST(BenchOffload, AnUnknownRowIsRefusedWithTheKnownOnes) {
  Answer answer = bench_offload_rows({"--rows", "182m"}, "FSDP_TEST_PYTHON");
  EXPECT_EQ(answer.code, 1);
  EXPECT_TRUE(launch::has(answer.err, "953m, mlp, tiny"));
}

}  // namespace
}  // namespace fsdp::bench
