#include "report/run_page.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/format.h"
#include "base/table.h"
#include "fsdp/error.h"
#include "report/curve.h"
#include "report/json_values.h"
#include "report/profile_section.h"
#include "report/run_sections.h"

namespace fsdp::report {
namespace {

constexpr size_t kColumns = 600;      // of a curve: about as many as a chart has pixels
constexpr size_t kAllColumns = 1600;  // of all runs together, which bounds the page's size
constexpr size_t kWarmup = 3;         // steps that say little about speed

using Runs = std::vector<ReportedRun>;

double mean_of(const std::vector<double>& values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Over the steps after the first few.
double usual(const RunFiles& run, const char* key) {
  return mean_of(run.finite(key, run.steps.size() > 2 * kWarmup ? kWarmup : 0));
}

std::string shown(double value, int digits = 4) {
  return std::isfinite(value) ? formatted("{:.{}g}", value, digits) : "-";
}

// --- the overview ---

std::vector<std::pair<std::string, std::string>> figures_of(const RunFiles& run) {
  std::vector<std::pair<std::string, std::string>> figures;
  auto add = [&](const char* name, std::string value) { figures.emplace_back(name, value); };
  const std::vector<double> losses = run.finite("loss"), evaluated = run.finite("eval_loss");
  const std::vector<double> tokens = run.finite("tokens"), memory = run.finite("memory_mb");
  add("state", state_of(run));
  add("steps", with_separators(run.steps.empty() ? 0 : run.steps.back()));
  add("loss", losses.empty() ? "-" : shown(losses.front()) + " → " + shown(losses.back()));
  add("evaluation loss", evaluated.empty() ? "-" : shown(evaluated.back()));
  add("tokens", tokens.empty() ? "-" : with_separators(std::llround(tokens.back())));
  const double speed = usual(run, "tokens_per_s"), share = usual(run, "mfu");
  add("tokens/s", std::isfinite(speed) ? with_separators(std::llround(speed)) : "-");
  add("step", shown(usual(run, "step_ms"), 4) + " ms");
  if (std::isfinite(share)) add("of the peak TFLOP/s (MFU)", formatted("{:.1f} %", 100 * share));
  if (!memory.empty()) add("peak memory, rank 0", human_bytes(memory.back() * 1024 * 1024));
  if (!run.skipped.empty())
    add("skipped steps", with_separators(static_cast<int64_t>(run.skipped.size())));
  for (const Json& event : run.events) {
    if (event["event"] != "start" && event["event"] != "resume") continue;
    std::erase_if(figures,
                  [](const auto& one) { return one.first == "on" || one.first == "model"; });
    add("model", text_in(event, "model", "-"));
    add("on",
        formatted("{}, {}", count_of(static_cast<int64_t>(number_in(event, "ranks", 1)), "rank"),
                  text_in(event, "device", "?")));
  }
  return figures;
}

void add_overview(Page& page, const Runs& runs) {
  page.section("Overview");
  if (runs.size() == 1) {
    page.cards(figures_of(runs.front().files));
  } else {
    PageTable table{.columns = {"run"}, .rows = {}};
    std::vector<std::string> names;
    for (const ReportedRun& run : runs)
      for (const auto& [name, value] : figures_of(run.files))
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    for (const std::string& name : names) table.columns.emplace_back(name);
    for (const ReportedRun& run : runs) {
      std::vector<PageCell> row = {run.files.name};
      const auto figures = figures_of(run.files);
      for (const std::string& name : names) {
        const auto found = std::find_if(figures.begin(), figures.end(),
                                        [&](const auto& one) { return one.first == name; });
        row.emplace_back(found == figures.end() ? "-" : found->second);
      }
      table.rows.push_back(row);
    }
    page.table(table);
  }
  for (const ReportedRun& run : runs)
    for (const std::string& note : run.files.notes)
      page.missing(runs.size() > 1 ? formatted("{}: {}", run.files.name, note) : note);
}

// --- curves ---

size_t columns_for(size_t runs) {
  return std::max<size_t>(60, std::min(kColumns, kAllColumns / runs));
}

Json numbers(const std::vector<double>& values) {
  Json all = Json::array();
  for (double value : values) all.push_back(short_number(value));
  return all;
}

Json series_of(const Curve& curve, const std::string& name, size_t colour) {
  Json series = {{"name", name}, {"colour", colour}, {"x", curve.x}, {"y", numbers(curve.last)}};
  if (!curve.low.empty()) {
    series["low"] = numbers(curve.low);
    series["high"] = numbers(curve.high);
  }
  return series;
}

// Steps and values where a key has finite ones, as evaluations have.
Json points_of(const RunFiles& run, const char* key, const std::string& name, size_t colour,
               size_t columns) {
  std::vector<int64_t> x;
  std::vector<double> y;
  const auto found = run.values.find(key);
  for (size_t i = 0; found != run.values.end() && i < run.steps.size(); ++i) {
    if (!std::isfinite(found->second[i])) continue;
    x.push_back(run.steps[i]);
    y.push_back(found->second[i]);
  }
  if (x.empty()) return nullptr;
  Json series = series_of(downsample(x, y, columns), name, colour);
  if (x.size() <= 60) series["points"] = true;
  return series;
}

struct CurveOf {
  const char* key;
  const char* title;
  const char* unit = "";
  bool log = false, zero = false, points = false;
};

void add_curve(Page& page, const Runs& runs, const CurveOf& what) {
  Json all = Json::array(), marks = Json::array();
  const size_t columns = columns_for(runs.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    const RunFiles& run = runs[i].files;
    const std::string name = runs.size() > 1 ? run.name : what.title;
    const auto found = run.values.find(what.key);
    if (found == run.values.end() || run.finite(what.key).empty()) continue;
    all.push_back(what.points ? points_of(run, what.key, name, i, columns)
                              : series_of(downsample(run.steps, found->second, columns), name, i));
    if (what.points) continue;
    for (int64_t step : thinned(run.skipped, columns))
      marks.push_back({{"x", step}, {"text", "step skipped: not finite"}, {"colour", kRed}});
    if (std::string(what.key) != "loss" || runs.size() > 4) continue;
    if (Json points =
            points_of(run, "eval_loss", runs.size() > 1 ? name + ", evaluation" : "evaluation",
                      runs.size() + i, columns);
        points.is_object())
      all.push_back(points);
  }
  if (all.empty()) return;
  page.chart({{"type", "lines"},
              {"title", what.title},
              {"alt", formatted("{} over steps", what.title)},
              {"unit", what.unit},
              {"log", what.log},
              {"zero", what.zero},
              {"series", all},
              {"marks", marks}});
}

void add_curves(Page& page, const Runs& runs) {
  page.section("Training");
  const bool any = std::any_of(runs.begin(), runs.end(),
                               [](const ReportedRun& run) { return !run.files.steps.empty(); });
  if (!any) return page.missing("No steps were recorded.");
  page.begin_charts();
  for (const CurveOf& what : std::initializer_list<CurveOf>{
           {.key = "loss", .title = "loss", .log = true},
           {.key = "eval_loss", .title = "evaluation loss", .log = true, .points = true},
           {.key = "reward_accuracy", .title = "share of pairs that are right", .zero = true},
           {.key = "reward_chosen", .title = "reward of chosen answers"},
           {.key = "reward_rejected", .title = "reward of rejected answers"},
           {.key = "expert_load_most", .title = "largest load of an expert, mean 1", .zero = true},
           {.key = "router_entropy", .title = "entropy of routers", .zero = true},
           {.key = "grad_norm", .title = "gradient norm", .log = true},
           {.key = "lr", .title = "learning rate", .zero = true},
           {.key = "tokens_per_s", .title = "tokens/s", .zero = true},
           {.key = "step_ms", .title = "time of a step", .unit = "ms", .zero = true},
           {.key = "scale", .title = "gradient scale", .log = true}})
    add_curve(page, runs, what);
  page.end_charts();
  page.paragraph(
      "Where a run has more steps than a chart has pixels, the line is the last value of each "
      "column "
      "and the band its least and greatest. Red marks at the bottom are skipped steps.");
}

// --- the split of a step ---

void add_split(Page& page, const Runs& runs) {
  page.section("Where the time goes");
  Json steps = Json::array(), totals = Json::array();
  for (const ReportedRun& one : runs) {
    const RunFiles& run = one.files;
    const double step = usual(run, "step_ms");
    if (!std::isfinite(step)) continue;
    const double data = std::max(0.0, usual(run, "data_ms"));
    const double comm = usual(run, "comm_ms");
    const double exposed = std::isfinite(comm) ? std::max(0.0, comm) : 0;
    Json parts = Json::array();
    auto add = [&](const char* name, double ms, Colour colour) {
      if (ms > 0)
        parts.push_back({{"name", name}, {"value", short_number(ms)}, {"colour", colour}});
    };
    add("compute", step - data - exposed, kBlue);
    add("exposed communication", exposed, kRed);
    add("waiting for data", data, kOrange);
    steps.push_back({{"name", runs.size() > 1 ? run.name : "a step"}, {"parts", parts}});
    if (Json total = total_of(run); total.is_object()) totals.push_back(total);
  }
  if (steps.empty()) return page.missing("No steps were recorded.");
  page.chart(
      {{"type", "bars"},
       {"title", "A step on rank 0, on average"},
       {"alt", "A step's time by part"},
       {"unit", "ms"},
       {"share", true},
       {"rows", steps}},
      "Without the first steps. Replayed steps (CUDA graphs) don't tell communication apart: "
      "see --profile.");
  if (!totals.empty())
    page.chart({{"type", "bars"},
                {"title", "The whole run"},
                {"alt", "The run's time by part"},
                {"unit", "s"},
                {"share", true},
                {"rows", totals}});
}

void add_profiles(Page& page, const Runs& runs) {
  for (const ReportedRun& run : runs) {
    if (!run.files.profile.is_object()) continue;
    page.section(runs.size() > 1 ? formatted("Profile of {}", run.files.name) : "Profile");
    add_profile(page, run.files.profile);
  }
}

}  // namespace

Page run_page(const Runs& runs) {
  if (runs.empty()) throw Error("there is no run to report.", "pass the directory of a run.");
  std::string title = runs.front().files.name;
  if (runs.size() > 1)
    title = formatted("{} and {}", title, count_of(runs.size() - 1, "other run"));
  Page page(title, "A report of fsdp.cpp");
  add_overview(page, runs);
  add_curves(page, runs);
  add_split(page, runs);
  add_profiles(page, runs);
  add_memory_of(page, runs);
  add_ranks(page, runs);
  add_checkpoints(page, runs);
  add_events(page, runs);
  add_config(page, runs);
  return page;
}

}  // namespace fsdp::report
