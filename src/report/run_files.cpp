#include "report/run_files.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/format.h"
#include "base/regular_file.h"
#include "base/shallow_json.h"
#include "base/table.h"
#include "fsdp/error.h"

namespace fsdp::report {

namespace fs = std::filesystem;

namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kMostKeys = 200;  // of metrics; fsdp writes about 20
constexpr int64_t kLargestFile = int64_t{64} << 20;  // config.toml and profile.json, in bytes

double value_of(const Json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  return kNone;
}

// Calls `take` with each object of a file of JSON lines. Returns how many lines aren't objects; a
// last line without its newline, which a killed run leaves, isn't counted.
template <typename Take>
int64_t read_lines(const fs::path& file, Take take) {
  const RegularFile in(file);
  LineReader lines(in.or_throw());
  int64_t bad = 0;
  for (std::string line; lines.next(line);) {
    Json object = parse_shallow<Json>(line);
    if (object.is_object())
      take(object);
    else if (lines.complete())
      ++bad;
  }
  return bad;
}

void note_bad_lines(RunFiles& run, const char* file, int64_t bad) {
  if (bad > 0)
    run.notes.push_back(formatted("{} of {} can't be read and {} left out.", count_of(bad, "line"),
                                  file, bad == 1 ? "is" : "are"));
}

void read_metrics(RunFiles& run) {
  const fs::path file = run.root / "metrics.jsonl";
  if (!fs::exists(file)) {
    run.notes.push_back("There is no metrics.jsonl: the run hasn't begun its first step.");
    return;
  }
  bool too_many = false;
  int64_t bad = read_lines(file, [&](const Json& line) {
    const auto step = line.find("step");
    if (step == line.end() || !step->is_number_integer()) return;
    const int64_t number = step->get<int64_t>();
    if (!run.steps.empty() && number <= run.steps.back()) return;  // curves need ascending steps
    run.steps.push_back(number);
    for (const auto& [key, value] : line.items()) {
      if (key == "step" || key == "skipped") continue;
      // Each key has a value for every step.
      if (run.values.size() >= kMostKeys && !run.values.contains(key)) {
        too_many = true;
        continue;
      }
      std::vector<double>& all = run.values[key];
      all.resize(run.steps.size() - 1, kNone);
      all.push_back(value_of(value));
    }
    const auto skipped = line.find("skipped");
    if (skipped != line.end() && *skipped == true) run.skipped.push_back(number);
  });
  for (auto& [key, all] : run.values) all.resize(run.steps.size(), kNone);
  note_bad_lines(run, "metrics.jsonl", bad);
  if (too_many)
    run.notes.push_back(formatted("metrics.jsonl has more than {} keys; the others are left out.",
                                  kMostKeys));
  if (run.steps.empty()) run.notes.push_back("metrics.jsonl has no steps yet.");
}

void read_events(RunFiles& run) {
  const fs::path file = run.root / "events.jsonl";
  if (!fs::exists(file)) {
    run.notes.push_back(
        "There is no events.jsonl: an earlier version of fsdp wrote this run, so warnings, "
        "restarts, "
        "memory and ranks aren't known.");
    return;
  }
  note_bad_lines(run, "events.jsonl", read_lines(file, [&](const Json& line) {
                   if (line.contains("event") && line["event"].is_string())
                     run.events.push_back(line);
                 }));
}

void read_config(RunFiles& run) {
  const fs::path file = run.root / "config.toml";
  if (!fs::exists(file)) {
    run.notes.push_back("There is no config.toml.");
    return;
  }
  run.config = read_settings(read_file(file, kLargestFile));
}

void read_profile(RunFiles& run) {
  const fs::path file = run.root / "profile.json";
  if (!fs::exists(file)) return;
  run.profile = parse_shallow<Json>(read_file(file, kLargestFile));
  if (run.profile.is_object()) return;
  run.profile = nullptr;
  run.notes.push_back("profile.json is damaged; run again with --profile.");
}

void read_checkpoints(RunFiles& run) {
  constexpr std::string_view kPrefix = "step-";
  std::error_code problem;
  for (const auto& entry : fs::directory_iterator(run.root / "checkpoints", problem)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix) || entry.is_symlink(problem) || !entry.is_directory(problem))
      continue;
    CheckpointFiles one{.name = name, .holds = ""};
    const char* end = name.data() + name.size();
    const auto [rest, wrong] = std::from_chars(name.data() + kPrefix.size(), end, one.step);
    if (wrong != std::errc() || rest != end) continue;
    one.complete = fs::exists(entry.path() / ".metadata", problem);
    for (const auto& file : fs::recursive_directory_iterator(entry.path(), problem)) {
      if (!file.is_regular_file(problem)) continue;
      one.bytes += static_cast<int64_t>(file.file_size(problem));
      ++one.files;
    }
    run.checkpoints.push_back(std::move(one));
  }
  std::sort(run.checkpoints.begin(), run.checkpoints.end(),
            [](const auto& a, const auto& b) { return a.step < b.step; });
}

}  // namespace

const Json* RunFiles::last_event(const std::string& kind) const {
  const Json* found = nullptr;
  for (const Json& event : events)
    if (event["event"] == kind) found = &event;
  return found;
}

std::string RunFiles::setting(const std::string& key) const {
  for (const auto& [name, value] : config)
    if (name == key) return value;
  return "";
}

std::vector<double> RunFiles::finite(const std::string& key, size_t first) const {
  std::vector<double> found;
  const auto all = values.find(key);
  if (all == values.end()) return found;
  for (size_t i = first; i < all->second.size(); ++i)
    if (std::isfinite(all->second[i])) found.push_back(all->second[i]);
  return found;
}

RunFiles read_run(const fs::path& root) {
  constexpr const char* kHint = "pass the directory of a run (runs/NAME), which fsdp train writes.";
  std::error_code problem;
  if (!fs::is_directory(root, problem))
    throw Error(formatted("there is no directory {}.", root), kHint);
  const bool holds_run = fs::exists(root / "metrics.jsonl", problem) ||
                         fs::exists(root / "config.toml", problem) ||
                         fs::is_directory(root / "checkpoints", problem);
  if (!holds_run) throw Error(formatted("{} doesn't hold a run.", root), kHint);
  RunFiles run{.root = root, .name = root.lexically_normal().string()};
  while (run.name.size() > 1 && run.name.ends_with('/')) run.name.pop_back();
  for (const auto read : {read_metrics, read_events, read_config, read_profile, read_checkpoints}) {
    try {
      read(run);
    } catch (const Error& problem) {  // such as a FIFO in place of a file
      run.notes.push_back(problem.message());
    }
  }
  return run;
}

}  // namespace fsdp::report
