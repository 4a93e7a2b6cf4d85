#include "report/run_sections.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <set>

#include "base/format.h"
#include "base/table.h"
#include "report/json_values.h"

namespace fsdp::report {
namespace {

constexpr size_t kMostRows = 300;  // of events and ranks, which may be many
constexpr size_t kRanksDrawn = 32;

using Runs = std::vector<ReportedRun>;

std::string when(const Json& event) {
  const double seconds = number_in(event, "time");
  if (!(seconds > 0 && seconds < 1e11)) return "";
  const auto time = static_cast<std::time_t>(seconds);
  std::tm local{};
  char text[32];
  if (!::localtime_r(&time, &local) ||
      std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &local) == 0)
    return "";
  return text;
}

std::string fixed(double value, int digits) {
  return std::isfinite(value) ? formatted("{:.{}f}", value, digits) : "-";
}

void name_run(Page& page, const Runs& runs, const ReportedRun& run) {
  if (runs.size() > 1) page.heading(run.files.name);
}

}  // namespace

// --- the end of a run ---

std::string state_of(const RunFiles& run) {
  const Json* last = nullptr;
  for (const Json& event : run.events) last = &event;
  if (last) {
    const std::string kind = (*last)["event"];
    if (kind == "end") return flag_in(*last, "stopped") ? "stopped on request" : "finished";
    if (kind == "out_of_memory") return "out of memory";
    if (kind == "error") return "ended by an error";
  }
  const std::string steps = run.setting("train.steps");
  const int64_t done = run.steps.empty() ? 0 : run.steps.back();
  if (!steps.empty() && std::to_string(done) == steps) return "finished";
  return run.events.empty() ? "not complete" : "running, or killed";
}

Json total_of(const RunFiles& run) {
  const Json* end = run.last_event("end");
  if (!end || !end->contains("seconds") || !(*end)["seconds"].is_object()) return nullptr;
  const std::map<std::string, Colour> colours = {
      {"compute", kBlue},       {"exposed communication", kRed}, {"data", kOrange},
      {"checkpoints", kPurple}, {"evaluation", kTeal},           {"other", kGrey}};
  Json parts = Json::array();
  for (const auto& [name, seconds] : (*end)["seconds"].items()) {
    const auto colour = colours.find(name);
    if (!seconds.is_number() || seconds.get<double>() <= 0) continue;
    parts.push_back({{"name", name},
                     {"value", short_number(seconds.get<double>())},
                     {"colour", colour == colours.end() ? kBrown : colour->second}});
  }
  return Json{{"name", run.name}, {"parts", parts}};
}

// --- memory and ranks ---

void add_memory_of(Page& page, const Runs& runs) {
  page.section("Memory");
  for (const ReportedRun& run : runs) {
    name_run(page, runs, run);
    if (run.memory.empty()) {
      page.missing(run.no_memory.empty() ? "Memory by kind wasn't recorded." : run.no_memory);
      continue;
    }
    const Json* event = run.files.last_event("memory");
    const double limit = event ? number_in(*event, "capacity") : 0;
    add_memory(page, run.memory, limit > 0 ? static_cast<int64_t>(limit) : 0);
  }
  page.paragraph(
      "Measured in the third step of the run. Without a GPU there is no allocator that counts, so "
      "temporaries and the peak are only planned. docs/memory.md explains each kind.");
}

namespace {

void add_ranks_of(Page& page, const Json& ranks) {
  PageTable table{.columns = {"rank",
                              "host",
                              {"step ms", "number"},
                              {"compute ms", "number"},
                              {"exposed communication ms", "number"},
                              {"data ms", "number"},
                              {"peak memory", "number"}},
                  .rows = {}};
  Json rows = Json::array();
  for (const Json& rank : ranks) {
    if (!rank.is_object() || table.rows.size() == kMostRows) continue;
    const double step = number_in(rank, "step_ms"), comm = number_in(rank, "comm_ms");
    const double data = number_in(rank, "data_ms"), memory = number_in(rank, "memory_mb");
    const double exposed = std::isfinite(comm) ? comm : 0;
    const double compute = step - exposed - (std::isfinite(data) ? data : 0);
    const std::string name = "rank " + text_in(rank, "rank");
    table.rows.push_back({name, text_in(rank, "host"), fixed(step, 2), fixed(compute, 2),
                          fixed(comm, 2), fixed(data, 2),
                          std::isfinite(memory) ? human_bytes(memory * 1024 * 1024) : "-"});
    if (rows.size() == kRanksDrawn || !std::isfinite(step)) continue;
    Json parts = Json::array();
    auto add = [&](const char* part, double ms, Colour colour) {
      if (ms > 0)
        parts.push_back({{"name", part}, {"value", short_number(ms)}, {"colour", colour}});
    };
    add("compute", compute, kBlue);
    add("exposed communication", exposed, kRed);
    add("waiting for data", data, kOrange);
    rows.push_back({{"name", name}, {"parts", parts}});
  }
  page.chart({{"type", "bars"},
              {"title", "A step of each rank, on average"},
              {"alt", "A step's time by rank and part; the table below has the numbers."},
              {"unit", "ms"},
              {"share", true},
              {"rows", rows}},
             "The slowest rank has the least exposed communication: the others wait for it.");
  page.table(table);
}

}  // namespace

void add_ranks(Page& page, const Runs& runs) {
  page.section("Ranks");
  for (const ReportedRun& run : runs) {
    name_run(page, runs, run);
    const Json* event = run.files.last_event("ranks");
    if (event && !array_in(*event, "ranks").empty())
      add_ranks_of(page, array_in(*event, "ranks"));
    else
      page.missing(
          "Figures of each rank weren't recorded: they are at the first checkpoint, the "
          "first evaluation or the end of a run.");
  }
}

// --- checkpoints ---

void add_checkpoints(Page& page, const Runs& runs) {
  page.section("Checkpoints");
  for (const ReportedRun& run : runs) {
    name_run(page, runs, run);
    std::map<int64_t, const Json*> saved;
    for (const Json& event : run.files.events)
      if (event["event"] == "checkpoint" && event.contains("step") &&
          event["step"].is_number_integer())
        saved[event["step"].get<int64_t>()] = &event;
    PageTable table{.columns = {"checkpoint",
                                "saved",
                                {"training waited", "number"},
                                {"size", "number"},
                                "state",
                                "holds"},
                    .rows = {}};
    std::set<int64_t> listed;
    auto waited = [](const Json* event) {
      const double ms = event ? number_in(*event, "waited_ms") : std::nan("");
      return std::isfinite(ms) ? formatted("{:.{}f} ms", ms, ms < 10 ? 1 : 0) : std::string("-");
    };
    for (const CheckpointFiles& one : run.files.checkpoints) {
      const auto event = saved.find(one.step);
      const Json* line = event == saved.end() ? nullptr : event->second;
      table.rows.push_back(
          {one.name, line ? when(*line) : "", waited(line),
           human_bytes(static_cast<double>(one.bytes)),
           one.complete ? PageCell("complete", "good") : PageCell("not complete", "bad"),
           one.holds});
      listed.insert(one.step);
    }
    for (const auto& [step, event] : saved)
      if (!listed.count(step) && table.rows.size() < kMostRows)
        table.rows.push_back({formatted("step-{}", step), when(*event), waited(event), "-",
                              PageCell("removed since", "faint"), ""});
    if (table.rows.empty())
      page.missing("There are no checkpoints: see checkpoint.every and checkpoint.at_end.");
    else
      page.table(table);
  }
}

// --- warnings, skips, restarts ---

namespace {

// What an event's line says; "": it is shown elsewhere.
std::string said(const Json& event) {
  const std::string kind = event["event"];
  const std::string hint = text_in(event, "hint");
  const std::string text = text_in(event, "text");
  if (kind == "warning")
    return formatted("{}: {}{}", text_in(event, "name"), text,
                     hint.empty() ? "" : formatted(" What to do: {}", hint));
  if (kind == "skip" || kind == "stop" || kind == "error" || kind == "out_of_memory") return text;
  if (kind == "start") return formatted("started: {}", text_in(event, "model"));
  if (kind == "resume")
    return formatted("restarted from the checkpoint of step {} on {}", text_in(event, "step"),
                     count_of(static_cast<int64_t>(number_in(event, "ranks", 1)), "rank"));
  if (kind == "end") return flag_in(event, "stopped") ? "stopped on request" : "finished";
  return "";
}

const char* style_of(const std::string& kind) {
  if (kind == "warning" || kind == "skip") return "warm";
  return kind == "error" || kind == "out_of_memory" ? "bad" : "";
}

}  // namespace

void add_events(Page& page, const Runs& runs) {
  page.section("Warnings, skips and restarts");
  for (const ReportedRun& run : runs) {
    name_run(page, runs, run);
    PageTable table{.columns = {{"when", "short"}, {"step", "number"}, "event", "what"},
                    .rows = {}};
    size_t more = 0;
    for (const Json& event : run.files.events) {
      const std::string what = said(event), kind = event["event"];
      if (what.empty()) continue;
      if (table.rows.size() == kMostRows) {
        ++more;
        continue;
      }
      table.rows.push_back({when(event), text_in(event, "step"), {kind, style_of(kind)}, what});
    }
    if (table.rows.empty() && run.files.skipped.empty()) {
      page.missing("None were recorded.");
      continue;
    }
    if (!table.rows.empty()) page.table(table);
    if (more > 0) page.paragraph(formatted("And {} more.", with_separators(more)));
    if (!run.files.skipped.empty() && run.files.events.empty())
      page.paragraph(formatted("{} skipped because the loss or a gradient wasn't finite.",
                               count_of(static_cast<int64_t>(run.files.skipped.size()), "step")));
  }
}

// --- config ---

void add_config(Page& page, const Runs& runs) {
  page.section(runs.size() > 1 ? "Config, and what differs" : "Config");
  std::vector<std::string> keys;
  std::set<std::string> known;
  for (const ReportedRun& run : runs)
    for (const auto& [key, value] : run.files.config)
      if (known.insert(key).second) keys.push_back(key);
  if (keys.empty()) return page.missing("There is no config.toml.");
  PageTable all{.columns = {{"key", "code"}}, .rows = {}};
  for (const ReportedRun& run : runs)
    all.columns.push_back({runs.size() > 1 ? run.files.name : "value", "code"});
  PageTable differing{.columns = all.columns, .rows = {}};
  for (const std::string& key : keys) {
    std::vector<PageCell> row = {key};
    std::set<std::string> values;
    for (const ReportedRun& run : runs) {
      values.insert(run.files.setting(key));
      row.emplace_back(run.files.setting(key));
    }
    if (values.size() > 1) {
      differing.rows.push_back(row);
      all.marked.push_back(all.rows.size());
    }
    all.rows.push_back(row);
  }
  if (runs.size() > 1 && differing.rows.empty())
    page.paragraph("The runs have the same config.");
  else if (runs.size() > 1)
    page.table(differing);
  page.begin_details(formatted("The whole config ({})", count_of(all.rows.size(), "key")));
  page.table(all);
  page.end_details();
}

}  // namespace fsdp::report
