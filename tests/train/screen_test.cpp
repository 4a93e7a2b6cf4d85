// What a user sees of `fsdp train`: on a terminal of any width, with and without colours, after
// Ctrl-C, and the commands that it suggests at the end.
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <mutex>
#include <regex>
#include <sstream>
#include <thread>

#include "paths.h"
#include "train/runs.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;
using launch::Folder;
using launch::has;

// A program on a pseudo-terminal.
class Terminal {
 public:
  Terminal(const Words& command, int columns, const Words& environment = {}) : columns_(columns) {
    winsize size{.ws_row = 50, .ws_col = static_cast<unsigned short>(columns)};
    pid_ = forkpty(&terminal_, nullptr, nullptr, &size);
    if (pid_ == 0) {
      for (const char* name : {"RANK", "WORLD_SIZE", "FSDP_TIMEOUT", "NO_COLOR", "LC_ALL"})
        unsetenv(name);
      for (const char* entry : {"TERM=xterm", "LANG=C", "OMP_NUM_THREADS=1", "FSDP_BACKEND=shm"})
        putenv(const_cast<char*>(entry));
      for (const std::string& entry : environment) putenv(const_cast<char*>(entry.c_str()));
      std::vector<char*> words;
      for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
      words.push_back(nullptr);
      execv(words[0], words.data());
      _exit(99);
    }
    reader_ = std::thread([this] {
      char buffer[4096];
      for (ssize_t got; (got = read(terminal_, buffer, sizeof buffer)) > 0;) {
        std::lock_guard guard(lock_);
        text_.append(buffer, static_cast<size_t>(got));
      }
    });
  }
  ~Terminal() {
    if (!ended_) kill(pid_, SIGKILL);
    wait();
    reader_.join();
    close(terminal_);
  }

  void type(const std::string& keys) { ASSERT_EQ(write(terminal_, keys.data(), keys.size()), 1); }

  int wait() {
    int status = 0;
    if (!ended_)
      ended_ = launch::eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; });
    if (ended_ && code_ < 0)
      code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return code_;
  }

  std::string text() const {
    std::lock_guard guard(lock_);
    return text_;
  }

  // The lines on the screen and in its scrollback. A line that reaches the last column wraps.
  std::vector<std::string> lines() const {
    std::string bytes = text();
    std::vector<Words> screen(1);  // characters of each line
    size_t column = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      auto byte = static_cast<unsigned char>(bytes[i]);
      if (byte == '\r') {
        column = 0;
      } else if (byte == '\n') {
        screen.emplace_back();
        column = 0;
      } else if (bytes.compare(i, 3, "\x1b[K") == 0) {
        screen.back().resize(std::min(screen.back().size(), column));
        i += 2;
      } else if (byte == 0x1b) {
        i = bytes.find('m', i);  // a colour
      } else if ((byte & 0xC0) == 0x80) {
        screen.back()[column - 1] += bytes[i];
      } else {
        if (column == static_cast<size_t>(columns_)) screen.emplace_back(), column = 0;
        if (screen.back().size() <= column) screen.back().resize(column + 1, " ");
        screen.back()[column++] = std::string(1, bytes[i]);
      }
    }
    std::vector<std::string> lines;
    for (const Words& characters : screen) {
      lines.emplace_back();
      for (const auto& character : characters) lines.back() += character;
    }
    return lines;
  }

 private:
  int columns_;
  int terminal_ = -1;
  pid_t pid_ = 0;
  std::thread reader_;
  mutable std::mutex lock_;
  std::string text_;
  bool ended_ = false;
  int code_ = -1;
};

size_t count(const std::vector<std::string>& lines, const std::string& pattern) {
  std::regex regex(pattern);
  return std::count_if(lines.begin(), lines.end(),
                       [&](const auto& line) { return std::regex_search(line, regex); });
}

std::string all(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

Words run_of(const Folder& folder, int ranks, int steps, const Words& more = {}) {
  return Words{paths::program("fsdp"), "train", "--ranks", std::to_string(ranks)} +
         tiny_run(folder, "run", steps) + Words{"--train.eval_every", "10"} + more;
}

TEST(Screen, HasAHistoryAboveTheBarAndEndsWithTheCurve) {
  for (int ranks : {1, 2}) {
    Folder folder;
    Terminal terminal(run_of(folder, ranks, 30), 80, {"LC_ALL=C.UTF-8"});
    ASSERT_EQ(terminal.wait(), 0) << terminal.text();
    auto lines = terminal.lines();
    EXPECT_EQ(count(lines, "^step +\\d+/30  loss \\d\\.\\d{4}  (?:█)+$"), 11u) << all(lines);
    EXPECT_EQ(count(lines, "^eval +\\d+/30  loss \\d\\.\\d{4}  (?:█)+$"), 3u) << all(lines);
    EXPECT_EQ(count(lines, "^step 30/30  \\[=+\\]  loss"), 1u) << "the bar, once\n" << all(lines);
    EXPECT_EQ(count(lines, "^step .*\\["), 1u) << all(lines);
    EXPECT_EQ(count(lines, "┤"), 2u) << all(lines);
    std::string text = all(lines);
    size_t curve = text.find("\nLoss ("), summary = text.find("\nThe run took "),
           sample = text.find("\nThe model writes:\n  "), next = text.find("\nNext:\n");
    EXPECT_LT(curve, summary) << text;
    EXPECT_LT(summary, sample) << text;
    EXPECT_LT(sample, next) << text;
    EXPECT_NE(next, std::string::npos) << text;
    EXPECT_TRUE(has(terminal.text(), "\x1b[36m")) << "colours";
  }
}

TEST(Screen, SurvivesNarrowTerminals) {
  for (int columns : {60, 40, 20}) {
    Folder folder;
    Terminal terminal(run_of(folder, 2, 12), columns);
    ASSERT_EQ(terminal.wait(), 0) << terminal.text();
    auto lines = terminal.lines();
    // The first step, six parts of the run, and the live line if it has room for the loss.
    EXPECT_EQ(count(lines, "^step +\\d+/12  loss"), columns >= 40 ? 8u : 7u) << all(lines);
    EXPECT_EQ(count(lines, "^eval +\\d+/12  loss"), 2u) << columns << "\n" << all(lines);
    EXPECT_EQ(count(lines, "^ +[\\d.]+ \\|"), columns >= 40 ? 2u : 0u) << all(lines);
  }
}

TEST(Screen, HasNoColoursWithNoColor) {
  Folder folder;
  Terminal terminal(run_of(folder, 2, 12), 80, {"NO_COLOR=1"});
  ASSERT_EQ(terminal.wait(), 0) << terminal.text();
  EXPECT_FALSE(std::regex_search(terminal.text(), std::regex("\x1b\\[[0-9;]*m")))
      << terminal.text();
  EXPECT_EQ(count(terminal.lines(), "^step 12/12  \\[=+\\]  loss"), 1u) << terminal.text();
}

class CtrlC : public testing::TestWithParam<int> {};

TEST_P(CtrlC, LeavesEveryMessageOnALineOfItsOwn) {
  Folder folder;
  Terminal terminal(run_of(folder, GetParam(), 100'000), 80);
  ASSERT_TRUE(launch::eventually([&] {
    return fs::exists(folder / "run/metrics.jsonl") &&
           has(folder.read("run/metrics.jsonl"), "\"step\":5");
  })) << terminal.text();
  terminal.type("\x03");
  EXPECT_EQ(terminal.wait(), 0) << terminal.text();
  auto lines = terminal.lines();
  for (const char* message :
       {"fsdp: ", "stopping after step", "Loss (", "The run took", "Resume with:"})
    for (const auto& line : lines)
      EXPECT_TRUE(line.find(message) == std::string::npos || line.starts_with(message))
          << message << "\n"
          << all(lines);
  EXPECT_EQ(count(lines, "^stopping after step \\d+"), 1u) << all(lines);
  EXPECT_EQ(count(lines, "^fsdp: .*SIGINT"), GetParam() == 1 ? 0u : 1u) << all(lines);
  EXPECT_EQ(count(lines, "^step .*\\["), 1u) << "the bar, once\n" << all(lines);
  EXPECT_EQ(count(lines, "^Resume with: .*fsdp train --dir .*/run --resume$"), 1u) << all(lines);
}

INSTANTIATE_TEST_SUITE_P(Ranks, CtrlC, testing::Values(1, 2));

TEST(Next, SuggestsCommandsThatWorkFromHere) {
  Folder folder;
  std::string here = folder / "it's here";
  fs::create_directories(here);
  fs::create_directories(folder / "bin");
  fs::create_symlink(paths::program("fsdp"), folder / "bin/fsdp");
  auto in_shell = [&](const std::string& command, const Words& arguments = {}) {
    Words words = {"sh", "-c", "cd \"$0\" && PATH=\"" + (folder / "bin") + ":$PATH\" && " + command,
                   here};
    return run(words + arguments, {"OMP_NUM_THREADS=1"});
  };
  Words arguments = tiny_run(folder, "run", 3);
  arguments.back() = "my run";  // --dir
  Said said = in_shell("fsdp train --ranks 2 --train.sample_prompt \"it's \" \"$@\"", arguments);
  ASSERT_EQ(said.code, 0) << said.err;
  std::istringstream in(said.out.substr(said.out.find("\nNext:\n") + 7));
  Words commands;
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("  ") && line[2] != ' ') commands.push_back(line.substr(2));
  ASSERT_EQ(commands.size(), 4u) << said.out;
  EXPECT_EQ(commands[0], "fsdp generate 'my run' --prompt 'it'\\''s '");
  EXPECT_EQ(commands[1], "fsdp train --dir 'my run' --resume --steps 6");
  EXPECT_EQ(commands[2], "fsdp report 'my run'");
  EXPECT_EQ(commands[3], "fsdp explain");
  Said written = in_shell(commands[0] + " --tokens 5");
  EXPECT_EQ(written.code, 0) << written.err;
  EXPECT_TRUE(written.out.starts_with("it's ")) << written.out;
  Said resumed = in_shell(commands[1]);
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_TRUE(has(resumed.out, "resumed    after step 3"));
  Said shown = in_shell(commands[2]);
  EXPECT_EQ(shown.code, 0) << shown.err;
  EXPECT_TRUE(fs::exists(here + "/my run/report.html"));
}

}  // namespace
}  // namespace fsdp::train
