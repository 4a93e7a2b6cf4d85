#include "launch/output.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <stdexcept>

#include "launch/failure.h"

namespace fsdp::launch {
namespace {

using Words = std::vector<std::string>;

Words split(const Words& reads) {
  LineSplitter splitter;
  Words pieces;
  for (const auto& read : reads) splitter.feed(read, pieces);
  pieces.push_back("rest:" + splitter.take_rest());
  return pieces;
}

TEST(LineSplitter, KeepsAnIncompleteLine) {
  EXPECT_EQ(split({"one\ntw", "o\n", "thr"}), (Words{"one\n", "two\n", "rest:thr"}));
}

TEST(LineSplitter, ACarriageReturnEndsARewrittenLineOnly) {
  EXPECT_EQ(split({"10%\r20%\r"}), (Words{"10%\r", "rest:20%\r"}));
  EXPECT_EQ(split({"10%\r", "20%"}), (Words{"10%\r", "rest:20%"}));
  EXPECT_EQ(split({"dos\r\nline\r", "\n"}), (Words{"dos\r\n", "line\r\n", "rest:"}));
}

TEST(LineSplitter, NoSplitOfTheReadsChangesOrLosesBytes) {
  std::string text = "a\r\nbb\rccc\n\n\xff\xfe" + std::string(1, 0) + "\r\r\nlast", joined;
  for (size_t first = 0; first <= text.size(); ++first) {
    for (size_t second = first; second <= text.size(); ++second) {
      LineSplitter splitter;
      Words pieces;
      splitter.feed(text.substr(0, first), pieces);
      splitter.feed(text.substr(first, second - first), pieces);
      splitter.feed(text.substr(second), pieces);
      pieces.push_back(splitter.take_rest());
      joined.clear();
      for (const auto& piece : pieces) joined += piece;
      ASSERT_EQ(joined, text);
      ASSERT_EQ(pieces[0], "a\r\n") << first << " " << second;
    }
  }
}

TEST(LineSplitter, AVeryLongLineIsPassedOnInParts) {
  LineSplitter splitter;
  Words pieces;
  std::string text(3 * LineSplitter::kLongest + 5, 'x');
  splitter.feed(text + "\n", pieces);
  std::string joined;
  for (const auto& piece : pieces) {
    EXPECT_LE(piece.size(), LineSplitter::kLongest);
    joined += piece;
  }
  EXPECT_EQ(joined, text + "\n");
}

TEST(LastLines, KeepsTheLastTwentyAndRewritesProgress) {
  LastLines last;
  for (int i = 0; i < 30; ++i) last.add("line " + std::to_string(i) + "\n");
  ASSERT_EQ(last.lines().size(), LastLines::kCount);
  EXPECT_EQ(last.lines().front(), "line 10");
  for (int i = 0; i < 100; ++i) last.add(std::to_string(i) + "%\r");
  last.add("100%\n");
  last.add("er");
  last.add("ror\n");
  auto lines = last.lines();
  EXPECT_EQ(lines[lines.size() - 3], "line 29");
  EXPECT_EQ(lines[lines.size() - 2], "100%");
  EXPECT_EQ(lines[lines.size() - 1], "error");
}

TEST(LastLines, LongLinesAreCut) {
  LastLines last;
  for (int i = 0; i < 10; ++i) last.add(std::string(100'000, 'x'));
  ASSERT_EQ(last.lines().size(), 1u);
  EXPECT_LE(last.lines()[0].size(), LastLines::kLongest + 3);
}

TEST(RankPrefix, IsPaddedToTheWidthOfTheLargestRank) {
  EXPECT_EQ(rank_prefix(3, 4), "[3] ");
  EXPECT_EQ(rank_prefix(3, 10), "[3] ");
  EXPECT_EQ(rank_prefix(3, 11), "[ 3] ");
  EXPECT_EQ(rank_prefix(10, 11), "[10] ");
  EXPECT_EQ(rank_prefix(0, 1), "[0] ");
}

// A pipe that reads what a Writer writes.
struct Reader {
  Reader() {
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
  }
  ~Reader() {
    close(ends[0]);
    if (ends[1] >= 0) close(ends[1]);
  }
  std::string read_all() {
    std::string text;
    char buffer[4096];
    ssize_t got;
    while ((got = read(ends[0], buffer, sizeof buffer)) > 0) text.append(buffer, got);
    return text;
  }
  int ends[2];
};

TEST(Screen, ALineLeftOpenIsEndedBeforeAnotherRankWrites) {
  Reader reader;
  Writer writer(reader.ends[1]);
  Screen screen(writer, false);
  screen.show(0, "[0] ", "one\n");
  screen.show(1, "[1] ", "half");
  screen.show(1, "[1] ", " and half\n");
  screen.show(1, "[1] ", "open");
  screen.show(0, "[0] ", "two\n");
  screen.show(0, "[0] ", "open");
  screen.say("fsdp: word\n");
  writer.write_some();
  EXPECT_EQ(reader.read_all(),
            "[0] one\n[1] half and half\n[1] open\n[0] two\n[0] open\nfsdp: word\n");
}

TEST(Screen, ALiveLineIsClearedBeforeOthersWrite) {
  auto shown = [](bool colour) {
    Reader reader;
    Writer writer(reader.ends[1]);
    Screen screen(writer, colour);
    screen.show(0, "", "step 1\r");
    screen.say("fsdp: word\n");
    screen.show(0, "", "\r");
    screen.show(0, "", "step 2");
    screen.show(0, "", "\r");
    screen.show(0, "", "step 3");
    screen.show(0, "", "a warning\n", 1);
    screen.show(0, "", "\r");
    screen.show(0, "", "step 4\n");
    screen.show(1, "", "done\n");
    writer.write_some();
    return reader.read_all();
  };
  EXPECT_EQ(
      shown(true),
      "step 1\x1b[K\r\r\x1b[K\r\x1b[Kfsdp: word\n\x1b[K\rstep 2\x1b[K\rstep 3\r\x1b[Ka warning\n"
      "\x1b[K\rstep 4\ndone\n");
  EXPECT_EQ(shown(false), "step 1\r\nfsdp: word\n\rstep 2\rstep 3\na warning\n\rstep 4\ndone\n");
}

TEST(Screen, ColoursThePrefixOnlyWhereAsked) {
  Reader reader;
  Writer writer(reader.ends[1]);
  Screen(writer, true).show(0, "[0] ", "x\n");
  Screen(writer, false).show(0, "[0] ", "x\n");
  writer.write_some();
  EXPECT_EQ(reader.read_all(), "\x1b[36m[0] \x1b[0mx\n[0] x\n");
}

TEST(Writer, NeverBlocksAndLosesNothing) {
  Reader reader;
  Writer writer(reader.ends[1]);
  std::string text, received;
  for (int i = 0; i < 300'000; ++i) text += std::to_string(i) + "\n";
  writer.push(text);
  EXPECT_TRUE(writer.full());
  while (writer.pending() > 0) {
    writer.write_some();  // must return although nothing reads the pipe meanwhile
    received += reader.read_all();
  }
  EXPECT_TRUE(received == text);
}

TEST(Writer, NoticesThatTheReaderIsGone) {
  struct sigaction ignore = {}, before;
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &before);
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  close(ends[0]);
  Writer writer(ends[1]);
  writer.push("text\n");
  writer.write_some();
  EXPECT_EQ(writer.problem(), EPIPE);
  EXPECT_EQ(writer.pending(), 0u);
  close(ends[1]);
  sigaction(SIGPIPE, &before, nullptr);
}

TEST(Failure, ReportShowsTheLastLinesAndAHint) {
  Failure failure;
  failure.rank = 2;
  failure.pid = 7;
  failure.code = 5;
  failure.last_lines = {"what it said"};
  EXPECT_EQ(report(failure, 1, 3, "train", "logs"),
            "rank 2 (pid 7) exited with code 5.\n"
            "  Its last lines:\n"
            "    what it said\n"
            "  3 other ranks were ended.\n"
            "  HINT: its full output is in logs/rank-2.log.\n");
}

}  // namespace
}  // namespace fsdp::launch
