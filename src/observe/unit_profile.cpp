// fsdp::Profile: the engine's profile as rows and as a table.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <sstream>

#include "base/format.h"
#include "base/table.h"
#include "fsdp/error.h"
#include "fsdp/profile.h"
#include "shard/model.h"
#include "shard/profile.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;
using shard::Profiler;

constexpr const char* kMeetings = "(ranks meet)";

void wait_for(at::Device device) {
  if (shard::has_streams(device))
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

ProfiledCalls summarised(std::vector<double> ms, int64_t bytes) {
  ProfiledCalls calls{.count = static_cast<int64_t>(ms.size()), .bytes = bytes};
  if (ms.empty()) return calls;
  std::sort(ms.begin(), ms.end());
  size_t half = ms.size() / 2;
  calls.median_ms = ms.size() % 2 ? ms[half] : (ms[half - 1] + ms[half]) / 2;
  calls.max_ms = ms.back();
  return calls;
}

void append(Profiler::Pass& all, const Profiler::Pass& one) {
  for (size_t kind = 0; kind < all.calls.size(); ++kind) {
    auto& ms = all.calls[kind].ms;
    ms.insert(ms.end(), one.calls[kind].ms.begin(), one.calls[kind].ms.end());
    all.calls[kind].bytes += one.calls[kind].bytes;
  }
  all.exposed_ms += one.exposed_ms;
}

ProfileRow row_of(const std::string& unit, bool backward, const Profiler::Pass& pass) {
  auto calls = [&](Profiler::Work kind) {
    return summarised(pass.calls[kind].ms, pass.calls[kind].bytes);
  };
  return {.unit = unit,
          .backward = backward,
          .gathers = calls(Profiler::kGather),
          .reshards = calls(Profiler::kReshard),
          .reductions = calls(Profiler::kReduce),
          .exposed_ms = pass.exposed_ms};
}

}  // namespace

struct Profile::State {
  std::shared_ptr<shard::Model> model;  // during a step
  std::shared_ptr<Profiler> profiler;
  std::vector<std::string> units;
  std::string where;  // "rank 0 of 2, CPU"
  Clock::time_point start;
  std::chrono::nanoseconds time{0};
  int64_t steps = 0;

  void stop() {
    if (!model) return;
    shard::stop_profile(*model->lock(), *profiler);
    Sharded(model).count_activations(false);
  }
};

Profile::Profile() : state_(std::make_unique<State>()) {}

Profile::~Profile() {
  state_->stop();
}

void Profile::begin(const Sharded& sharded) {
  std::shared_ptr<shard::Model> model = shard::model_of(sharded);
  if (state_->model)
    throw Error("Profile: begin() was called twice.", "call end() after each step.");
  std::vector<std::string> units;
  for (const Unit& unit : sharded.units())
    if (unit.numel() > 0) units.push_back(unit.name());
  if (state_->profiler && units != state_->units)
    throw Error("Profile: this isn't the model of the step before.", "use one Profile per model.");
  wait_for(model->device());
  if (!state_->profiler) {
    state_->profiler = std::make_shared<Profiler>(model->device());
    state_->units = std::move(units);
    state_->where = formatted("rank {} of {}", model->world().rank(), model->world().size());
  }
  if (!shard::start_profile(*model->lock(), state_->profiler))
    throw Error("Profile: another Profile is measuring this model.", "end that one first.");
  sharded.count_activations(true);
  state_->model = std::move(model);
  state_->start = Clock::now();
}

void Profile::end() {
  if (!state_->model) throw Error("Profile: end() without begin().", "call begin(sharded) first.");
  wait_for(state_->model->device());
  state_->time += Clock::now() - state_->start;
  ++state_->steps;
  state_->stop();
  state_->model.reset();
  state_->profiler->settle();
}

int64_t Profile::steps() const {
  return state_->steps;
}

double Profile::step_ms() const {
  std::chrono::duration<double, std::milli> time = state_->time;
  return state_->steps > 0 ? time.count() / static_cast<double>(state_->steps) : 0;
}

double Profile::exposed_share() const {
  double all = step_ms() * static_cast<double>(state_->steps);
  return all > 0 ? total().exposed_ms / all : 0;
}

std::vector<ProfileRow> Profile::rows() const {
  std::vector<ProfileRow> rows;
  if (!state_->profiler) return rows;
  const auto& passes = state_->profiler->passes();
  for (const std::string& unit : state_->units) {
    auto found = passes.find(unit);
    Profiler::Passes none;
    const Profiler::Passes& both = found == passes.end() ? none : found->second;
    rows.push_back(row_of(unit, false, both.forward));
    rows.push_back(row_of(unit, true, both.backward));
  }
  if (double ms = state_->profiler->meetings_ms(); ms > 0)
    rows.push_back({.unit = kMeetings, .exposed_ms = ms});
  return rows;
}

ProfileRow Profile::total() const {
  Profiler::Pass all;
  if (state_->profiler) {
    for (const auto& [unit, both] : state_->profiler->passes()) {
      append(all, both.forward);
      append(all, both.backward);
    }
    all.exposed_ms += state_->profiler->meetings_ms();
  }
  return row_of("all units", false, all);
}

MemoryReport Profile::memory() const {
  return state_->profiler ? state_->profiler->most_memory() : MemoryReport();
}

// --- the table ---

namespace {

class UnitTable {
 public:
  explicit UnitTable(int64_t steps)
      : steps_(static_cast<double>(std::max<int64_t>(steps, 1))),
        table_({{"unit", "unit", Table::kLeft},
                {"pass", "pass", Table::kLeft},
                {"gathers", "gathers"},
                {"gather_median_ms", "median"},
                {"gather_max_ms", "max"},
                {"gather_bytes", "sent"},
                {"reshards", "reshards"},
                {"reshard_median_ms", "median"},
                {"reshard_max_ms", "max"},
                {"reductions", "reductions"},
                {"reduction_median_ms", "median"},
                {"reduction_max_ms", "max"},
                {"reduction_bytes", "sent"},
                {"exposed_ms", "exposed"}}) {}

  void add(const ProfileRow& row, const char* pass) {
    std::vector<Cell> cells{text(row.unit), text(pass)};
    add(cells, row.gathers, true);
    add(cells, row.reshards, false);
    add(cells, row.reductions, true);
    cells.push_back(milliseconds(row.exposed_ms / steps_));
    table_.add(std::move(cells));
  }

  std::string print() const {
    std::stringstream out;
    table_.print(out, /*json=*/false);
    return out.str();
  }

 private:
  static Cell milliseconds(double ms) { return number(ms, 3); }

  void add(std::vector<Cell>& cells, const ProfiledCalls& calls, bool sends) {
    double count = static_cast<double>(calls.count) / steps_;
    bool any = calls.count > 0;
    cells.push_back(any ? number(count, count == std::floor(count) ? 0 : 1) : text("-"));
    cells.push_back(any ? milliseconds(calls.median_ms) : text("-"));
    cells.push_back(any ? milliseconds(calls.max_ms) : text("-"));
    if (!sends) return;
    double bytes = static_cast<double>(calls.bytes) / steps_;
    cells.push_back(any ? Cell{bytes, human_bytes(bytes)} : text("-"));
  }

  double steps_;
  Table table_;
};

}  // namespace

std::string Profile::describe() const {
  UnitTable table(steps());
  // Reshards alone say nothing: where nothing is sent, they cost nothing.
  auto sends = [](const ProfileRow& row) {
    return row.gathers.count > 0 || row.reductions.count > 0 || row.exposed_ms > 0;
  };
  for (const ProfileRow& row : rows())
    if (sends(row))
      table.add(row, row.unit == kMeetings ? "update" : row.backward ? "backward" : "forward");
  ProfileRow all = total();
  if (sends(all)) table.add(all, "");
  const double exposed_ms = all.exposed_ms / static_cast<double>(std::max<int64_t>(steps(), 1));
  const std::string title = formatted(
      "{} step{} of {:.3f} ms ({}): {:.3f} ms per step ({:.1f} %) exposed\n", steps(),
      steps() == 1 ? "" : "s", step_ms(), state_->where, exposed_ms, 100 * exposed_share());
  if (!sends(all)) return title;
  return formatted(
      "{}calls, bytes sent and exposed time are per step; times in ms, median and max over all "
      "calls\n{}",
      title, table.print());
}

}  // namespace fsdp
