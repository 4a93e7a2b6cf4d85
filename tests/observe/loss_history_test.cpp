// The loss curve of a run: its plot in text, at every width, for runs of any length.
#include "observe/loss_history.h"

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>
#include <vector>

namespace fsdp::observe {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Columns of a line: SGR colours take none, a character of UTF-8 takes one.
size_t columns(const std::string& line) {
  size_t count = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '\x1b')
      i = line.find('m', i);
    else if ((static_cast<unsigned char>(line[i]) & 0xC0) != 0x80)
      ++count;
  }
  return count;
}

LossHistory falling(int64_t steps) {
  LossHistory history;
  for (int64_t i = 1; i <= steps; ++i)
    history.step(i, 5.0 - 4.0 * static_cast<double>(i - 1) / static_cast<double>(steps - 1));
  return history;
}

TEST(LossCurve, FallsFromTheFirstToTheLastStep) {
  LossHistory history = falling(100);
  history.evaluation(50, 3.0);
  history.evaluation(100, 1.0);
  EXPECT_EQ(history.plot({.width = 34, .height = 5}),
            "Loss (* training, o evaluation):\n"
            "   4.96 |****\n"
            "        |    *****\n"
            "        |         **o***\n"
            "        |               ******\n"
            "      1 |                     **o\n"
            "        +------------------------\n"
            "         step 1               100\n");
}

TEST(LossCurve, HasDotsAndColoursOnATerminal) {
  std::string text = falling(100).plot({.width = 80, .unicode = true, .colour = true});
  EXPECT_NE(text.find("┤"), std::string::npos);
  EXPECT_NE(text.find("\x1b[36m"), std::string::npos);
  EXPECT_EQ(text.find("evaluation"), std::string::npos) << "there was none";
  EXPECT_EQ(falling(100).plot({.unicode = true}).find('\x1b'), std::string::npos);
}

TEST(LossCurve, FitsEveryWidth) {
  for (int64_t steps : {8, 20, 5000})
    for (int width = 0; width <= 120; ++width)
      for (bool unicode : {false, true}) {
        LossHistory history = falling(steps);
        history.evaluation(steps, 7.5);
        auto lines =
            lines_of(history.plot({.width = width, .unicode = unicode, .colour = unicode}));
        EXPECT_EQ(lines.size(), width < 26 ? 0u : 13u) << width;
        for (size_t i = 1; i < lines.size(); ++i)
          EXPECT_LT(columns(lines[i]), static_cast<size_t>(width)) << lines[i];
      }
}

TEST(LossCurve, IsLeftOutForAFewSteps) {
  EXPECT_EQ(falling(7).plot({}), "");
  EXPECT_NE(falling(8).plot({}), "");
  EXPECT_EQ(LossHistory().plot({}), "");
}

TEST(LossCurve, LosesNoStepOfALongRun) {
  LossHistory history;
  for (int64_t i = 1; i <= 1'000'000; ++i) {
    history.step(i, i <= 500'000 ? 2.0 : 4.0);
    if (i % 100 == 0) history.evaluation(i, 3.0);
  }
  auto lines = lines_of(history.plot({.width = 70, .height = 3}));
  EXPECT_EQ(lines[1], "      4 |                              ******************************");
  EXPECT_EQ(lines[2], "        |" + std::string(60, 'o'));
  EXPECT_EQ(lines[3], "      2 |******************************");
  EXPECT_EQ(lines[5], "         step 1                                               1000000");
}

TEST(LossCurve, LeavesOutWhatIsNotFinite) {
  LossHistory history = falling(20);
  history.step(21, NAN);
  history.evaluation(21, INFINITY);
  EXPECT_EQ(history.plot({}), falling(20).plot({}));
  LossHistory flat;
  for (int64_t i = 1; i <= 20; ++i) flat.step(i, 1.5);
  EXPECT_NE(flat.plot({}).find("***"), std::string::npos);
}

}  // namespace
}  // namespace fsdp::observe
