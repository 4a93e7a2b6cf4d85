#include "train/step_profile.h"

#include <c10/util/ApproximateClock.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "base/file_error.h"
#include "base/format.h"
#include "base/process.h"
#include "base/regular_file.h"
#include "fsdp/communicator.h"
#include "fsdp/error.h"
#include "observe/chrome_trace.h"
#include "observe/memory_check.h"
#include "observe/throughput.h"
#include "report/profile_section.h"
#include "train/device.h"

namespace fsdp::train {
namespace {

constexpr int kMostTraced = 64;  // ranks whose parts are merged: viewers hold no more

}  // namespace

StepProfile::StepProfile(const Training& training, bool graphed)
    : training_(training), graphed_(graphed), steps_(training.config.train.profile) {}

void StepProfile::before_step(int64_t step) {
  step_ = step;
  if (!active() || taken_ < kWarmup) return;
  if (traces_now()) return begin_trace();
  reset_peak_memory(training_.world.device());
  profile_.begin(training_.sharded);
}

std::string StepProfile::after_step() {
  if (!active()) return "";
  const bool traced = traces_now();
  ++taken_;
  if (traced) {
    const observe::StepTime time = end_trace();
    return text(&time);
  }
  if (taken_ > kWarmup) {
    profile_.end();
    measured_ = std::max(measured_, peak_memory(training_.world.device()));
  }
  return "";
}

std::string StepProfile::finish() {
  if (!active()) return "";
  taken_ = wanted();
  if (profile_.steps() == 0)
    return formatted("nothing was profiled: the run ended within the {} warm-up steps", kWarmup);
  return text(nullptr);
}

void StepProfile::begin_trace() {
  const World& world = training_.world;
  if (world.size() > 1) world.comm().barrier({.label = "before the traced step"});
  met_ = c10::getTime();
  trace_.start();
  watch_.emplace();
  scope_.emplace(at::RecordScope::USER_SCOPE);
  scope_->before(formatted("{}{}", observe::kStepScope, step_));
}

observe::StepTime StepProfile::end_trace() {
  const World& world = training_.world;
  scope_.reset();
  observe::StepTrace trace{.step = step_,
                           .rank = world.rank(),
                           .world = world.size(),
                           .host = host_name(),
                           .met = met_,
                           .spans = trace_.spans(),
                           .marks = watch_->marks(),
                           .products = watch_->products()};
  watch_.reset();
  observe::StepTime time = observe::step_time(trace);
  if (world.rank() < kMostTraced) {
    const nlohmann::ordered_json all = observe::to_json(time, settings());
    observe::write_trace_part(trace, {{"families", all["families"]}, {"traced_ms", time.traced_ms}},
                              training_.directory.trace_part(world.rank()));
  }
  if (world.size() > 1) world.comm().barrier({.label = "parts of the trace"});
  if (world.rank() == 0) merge(time);
  return time;
}

// The trace of all ranks, profile.json and the page.
void StepProfile::merge(const observe::StepTime& time) const {
  const RunDirectory& directory = training_.directory;
  std::vector<std::filesystem::path> parts;
  for (int rank = 0; rank < std::min(kMostTraced, training_.world.size()); ++rank)
    parts.push_back(directory.trace_part(rank));
  nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
  for (const auto& header : observe::merge_trace_parts(parts, directory.trace()))
    ranks.push_back({{"rank", header["rank"]},
                     {"host", header["host"]},
                     {"traced_ms", header["traced_ms"]},
                     {"families", header["families"]}});
  nlohmann::ordered_json profile = observe::to_json(time, settings());
  profile["ranks"] = ranks;
  std::ofstream out(place_of_file(directory.profile()));
  out << profile.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n";
  out.close();
  const int why = errno;
  if (!out)
    throw Error(formatted("can't write {}: {}.", directory.profile(), errno_text(why)),
                file_hint(why));
  report::write_page(report::profile_page(directory.root.string(), profile),
                     directory.profile_page());
}

observe::StepSettings StepProfile::settings() const {
  const Config& config = training_.config;
  const World& world = training_.world;
  const double given = config.log.peak_tflops;
  observe::StepSettings settings{
      .peak_tflops = given > 0 ? given
                               : observe::peak_tflops(device_name(world.device()),
                                                      enum_name(config.shard.precision)),
      .step_ms = profile_.step_ms(),
      .graphed = graphed_,
      .hosts = std::max(1, world.size() / std::max(1, world.local_size())),
      .strategy = enum_name(config.shard.strategy),
      .precision = enum_name(config.shard.precision),
      .reduce = enum_name(config.shard.reduce)};
  return settings;
}

std::string StepProfile::text(const observe::StepTime* traced) const {
  std::string out = profile_.describe();
  if (graphed_)
    out += "these steps were eager; the others are replayed as CUDA graphs and take less time\n";
  std::optional<int64_t> measured;
  if (!training_.world.device().is_cpu()) measured = measured_;
  out += "\n" + observe::describe(profile_.memory(), measured);
  if (traced) out += "\n" + observe::describe(*traced, settings()) + "\n";
  const RunDirectory& directory = training_.directory;
  if (profile_.steps() < steps_)
    out += formatted("the run ended after {} of the {} steps to profile{}", profile_.steps(),
                     steps_, traced ? "" : ", without a trace");
  else if (!traced)
    out += "the run ended before a step was traced";
  else
    out += formatted("trace, for https://ui.perfetto.dev: {}\npage, for a browser: {}",
                     directory.trace().string(), directory.profile_page().string());
  return out;
}

}  // namespace fsdp::train
