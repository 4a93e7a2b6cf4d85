// The screen of a run: the live line at every width, the loss history, plain lines, the summary.
#include "observe/progress.h"

#include <gtest/gtest.h>

#include <cmath>
#include <regex>
#include <sstream>

#include "observe/summary.h"
#include "observe/throughput.h"

namespace fsdp::observe {
namespace {

using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return AssertionSuccess();
  return AssertionFailure() << "\"" << part << "\" is not in: " << text;
}

StepRecord shown_step(int64_t step) {
  StepRecord record;
  record.step = step;
  record.loss = 2.34567;
  record.grad_norm = 1.2345;
  record.lr = 3e-4;
  record.tokens_per_s = 12345;
  record.tflops = 401.5;
  record.mfu = 0.406;
  record.memory_mb = 3174.4;
  record.step_ms = 100;
  return record;
}

// A terminal: applies \r, \n and "clear to the end of the line" to lines of a screen.
std::vector<std::string> screen(const std::string& bytes) {
  std::vector<std::string> lines = {""};
  size_t column = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == '\r') {
      column = 0;
    } else if (bytes[i] == '\n') {
      lines.emplace_back();
      column = 0;
    } else if (bytes.compare(i, 3, "\x1b[K") == 0) {
      lines.back().resize(column);
      i += 2;
    } else if (bytes[i] == '\x1b') {
      i = bytes.find('m', i);  // a colour
    } else {
      if (lines.back().size() <= column) lines.back().resize(column + 1, ' ');
      lines.back()[column++] = bytes[i];
    }
  }
  return lines;
}

// Without the rows of the loss history.
std::vector<std::string> without_history(std::vector<std::string> lines) {
  std::erase_if(lines, [](const std::string& line) { return line.ends_with("#"); });
  return lines;
}

TEST(LiveLine, ShowsEverythingWhereThereIsRoom) {
  ProgressOptions options{.steps = 300, .width = 160};
  EXPECT_EQ(live_line(shown_step(120), options, 18.0),
            "step 120/300  [============>                 ]  loss 2.3457  norm 1.23  lr 3.00e-04  "
            "12.3k tok/s  402 TFLOP/s  MFU 40.6%  3.1 GiB  ETA 18 s");
}

TEST(LiveLine, FitsEveryWidthAndKeepsWhatMattersMost) {
  size_t before = 0;
  for (int width = 2; width <= 200; ++width) {
    ProgressOptions options{.steps = 300, .width = width};
    std::string line = live_line(shown_step(7), options, 3725.0);
    EXPECT_LE(line.size(), static_cast<size_t>(std::max(width - 3, 1)))
        << "no room for ^C: " << line;
    EXPECT_GE(line.size() + 34, before) << line;  // a wider terminal shows no less
    before = line.size();
    EXPECT_TRUE(width <= 32 || has(line, "loss 2.3457")) << width << ": " << line;
    EXPECT_TRUE(width <= 52 || has(line, "ETA 1 h 02 min")) << width << ": " << line;
    EXPECT_TRUE(width <= 64 || has(line, "tok/s")) << width << ": " << line;
    EXPECT_TRUE(width <= 82 || has(line, "[")) << width << ": " << line;
    EXPECT_EQ(line.substr(0, 4), std::string("step").substr(0, std::clamp(width - 3, 1, 4)));
  }
}

TEST(LiveLine, ColoursTakeNoRoom) {
  for (int width : {40, 60, 100, 160}) {
    ProgressOptions plain{.steps = 300, .width = width}, coloured = plain;
    coloured.colour = true;
    std::string line = live_line(shown_step(7), coloured, 5.0);
    EXPECT_NE(line.find("\x1b["), std::string::npos);
    std::string bare = std::regex_replace(line, std::regex("\x1b\\[[0-9;]*m"), "");
    EXPECT_EQ(bare, live_line(shown_step(7), plain, 5.0));
  }
}

TEST(LiveLine, ARunOfUnknownLengthHasNoBarAndNoEnd) {
  std::string line = live_line(shown_step(7), {.width = 160}, {});
  EXPECT_EQ(line.find('['), std::string::npos);
  EXPECT_TRUE(has(line, "step 7  loss"));
  EXPECT_EQ(line.find("ETA"), std::string::npos);
}

TEST(Progress, IsOneLineOnATerminalWithTheRestAboveIt) {
  std::ostringstream out;
  {
    Progress progress(out, {.steps = 30, .width = 100, .colour = true});
    progress.line("begin");
    for (int64_t step = 1; step <= 20; ++step) progress.step(shown_step(step));
    progress.line("a warning\nof two lines");
    for (int64_t step = 21; step <= 30; ++step) progress.step(shown_step(step));
  }
  auto lines = without_history(screen(out.str()));
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_EQ(lines[0], "begin");
  EXPECT_EQ(lines[1], "a warning");
  EXPECT_EQ(lines[2], "of two lines");
  EXPECT_TRUE(has(lines[3], "step 30/30"));
  EXPECT_EQ(lines[4], "");
}

TEST(Progress, KeepsALossHistoryAboveTheLiveLine) {
  std::ostringstream out;
  {
    Progress progress(out, {.steps = 50, .width = 80});
    for (int64_t step = 1; step <= 50; ++step) {
      StepRecord one = shown_step(step);
      one.loss = step == 1 ? 4.0 : step == 7 ? NAN : 2.0;
      progress.step(one);
      if (step == 20) progress.evaluation(20, 1.0, std::exp(1.0));
    }
  }
  auto lines = screen(out.str());
  ASSERT_EQ(lines.size(),
            14u);  // the first step, ten tenths, an evaluation, the live line, the end
  EXPECT_EQ(lines[0], "step  1/50  loss 4.0000  " + std::string(48, '#'));
  EXPECT_EQ(lines[1], "step  5/50  loss 2.0000  " + std::string(24, '#'));
  EXPECT_EQ(lines[2], "step 10/50  loss 2.0000  " + std::string(24, '#')) << "NaN isn't a loss";
  EXPECT_EQ(lines[5], "eval 20/50  loss 1.0000  " + std::string(12, '#'));
  EXPECT_EQ(lines[11], "step 50/50  loss 2.0000  " + std::string(24, '#'));
  EXPECT_TRUE(has(lines[12], "step 50/50  ["));
}

TEST(Progress, HistoryFitsEveryWidth) {
  for (int width = 2; width <= 100; ++width) {
    std::ostringstream out;
    Progress progress(out, {.steps = 10, .width = width, .colour = true});
    for (int64_t step = 1; step <= 10; ++step) progress.step(shown_step(step));
    progress.evaluation(10, 123.0, 1e30);
    for (const auto& line : screen(out.str())) EXPECT_LT(line.size(), static_cast<size_t>(width));
  }
}

TEST(Progress, ALongRunHasARowEveryFiveMinutes) {
  std::ostringstream out;
  Progress progress(out, {.steps = 1'000'000, .width = 80});
  for (int64_t step = 1; step <= 100; ++step) {
    StepRecord slow = shown_step(step);
    slow.step_ms = 10'000;
    progress.step(slow);
  }
  EXPECT_EQ(screen(out.str()).size(), 1u + 3 + 1);
}

TEST(Progress, AShorterLineLeavesNothingOfALongerOne) {
  std::ostringstream out;
  Progress progress(out, {.steps = 30, .width = 160});
  progress.step(shown_step(1));
  StepRecord brief = shown_step(2);
  brief.mfu.reset(), brief.tflops = 0;
  progress.step(brief);
  auto lines = screen(out.str());
  EXPECT_EQ(lines.back(), live_line(brief, {.steps = 30, .width = 160}, 2.8));
}

TEST(Progress, FastStepsAreNotAllDrawnButTheLastIs) {
  std::ostringstream out;
  Progress progress(out, {.steps = 1000, .width = 100});
  for (int64_t step = 1; step <= 1000; ++step) {
    StepRecord fast = shown_step(step);
    fast.step_ms = 1;
    progress.step(fast);
  }
  std::string text = out.str();
  auto drawn = std::count(text.begin(), text.end(), '\r');
  EXPECT_GE(drawn, 15);
  EXPECT_LE(drawn, 25 + 2 * 11);  // and around each row of the history
  EXPECT_TRUE(has(screen(text).back(), "step 1000/1000"));
}

TEST(Progress, IsALineEverySoManyStepsElsewhere) {
  std::ostringstream out;
  {
    Progress progress(out, {.steps = 25, .every = 10});
    for (int64_t step = 1; step <= 25; ++step) {
      StepRecord one = shown_step(step);
      one.skipped = step == 13;
      progress.step(one);
    }
  }
  std::istringstream in(out.str());
  std::vector<std::string> shown;
  size_t loss_at = 0;
  for (std::string line; std::getline(in, line);) {
    EXPECT_EQ(line.find_first_of("\r\x1b"), std::string::npos);
    shown.push_back(line.substr(5, 5));
    if (loss_at == 0) loss_at = line.find("loss");
    EXPECT_EQ(line.find("loss"), loss_at) << "lines are aligned";
  }
  EXPECT_EQ(shown, (std::vector<std::string>{" 1/25", "10/25", "13/25", "20/25", "25/25"}));
}

TEST(Progress, WithoutATerminalPrintsAfterTheFirstStepAndAtLeastEvery15Seconds) {
  for (double step_s : {0.4, 4.0, 9.0, 40.0}) {
    double now = 1000;
    std::ostringstream out;
    Progress progress(out, {.steps = 10'000, .every = 1000, .clock = [&] { return now; }});
    std::vector<double> printed;
    size_t before = 0;
    for (int64_t step = 1; now < 1200; ++step) {
      now += step_s;
      StepRecord one = shown_step(step);
      one.step_ms = 1000 * step_s;
      progress.step(one);
      if (out.str().size() > before) printed.push_back(now);
      before = out.str().size();
    }
    ASSERT_GE(printed.size(), 5u);
    EXPECT_EQ(printed[0], 1000 + step_s);
    for (size_t i = 1; i < printed.size(); ++i) {
      EXPECT_LE(printed[i] - printed[i - 1], std::max(15.0, step_s) + 1e-6) << step_s;
      EXPECT_GE(printed[i] - printed[i - 1], std::min(15 - 2 * step_s, step_s)) << step_s;
    }
  }
}

TEST(Progress, TellsOfAnEvaluationInALineOfItsOwn) {
  std::ostringstream out;
  {
    Progress progress(out, {.steps = 30});
    progress.step(shown_step(10));
    progress.evaluation(10, 2.5, std::exp(2.5));
  }
  EXPECT_TRUE(has(out.str(), "\nevaluation after step 10: loss 2.5000, perplexity 12.18\n"));
}

TEST(Progress, TimeLeftForgetsTheFirstStep) {
  std::ostringstream out;
  Progress progress(out, {.steps = 102, .width = 100});
  StepRecord slow = shown_step(1);
  slow.step_ms = 60'000;
  progress.step(slow);
  EXPECT_EQ(out.str().find("ETA"), std::string::npos);
  progress.step(shown_step(2));
  EXPECT_TRUE(has(screen(out.str()).back(), "ETA 10 s"));
}

TEST(HumanNumbers, AreShort) {
  auto check = [](double number, const char* text) { EXPECT_EQ(human_count(number), text); };
  check(0, "0");
  check(7, "7");
  check(999.4, "999");
  check(999.6, "1.00k");
  check(1234, "1.23k");
  check(12345, "12.3k");
  check(123456, "123k");
  check(999600, "1.00M");
  check(3.21e9, "3.21B");
  check(1.5e13, "15.0T");
  check(5e15, "5000T");
  check(std::nan(""), "?");
  auto seconds = [](double number, const char* text) { EXPECT_EQ(human_seconds(number), text); };
  seconds(0, "0.0 s");
  seconds(1.26, "1.3 s");
  seconds(42.4, "42 s");
  seconds(59.6, "1 min 00 s");
  seconds(185, "3 min 05 s");
  seconds(3600 + 3 * 60 + 59, "1 h 03 min");
  seconds(50 * 3600, "2 d 02 h");
  seconds(INFINITY, "?");
}

TEST(Peaks, AreKnownByTheDriversNames) {
  auto check = [](const char* name, double bf16, double fp32) {
    EXPECT_EQ(peak_tflops(name, "bf16"), bf16) << name;
    EXPECT_EQ(peak_tflops(name, "fp16"), bf16) << name;
    EXPECT_EQ(peak_tflops(name, "fp32"), fp32) << name;
    EXPECT_GT(peak_tflops(name, "tf32"), fp32 - 0.1) << name;
  };
  check("NVIDIA H200", 989.5, 67);
  check("NVIDIA H200 NVL", 835.5, 60);
  check("NVIDIA GH200 480GB", 989.5, 67);
  check("NVIDIA H100 80GB HBM3", 989.5, 67);
  check("NVIDIA H100 PCIe", 756.5, 51);
  check("NVIDIA H100 NVL", 835.5, 60);
  check("NVIDIA A100-SXM4-80GB", 312, 19.5);
  check("NVIDIA A100 80GB PCIe", 312, 19.5);
  check("NVIDIA B200", 2250, 75);
  check("NVIDIA GB200", 2500, 80);
  check("NVIDIA L40S", 362, 91.6);
  check("NVIDIA GeForce RTX 4090", 165.2, 82.6);
  for (const char* name : {"", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
                           "Tesla V100", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"})
    EXPECT_EQ(peak_tflops(name, "bf16"), std::nullopt) << name;
  EXPECT_EQ(peak_tflops("NVIDIA H200", "int8"), std::nullopt);
  EXPECT_DOUBLE_EQ(*mfu(400, 800), 0.5);
  EXPECT_EQ(mfu(400, 0), std::nullopt);
  EXPECT_EQ(mfu(400, {}), std::nullopt);
}

// --- summary ---

int tenths_of(const std::string& text) {
  int sum = 0;
  std::regex share("(\\d+)\\.(\\d) %\\n");
  for (std::sregex_iterator one(text.begin(), text.end(), share), end; one != end; ++one)
    sum += 10 * std::stoi((*one)[1]) + std::stoi((*one)[2]);
  return sum;
}

TEST(Summary, SharesOfTimeAddUpToAHundred) {
  RunSummary run{.total_s = 100, .data_s = 1, .comm_s = 10, .compute_s = 60, .checkpoint_s = 4};
  std::string text = describe(run);
  EXPECT_TRUE(has(text, "compute                     60.0 s   60.0 %\n"));
  EXPECT_TRUE(has(text, "exposed communication       10.0 s   10.0 %\n"));
  EXPECT_TRUE(has(text, "other                       25.0 s   25.0 %\n"));
  EXPECT_EQ(tenths_of(text), 1000);
  for (double odd = 0.1; odd < 40; odd *= 1.7) {
    RunSummary any{.total_s = 33.3,
                   .data_s = odd,
                   .comm_s = 1 / 3.0,
                   .compute_s = odd * odd,
                   .checkpoint_s = 0.7,
                   .evaluation_s = 1e-4};
    EXPECT_EQ(tenths_of(describe(any)), 1000) << describe(any);
  }
}

TEST(Summary, PartsThatAreMoreThanTheWholeLeaveNoOther) {
  RunSummary run{.total_s = 9.9, .compute_s = 10};
  EXPECT_TRUE(has(describe(run), "other                        0.0 s    0.0 %\n"));
  EXPECT_EQ(tenths_of(describe(RunSummary{})), 0);
}

TEST(Summary, SaysWhatCameOut) {
  RunSummary run{.total_s = 100, .compute_s = 80, .steps = 1200, .skipped = 3};
  run.tokens = 1'000'000;
  run.peak_memory_mb = 2048;
  run.first_loss = 5.5;
  run.last_loss = 1.25;
  run.eval_loss = 1.5;
  run.tflops = 401.5;
  run.mfu = 0.406;
  std::string text = describe(run);
  EXPECT_TRUE(has(text, "1,200, 3 of them skipped"));
  EXPECT_TRUE(has(text, "1,000,000, 12.5k tokens/s while training"));
  EXPECT_TRUE(has(text, "2 GiB"));
  EXPECT_TRUE(has(text, "5.5000 -> 1.2500"));
  EXPECT_TRUE(has(text, "loss 1.5000, perplexity 4.482"));
  EXPECT_TRUE(has(text, "402 TFLOP/s, 40.6 % of the device's peak"));
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_NE(describe(run, true).find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace fsdp::observe
