// fsdp bench nvme from the outside.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp::bench {
namespace {

using nlohmann::json;

TEST(BenchNvme, EveryEngineHasAShareOfWhatAPlainLoopReaches) {
  launch::Folder folder;
  launch::Launched program({paths::program("fsdp"), "bench", "nvme", "--dir", folder.path(),
                            "--size", "0.03", "--rounds", "1", "--unit", "1", "--depth", "4",
                            "--json"});
  ASSERT_EQ(program.wait(std::chrono::minutes(2)), 0) << program.err();
  int plain = 0, states = 0;
  std::istringstream out(program.out());
  for (std::string line; std::getline(out, line);) {
    const json row = json::parse(line);
    EXPECT_GT(row["gb_per_s"], 0) << line;
    if (row["what"].get<std::string>().starts_with("plain loop")) {
      ++plain;
      continue;
    }
    ++states;
    EXPECT_GT(row["share"], 0) << line;
    EXPECT_FALSE(row["engine"].get<std::string>().empty()) << line;
  }
  EXPECT_EQ(plain, 3);
  EXPECT_GE(states, 2);
  EXPECT_EQ(states % 2, 0);  // moved alone, and with the update
}

TEST(BenchNvme, ADirectoryThatIsNotThereIsNamed) {
  launch::Launched program({paths::program("fsdp"), "bench", "nvme", "--dir", "/no/such/place"});
  EXPECT_EQ(program.wait(), 1);
  EXPECT_NE(program.err().find("/no/such/place"), std::string::npos) << program.err();
  EXPECT_NE(program.err().find("HINT"), std::string::npos) << program.err();
}

}  // namespace
}  // namespace fsdp::bench
