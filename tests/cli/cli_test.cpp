// The command line as a whole: what every command shares.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launch/launched.h"
#include "paths.h"

namespace fsdp {
namespace {

using nlohmann::ordered_json;

launch::Ended fsdp(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), paths::program("fsdp"));
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

// docs/commands.md has the table; ckpt_test, requeue_test and tests of the launcher have more of
// it.
TEST(Cli, EveryCommandGivesTwoForAMistakeOnItsLine) {
  using Words = std::vector<std::string>;
  for (const Words& words :
       {Words{"train"}, Words{"generate"}, Words{"tokenize"}, Words{"report"}, Words{"plan"},
        Words{"explain"}, Words{"run"}, Words{"doctor"}, Words{"ckpt", "inspect"},
        Words{"ckpt", "diff"}, Words{"ckpt", "verify"}, Words{"ckpt", "consolidate"},
        Words{"ckpt", "import"}, Words{"ckpt", "export"}, Words{"generate", "x", "--top-p", "2"},
        Words{"run", "-n", "none", "true"}, Words{"run", "--nnodes", "0", "true"},
        Words{"plan", "--world", "none"}, Words{"plan", "--set", "none"}}) {
    Words wrong = words;
    wrong.push_back("--no-such-flag");
    launch::Ended said = fsdp(words.size() > 2 ? words : wrong);
    EXPECT_EQ(said.code, 2) << words.front() << said.err;
    EXPECT_NE(said.err.find("HINT:"), std::string::npos) << said.err;
  }
}

// Each command hung until somebody wrote into the FIFO.
TEST(Cli, NoCommandWaitsForAFifo) {
  const launch::Folder folder;
  const auto fifo = [&](const std::string& name) {
    const std::filesystem::path path = folder / name;
    std::filesystem::create_directories(path.parent_path());
    EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0) << name;
    return path.string();
  };
  std::ofstream(folder / "a.txt") << "text\n";
  const std::string text = folder / "a.txt", out = folder / "out.bin", pipe = fifo("pipe"),
                    tokenizer = fifo("model/tokenizer.json"), config = fifo("c.toml");
  fifo("checkpoint/.metadata");
  fifo("kept/config.toml");
  using Words = std::vector<std::string>;
  for (const Words& words :
       {Words{"tokenize", pipe, "--out", out}, Words{"tokenize", pipe, "--jsonl", "--out", out},
        Words{"tokenize", text, "--tokenizer", tokenizer, "--out", out}, Words{"train", config},
        Words{"train", "--data.train", pipe, "--dir", out, "--ranks", "1"},
        Words{"train", "--resume", "--dir", folder / "kept"},
        Words{"ckpt", "inspect", folder / "checkpoint"},
        Words{"ckpt", "consolidate", folder / "checkpoint", out + ".pt"}, Words{"plan", config}}) {
    const launch::Ended said = fsdp(words);
    EXPECT_GT(said.code, 0) << words.front();
    EXPECT_NE(said.err.find("it is a FIFO"), std::string::npos) << words.front() << said.err;
    EXPECT_NE(said.err.find("HINT:"), std::string::npos) << said.err;
  }
}

TEST(Cli, NamesInErrorsDoNothingToATerminal) {
  const launch::Ended said = fsdp({"tokenize", "a\x1b[2J\r.txt", "--out", "b.bin"});
  EXPECT_EQ(said.err.find_first_of("\x1b\r"), std::string::npos) << said.err;
  EXPECT_NE(said.err.find("a\\x1b[2J\\x0d.txt"), std::string::npos) << said.err;
}

TEST(Cli, ALauncherThatCannotRunTheProgramGivesTheCodesOfAShell) {
  EXPECT_EQ(fsdp({"run", "no-such-program"}).code, 127);
  EXPECT_EQ(fsdp({"run", "/dev/null"}).code, 126);
  EXPECT_EQ(fsdp({"run", "sh", "-c", "kill -KILL $$"}).code, 128 + 9);
  EXPECT_EQ(fsdp({"run", "sh", "-c", "exit 75"}).code, 75);
}

}  // namespace
}  // namespace fsdp
