// fsdp doctor from the outside, in environments with something wrong.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp {
namespace {

using nlohmann::ordered_json;

struct Diagnosis {
  int code = -1;
  std::string err;
  std::map<std::string, ordered_json> rows;  // by item
};

// Removes variables that a launcher or shell may have set.
std::vector<std::string> cleaned(std::vector<std::string> environment) {
  std::vector<std::string> all = {"RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_TIMEOUT",
                                  "FSDP_FAKE_WORLD"};
  all.insert(all.end(), environment.begin(), environment.end());
  return all;
}

Diagnosis diagnose(std::vector<std::string> environment = {}) {
  launch::Launched doctor({paths::program("fsdp"), "doctor", "--json"}, cleaned(environment));
  Diagnosis found;
  found.code = doctor.wait();
  std::istringstream lines(doctor.out());
  for (std::string line; std::getline(lines, line);) {
    auto row = ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    EXPECT_TRUE(row.is_object()) << line;
    if (row.is_object()) found.rows[row.value("item", "")] = row;
  }
  found.err = doctor.err();
  return found;
}

void expect_problem(const Diagnosis& found, const std::string& item, const std::string& mentions) {
  ASSERT_TRUE(found.rows.count(item));
  const ordered_json& row = found.rows.at(item);
  EXPECT_EQ(row["status"], "problem") << row;
  EXPECT_NE(row["hint"], "") << row;
  EXPECT_NE(row.dump().find(mentions), std::string::npos) << row;
  EXPECT_EQ(found.code, 1);
}

TEST(Doctor, EveryJsonLineHasTheStableKeysInOrder) {
  Diagnosis found = diagnose();
  EXPECT_EQ(found.err, "");
  for (const auto& [item, row] : found.rows) {
    std::vector<std::string> keys;
    for (const auto& [key, value] : row.items()) {
      keys.push_back(key);
      EXPECT_TRUE(value.is_string()) << row;
    }
    EXPECT_EQ(keys, (std::vector<std::string>{"item", "found", "status", "hint"}));
    EXPECT_NE(row["found"], "") << row;
  }
  for (const char* item : {"fsdp", "compiler", "LibTorch", "CUDA library", "GPUs", "NCCL", "MPI",
                           "cores", "memory", "shared memory", "peer watch", "/dev/shm", "limits",
                           "huge pages", "io_uring", "launcher", "environment", "python peer"})
    EXPECT_TRUE(found.rows.count(item)) << item;
}

TEST(Doctor, ExactlyTheRowsThatAreNotOkHaveAHint) {
  for (const auto& [item, row] : diagnose({"FSDP_TIMEOUT=soon", "OMP_NUM_THREADS=100000"}).rows) {
    EXPECT_TRUE(row["status"] == "ok" || row["status"] == "note" || row["status"] == "problem")
        << row;
    EXPECT_EQ(row["status"] == "ok", row["hint"] == "") << row;
  }
}

TEST(Doctor, TheExitCodeSaysWhetherThereIsAProblem) {
  Diagnosis found = diagnose();
  bool problem = false;
  for (const auto& [item, row] : found.rows) problem |= row["status"] == "problem";
  EXPECT_EQ(found.code, problem ? 1 : 0);
  EXPECT_EQ(found.rows["launcher"]["status"], "ok");
  EXPECT_EQ(found.rows["environment"]["status"], "ok");
}

TEST(Doctor, ABackendThatDoesNotExistIsAProblem) {
  expect_problem(diagnose({"FSDP_BACKEND=nonsense"}), "environment", "choose shm, mpi, nccl");
}

TEST(Doctor, AnInvalidTimeoutIsAProblem) {
  expect_problem(diagnose({"FSDP_TIMEOUT=soon"}), "environment", "FSDP_TIMEOUT");
  expect_problem(diagnose({"FSDP_TIMEOUT=0"}), "environment", "FSDP_TIMEOUT");
}

TEST(Doctor, ARankOutsideItsWorldIsAProblem) {
  expect_problem(diagnose({"RANK=5", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500"}),
                 "launcher", "rank 5 in a world of 2");
}

TEST(Doctor, ARankWithoutAMasterIsAProblem) {
  expect_problem(diagnose({"RANK=5", "WORLD_SIZE=2", "MASTER_ADDR", "MASTER_PORT"}), "launcher",
                 "MASTER_ADDR");
}

TEST(Doctor, ShowsWhatTheLauncherLeft) {
  Diagnosis found = diagnose({"RANK=1", "WORLD_SIZE=4", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4",
                              "MASTER_ADDR=10.0.0.7", "MASTER_PORT=29500", "FSDP_RUN=1"});
  EXPECT_EQ(found.rows["launcher"]["found"],
            "fsdp run: rank 1 of 4 (local 1 of 4), master 10.0.0.7:29500");
}

TEST(Doctor, MoreThreadsThanCoresAreWorthANote) {
  ordered_json row = diagnose({"OMP_NUM_THREADS=100000"}).rows["cores"];
  EXPECT_EQ(row["status"], "note");
  EXPECT_NE(row["hint"].get<std::string>().find("OMP_NUM_THREADS"), std::string::npos) << row;
}

TEST(Doctor, SurvivesVariablesThatArentText) {
  Diagnosis found = diagnose({"NCCL_DEBUG=\xff\xfe\n\x01", "OMP_NUM_THREADS=many", "PATH=/nowhere",
                              "FSDP_TEST_PYTHON=/nowhere/python"});
  EXPECT_NE(found.rows["environment"]["found"].get<std::string>().find("NCCL_DEBUG="),
            std::string::npos);
  EXPECT_EQ(found.rows["python peer"]["status"], "note");
  EXPECT_EQ(found.rows["cores"]["status"], "note");
}

TEST(Doctor, FewOpenFilesAndLittleAddressSpaceAreWorthANote) {
  launch::Launched doctor(
      {"sh", "-c", "ulimit -n 64; ulimit -v 100000000; exec \"$0\" doctor --json",
       paths::program("fsdp")},
      cleaned({}));
  doctor.wait();
  std::istringstream lines(doctor.out());
  std::string limits;
  for (std::string line; std::getline(lines, line);)
    if (line.find("\"limits\"") != std::string::npos) limits = line;
  EXPECT_NE(limits.find("ulimit -n"), std::string::npos) << limits << doctor.err();
  EXPECT_NE(limits.find("ulimit -v"), std::string::npos) << limits << doctor.err();
}

TEST(Doctor, PeopleGetATableWithoutColoursInAPipeAndHintsBelow) {
  launch::Launched doctor({paths::program("fsdp"), "doctor"},
                          cleaned({"FSDP_BACKEND=nonsense", "TERM=xterm"}));
  EXPECT_EQ(doctor.wait(), 1);
  std::string out = doctor.out();
  EXPECT_EQ(out.find('\x1b'), std::string::npos);
  EXPECT_EQ(out.rfind("item", 0), 0u) << out;
  size_t hint = out.find("\nenvironment\n  HINT: there is no backend \"nonsense\".");
  EXPECT_NE(hint, std::string::npos) << out;
  EXPECT_LT(out.find("FSDP_BACKEND=nonsense"), hint);
}

TEST(Doctor, AnUnknownFlagIsAnErrorWithAHint) {
  launch::Launched doctor({paths::program("fsdp"), "doctor", "--nonsense"});
  EXPECT_EQ(doctor.wait(), 2);
  EXPECT_EQ(doctor.out(), "");
  EXPECT_NE(doctor.err().find("--nonsense"), std::string::npos);
  EXPECT_NE(doctor.err().find("HINT: fsdp doctor --help"), std::string::npos) << doctor.err();
}

}  // namespace
}  // namespace fsdp
