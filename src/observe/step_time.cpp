#include "observe/step_time.h"

#include <algorithm>
#include <map>

#include "observe/intervals.h"

namespace fsdp::observe {
namespace {

constexpr size_t kLongest = 10;  // kernels that are listed
constexpr size_t kNameLength = 200;

double milliseconds_of(int64_t ns) {
  return static_cast<double>(ns) / 1e6;
}

bool is_communication(const WorkPiece& piece) {
  return piece.family == Family::kCommunication;
}

bool is_computation(const WorkPiece& piece) {
  return piece.family != Family::kCommunication && piece.family != Family::kData;
}

// Intervals of the pieces that `wanted` chooses, within the step.
template <typename Wanted>
Intervals intervals_of(const StepWork& work, Wanted wanted) {
  Intervals all;
  for (const WorkPiece& piece : work.pieces)
    if (wanted(piece)) all.emplace_back(piece.begin, piece.end);
  return within(united(std::move(all)), work.begin, work.end);
}

void add_families(const StepWork& work, StepTime& time) {
  std::vector<Labelled> labelled;
  std::vector<int64_t> calls(kFamilies);
  for (const WorkPiece& piece : work.pieces) {
    const auto family = static_cast<size_t>(piece.family);
    labelled.push_back({family, piece.begin, piece.end});
    calls[family] += piece.first ? 1 : 0;
  }
  const std::vector<int64_t> parts = divided(labelled, kFamilies, work.begin, work.end);
  for (size_t i = 0; i < kFamilies; ++i) {
    const auto family = static_cast<Family>(i);
    FamilyTime one{.name = family_name(family),
                   .ms = milliseconds_of(parts[i]),
                   .calls = calls[i],
                   .tflops = 0};
    if (family == Family::kCommunication) one.name = "communication, exposed";
    if (family == Family::kProducts) {
      const int64_t busy = length(intervals_of(
          work, [](const WorkPiece& piece) { return piece.family == Family::kProducts; }));
      if (busy > 0) one.tflops = work.flops / static_cast<double>(busy) / 1e3;
    }
    if (parts[i] > 0) time.families.push_back(one);
  }
  time.gaps_ms = milliseconds_of(parts[kFamilies]);
  if (parts[kFamilies] > 0)
    time.families.push_back(
        {.name = work.gpu ? "host gaps" : "between operators", .ms = time.gaps_ms});
}

void add_units(const StepWork& work, const Intervals& exposed, StepTime& time) {
  std::map<std::string, size_t> places;
  std::map<std::string, Intervals> waits;
  for (const WorkPiece& piece : work.pieces) {
    if (piece.family == Family::kData) continue;
    const std::string name = !piece.unit.empty()               ? piece.unit
                             : piece.pass == StepPass::kUpdate ? "(update)"
                                                               : "(no unit)";
    const auto [place, added] = places.emplace(name, time.units.size());
    if (added) time.units.push_back({.name = name});
    UnitTime& unit = time.units[place->second];
    const double ms = milliseconds_of(piece.end - piece.begin);
    if (is_communication(piece))
      waits[name].emplace_back(piece.begin, piece.end);
    else if (piece.pass == StepPass::kForward)
      unit.forward_ms += ms;
    else if (piece.pass == StepPass::kBackward)
      unit.backward_ms += ms;
    else if (piece.pass == StepPass::kUpdate)
      unit.update_ms += ms;
  }
  for (UnitTime& unit : time.units) {
    const Intervals own = united(waits[unit.name]);
    unit.exposed_ms = milliseconds_of(length(own) - length(without(own, exposed)));
  }
  std::erase_if(time.units, [](const UnitTime& unit) {
    return unit.forward_ms + unit.backward_ms + unit.update_ms + unit.exposed_ms <= 0;
  });
}

void add_longest(const StepWork& work, StepTime& time) {
  std::map<std::string, KernelTime> all;
  for (const WorkPiece& piece : work.pieces) {
    if (piece.family == Family::kData) continue;
    KernelTime& kernel = all[piece.name];
    kernel.name = piece.name.substr(0, kNameLength);
    kernel.family = family_name(piece.family);
    const double ms = milliseconds_of(piece.end - piece.begin);
    kernel.ms += ms;
    kernel.calls += piece.first ? 1 : 0;
    kernel.longest_ms = std::max(kernel.longest_ms, ms);
  }
  for (const auto& [name, kernel] : all) time.kernels.push_back(kernel);
  std::stable_sort(time.kernels.begin(), time.kernels.end(),
                   [](const KernelTime& a, const KernelTime& b) { return a.ms > b.ms; });
  if (time.kernels.size() > kLongest) time.kernels.resize(kLongest);
}

// --- the timeline ---

// Bars of a lane: neighbours with the same name and kind are joined, and so are those that are too
// close to be seen apart.
class Lane {
 public:
  Lane(int64_t begin, int64_t end) : begin_(begin), near_((end - begin) / 500) {}

  void add(int64_t from, int64_t to, const std::string& name, const char* kind, int colour) {
    from = std::max(from, begin_);
    if (from >= to) return;
    if (!bars_.empty()) {
      Bar& last = bars_.back();
      if (last.name == name && last.kind == kind && from - last.end <= near_) {
        last.end = std::max(last.end, to);
        return;
      }
    }
    bars_.push_back({from, to, name, kind, colour});
  }

  nlohmann::ordered_json to_json(const char* name) const {
    nlohmann::ordered_json bars = nlohmann::ordered_json::array();
    auto at = [&](int64_t time) { return static_cast<double>((time - begin_) / 100) / 1e4; };
    for (const Bar& bar : bars_)
      if (bars_.size() < kMostBars || bar.end - bar.begin > near_ / 4)
        bars.push_back({{"begin", at(bar.begin)},
                        {"end", at(bar.end)},
                        {"name", bar.name},
                        {"kind", bar.kind},
                        {"colour", bar.colour}});
    return {{"name", name}, {"bars", bars}};
  }
  bool empty() const { return bars_.empty(); }

 private:
  static constexpr size_t kMostBars = 1500;
  struct Bar {
    int64_t begin, end;
    std::string name;
    const char* kind;
    int colour;
  };
  int64_t begin_, near_;
  std::vector<Bar> bars_;
};

// Colours of page.css.
enum {
  kForwardColour = 0,
  kUpdateColour = 6,
  kBackwardColour = 4,
  kGatherColour = 5,
  kReduceColour = 1,
  kExposedColour = 8,
  kNoPassColour = 7
};

void draw_piece(const WorkPiece& piece, Lane& compute, Lane& gathers, Lane& reductions) {
  const std::string unit = piece.unit.empty() ? family_name(piece.family) : piece.unit;
  if (is_communication(piece)) {
    if (piece.gather)
      gathers.add(piece.begin, piece.end, unit, "gather", kGatherColour);
    else
      reductions.add(piece.begin, piece.end, unit, "reduction", kReduceColour);
  } else if (piece.pass == StepPass::kForward) {
    compute.add(piece.begin, piece.end, unit, "forward", kForwardColour);
  } else if (piece.pass == StepPass::kBackward) {
    compute.add(piece.begin, piece.end, unit, "backward", kBackwardColour);
  } else if (piece.pass == StepPass::kUpdate) {
    compute.add(piece.begin, piece.end, unit, "update", kUpdateColour);
  } else {
    compute.add(piece.begin, piece.end, unit, "outside of the passes", kNoPassColour);
  }
}

void add_timeline(const StepWork& work, const Intervals& exposed, StepTime& time) {
  Lane compute(work.begin, work.end), gathers(work.begin, work.end),
      reductions(work.begin, work.end), waits(work.begin, work.end);
  for (const WorkPiece& piece : work.pieces) draw_piece(piece, compute, gathers, reductions);
  for (const auto& [begin, end] : exposed)
    waits.add(begin, end, "exposed", "exposed communication", kExposedColour);
  nlohmann::ordered_json lanes = nlohmann::ordered_json::array(),
                         phases = nlohmann::ordered_json::array();
  lanes.push_back(compute.to_json("compute"));
  if (!gathers.empty()) lanes.push_back(gathers.to_json("gathers"));
  if (!reductions.empty()) lanes.push_back(reductions.to_json("reductions"));
  if (!waits.empty()) lanes.push_back(waits.to_json("exposed"));
  constexpr const char* kPasses[] = {"", "forward", "backward", "update"};
  for (const StepWork::Phase& phase : work.phases)
    phases.push_back({{"name", kPasses[static_cast<int>(phase.pass)]},
                      {"begin", milliseconds_of(phase.begin - work.begin)},
                      {"end", milliseconds_of(phase.end - work.begin)}});
  time.timeline = {{"begin", 0}, {"end", time.traced_ms}, {"lanes", lanes}};
  if (!work.gpu) time.timeline["phases"] = phases;  // on a GPU they are when the host launched
}

}  // namespace

double StepTime::share(const std::string& family) const {
  for (const FamilyTime& one : families)
    if (one.name == family && traced_ms > 0) return one.ms / traced_ms;
  return 0;
}

StepTime step_time(const StepTrace& trace) {
  const StepWork work = work_of(trace);
  StepTime time{.step = trace.step, .rank = trace.rank, .world = trace.world, .gpu = work.gpu};
  time.traced_ms = milliseconds_of(work.end - work.begin);
  add_families(work, time);
  const Intervals communication = intervals_of(work, is_communication);
  const Intervals exposed = without(communication, intervals_of(work, is_computation));
  time.communication_ms = milliseconds_of(length(communication));
  time.hidden_ms = milliseconds_of(length(communication) - length(exposed));
  add_units(work, exposed, time);
  add_longest(work, time);
  add_timeline(work, exposed, time);
  return time;
}

}  // namespace fsdp::observe
