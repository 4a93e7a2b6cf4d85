// The command line as a whole: what every command shares.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/launched.h"

namespace fsdp {
namespace {

using nlohmann::ordered_json;

launch::Ended fsdp(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), FSDP_BINARY);
  return launch::run_to_end(arguments, {"RANK", "WORLD_SIZE", "FSDP_BACKEND", "FSDP_TIMEOUT"});
}

// Refused before anything ran: non-zero, nothing on stdout, the reason and a hint on stderr.
void expect_refusal(const launch::Ended& said, int code, const std::string& reason,
                    const std::string& hint) {
  EXPECT_EQ(said.code, code);
  EXPECT_EQ(said.out, "");
  EXPECT_NE(said.err.find(reason), std::string::npos) << said.err;
  EXPECT_NE(said.err.find("HINT: " + hint), std::string::npos) << said.err;
}

TEST(Cli, VersionIsThatOfTheProject) {
  launch::Ended said = fsdp({"--version"});
  EXPECT_EQ(said.code, 0);
  EXPECT_EQ(said.out, "fsdp " FSDP_PROJECT_VERSION "\n");
}

TEST(Cli, AloneItPrintsHelp) {
  launch::Ended said = fsdp({});
  EXPECT_EQ(said.code, 0);
  for (const char* command : {"train", "generate", "tokenize", "explain", "run", "bench", "doctor"})
    EXPECT_NE(said.out.find("\n  " + std::string(command) + " "), std::string::npos) << said.out;
  EXPECT_EQ(said.out, fsdp({"--help"}).out);
}

TEST(Cli, AnUnknownCommandIsRefused) {
  expect_refusal(fsdp({"nonsense"}), 2, "there is no command \"fsdp nonsense\"", "fsdp has: train");
  expect_refusal(fsdp({"ckpt", "x"}), 2, "there is no command \"fsdp ckpt x\"", "fsdp ckpt has: ");
}

TEST(Cli, EveryCommandHasHelp) {
  using Words = std::vector<std::string>;
  for (Words words :
       {Words{"train"}, Words{"generate"}, Words{"tokenize"}, Words{"plan"}, Words{"explain"},
        Words{"run"}, Words{"doctor"}, Words{"ckpt"}, Words{"ckpt", "inspect"},
        Words{"ckpt", "diff"}, Words{"ckpt", "verify"}, Words{"ckpt", "consolidate"},
        Words{"ckpt", "import"}, Words{"ckpt", "export"}}) {
    std::string usage = "Usage: fsdp";
    for (const std::string& word : words) usage += " " + word;
    words.push_back("--help");
    launch::Ended said = fsdp(words);
    EXPECT_EQ(said.code, 0) << usage;
    EXPECT_NE(said.out.find(usage), std::string::npos) << said.out;
  }
}

}  // namespace
}  // namespace fsdp
