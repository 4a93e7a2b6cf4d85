// The page of a run: bounded in size, complete, and safe with hostile names everywhere.
#include "report/run_page.h"

#include <gtest/gtest.h>

#include <cmath>

#include "fsdp/error.h"
#include "observe/folder.h"

namespace fsdp::report {
namespace {

using RunPages = observe::InFolder;

const std::string kEvil = "</script><b onmouseover=alert(1)>&\"'";

ReportedRun made_run(const std::string& name, int64_t steps) {
  ReportedRun run;
  run.files.root = name;
  run.files.name = name;
  for (int64_t step = 1; step <= steps; ++step) {
    const double t = static_cast<double>(step);
    run.files.steps.push_back(step);
    run.files.values["loss"].push_back(10 / std::sqrt(t) + std::sin(t) / 7);
    run.files.values["grad_norm"].push_back(1 + std::cos(t) / 3);
    run.files.values["lr"].push_back(3e-4 * std::exp(-t / 1e5));
    run.files.values["tokens_per_s"].push_back(123456.789 + t);
    run.files.values["step_ms"].push_back(12.3456 + std::sin(t));
    run.files.values["data_ms"].push_back(0.123);
    run.files.values["comm_ms"].push_back(1.5);
    run.files.values["eval_loss"].push_back(step % 100 == 0 ? 2.0 : std::nan(""));
    run.files.values["memory_mb"].push_back(1000);
    run.files.values["tokens"].push_back(4096 * t);
    if (step % 50 == 0) run.files.skipped.push_back(step);
  }
  for (int key = 0; key < 120; ++key)
    run.files.config.emplace_back("section.key" + std::to_string(key), "value");
  return run;
}

TEST(RunPage, AHundredThousandStepsAreLessThanAMegabyte) {
  const ReportedRun run = made_run("long", 100'000);
  const std::string one = run_page({run}).html();
  EXPECT_LT(one.size(), 1'000'000u);
  EXPECT_GT(one.size(), 50'000u) << "the curves are there";
  EXPECT_LT(run_page({run, run, run, run}).html().size(), 1'000'000u);
}

TEST(RunPage, HasEverySectionEvenOfAnEmptyRun) {
  const std::string html = run_page({ReportedRun{.files = {.root = "r", .name = "r"}}}).html();
  for (const char* section : {"Overview", "Training", "Where the time goes", "Memory", "Ranks",
                              "Checkpoints", "Warnings, skips and restarts", "Config"})
    EXPECT_NE(html.find(std::string("<h2>") + section), std::string::npos) << section;
  EXPECT_NE(html.find("No steps were recorded."), std::string::npos);
  EXPECT_NE(html.find("There is no config.toml."), std::string::npos);
}

TEST(RunPage, ShowsWhatDiffersBetweenConfigs) {
  ReportedRun a = made_run("a", 5), b = made_run("b", 5);
  b.files.config[7].second = "another value";
  const std::string html = run_page({a, b}).html();
  EXPECT_NE(html.find("<tr class=\"differs\"><td class=\"code\">section.key7"), std::string::npos);
  EXPECT_EQ(html.find("<tr class=\"differs\"><td class=\"code\">section.key8"), std::string::npos);
  EXPECT_NE(run_page({a, a}).html().find("The runs have the same config."), std::string::npos);
}

TEST(RunPage, TextFromARunIsNeverMarkup) {
  ReportedRun run = made_run(kEvil, 20);
  run.files.config = {{kEvil, kEvil}};
  run.files.notes = {kEvil};
  run.files.checkpoints = {{.step = 1, .name = kEvil, .complete = true, .holds = kEvil}};
  for (const char* kind : {"start", "warning", "skip", "checkpoint", "error", "end", "stop"})
    run.files.events.push_back({{"event", kind},
                                {"step", kEvil},
                                {"text", kEvil},
                                {"name", kEvil},
                                {"hint", kEvil},
                                {"model", kEvil},
                                {"device", kEvil}});
  run.files.events.push_back({{"event", kEvil}, {"text", kEvil}});
  run.files.events.push_back(
      {{"event", "ranks"}, {"ranks", {{{"rank", kEvil}, {"host", kEvil}, {"step_ms", 1}}, 7}}});
  run.files.profile = {
      {"families", {{{"name", kEvil}, {"ms", 1}}}},
      {"units", {{{"name", kEvil}}}},
      {"kernels", {{{"name", kEvil}, {"family", kEvil}}}},
      {"advice", {kEvil}},
      {"timeline",
       {{"end", 1},
        {"lanes", {{{"name", kEvil}, {"bars", {{{"name", kEvil}, {"kind", kEvil}}}}}}}}}};
  run.memory = {{kEvil, 1, 2}};
  for (const std::string& html : {run_page({run}).html(), run_page({run, run}).html()}) {
    EXPECT_EQ(html.find("<b onmouseover"), std::string::npos);
    EXPECT_NE(html.find("&lt;b onmouseover"), std::string::npos);
  }
}

TEST(RunPage, ValuesOfAnotherTypeBreakNothing) {
  ReportedRun run = made_run("odd", 3);
  const Json odd[] = {nullptr, 1, "x", Json::array(), Json::object()};
  for (const Json& value : odd) {
    for (const char* kind : {"start", "resume", "warning", "checkpoint", "memory", "ranks", "end"})
      run.files.events.push_back({{"event", kind},
                                  {"step", value},
                                  {"time", value},
                                  {"ranks", value},
                                  {"seconds", value},
                                  {"waited_ms", value},
                                  {"stopped", value},
                                  {"model", value},
                                  {"device", value}});
    run.files.profile = {{"families", value},
                         {"units", value},
                         {"timeline", value},
                         {"traced_ms", value},
                         {"graphed", value}};
    EXPECT_GT(run_page({run}).html().size(), 1000u);
  }
}

TEST(RunPage, NoRunIsAnError) {
  EXPECT_THROW(run_page({}), Error);
}

}  // namespace
}  // namespace fsdp::report
