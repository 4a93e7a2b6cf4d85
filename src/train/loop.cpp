#include "train/loop.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/exit_code.h"
#include "base/file_error.h"
#include "base/format.h"
#include "base/log.h"
#include "base/rank_status.h"
#include "base/table.h"
#include "comm/core/flight_recorder.h"
#include "fsdp/error.h"
#include "fsdp/out_of_memory.h"
#include "observe/step_trace.h"
#include "train/begun.h"
#include "train/config_check.h"
#include "train/device.h"
#include "train/from_rank_0.h"
#include "train/init_from.h"
#include "train/kept_config.h"
#include "train/looks.h"
#include "train/memory_plan.h"
#include "train/memory_saves.h"
#include "train/memory_snapshot.h"
#include "train/next_commands.h"
#include "train/owner.h"
#include "train/recovery.h"
#include "train/report.h"
#include "train/resume.h"
#include "train/stall_watch.h"
#include "train/step_profile.h"
#include "train/steps.h"
#include "train/stop.h"
#include "train/training.h"

namespace fsdp::train {
namespace {

namespace fs = std::filesystem;

// Expected length of a save: after a signal it gets three times as long (ten minutes) unless
// train.grace is set.
constexpr double kSaveSeconds = 200;
constexpr size_t kFailureLength = 2000;  // characters of an error that are recorded

void introduce(Report& report, const Training& training, const RunRequest& request,
               const RunState& start) {
  const World& world = training.world;
  const Config& config = training.config;
  for (const std::string& note : request.notes) report.line(note);
  std::string device = device_name(world.device());
  report.line(
      formatted("model      {}, computed in {}\n"
                "data       {}\n"
                "ranks      {} over {} on {}, {} in {} units\n"
                "run        {}",
                training.task.title, enum_name(config.shard.precision), training.corpus->title(),
                world.size(), world.backend(), device.empty() ? "the CPU" : device,
                enum_name(config.shard.strategy), training.sharded.units().size(),
                training.directory.root.string()));
  if (training.context)
    report.line(formatted("context    {} ranks share each sequence ({}), {} tokens per rank",
                          training.context.size(),
                          training.context.kind() == ContextKind::RING ? "ring" : "ulysses",
                          config.data.seq / training.context.size()));
  if (start.step > 0) report.line(formatted("resumed    after step {}", start.step));
}

// Counts consecutive steps whose loss or gradient wasn't finite.
class NotFinite {
 public:
  explicit NotFinite(const Training& training) : training_(training) {}

  void saw(const RunState& state, const StepOutcome& outcome, Report& report) {
    if (outcome.updated) {
      in_a_row_ = 0;
      return;
    }
    // A scaler that is still searching for its scale is expected to skip steps.
    if (training_.scaler && std::isfinite(outcome.loss) && training_.scaler->scale() >= 1) return;
    ++in_a_row_;
    const std::string what =
        formatted("step {}: loss {:g}, gradient norm {:g}", state.step, outcome.loss, outcome.norm);
    const TrainConfig& config = training_.config.train;
    if (config.on_nan == OnNan::kStop)
      throw Error(what + ": not finite, and train.on_nan is stop.",
                  "resume from the last checkpoint with a lower --optim.lr, a --train.clip, or "
                  "--train.on_nan skip.");
    if (in_a_row_ > config.max_skips)
      throw Error(formatted("{}: not finite, {} times in a row.", what, in_a_row_),
                  "the run has diverged: resume from its last checkpoint with a lower --optim.lr.");
    report.line(what + ": not finite, the step is skipped");
    report.event("skip", {{"text", what + ": not finite, the step is skipped"}});
  }

 private:
  const Training& training_;
  int64_t in_a_row_ = 0;
};

std::string milliseconds(double seconds) {
  const double ms = seconds * 1e3;
  return ms < 10 ? formatted("{:.1f} ms", ms) : formatted("{:.0f} ms", ms);
}

bool due(int64_t every, int64_t step) {
  return every > 0 && step % every == 0;
}

// Writes what a resumed run, or fsdp generate, needs besides checkpoints.
void keep_settings(const Training& training, const RunDirectory& directory) {
  from_rank_0(training.world, "fsdp/train/kept", [&] {
    if (training.owner) training.owner->check();
    keep_config(directory, training.config);
    if (auto tokenizer = training.corpus->tokenizer()) tokenizer->save(directory.root.string());
    if (!training.config.init_from.empty() && !training.config.resumes)
      keep_origin(find_origin(training.config.init_from), directory.origin());
    return std::string();
  });
}

// Prints why the run fails, before anything is unwound: destructors may wait for other ranks, and
// get the world's timeout for that.
void say(const std::exception& problem, StopSignals& signals, const World& world) {
  // Others died, and this rank stays (train_through_faults): it hasn't failed.
  if (rank_status::current().recovers && !world.trouble().empty()) return;
  signals.failed(exit_code(problem), world.timeout());  // first: nobody may read stderr
  log::error(problem);
}

// The run, from its beginning or its checkpoint to its end: the constructor sets up, run() loops
// and ends it.
class Loop {
 public:
  Loop(const RunRequest& request, const Begun& begun, Training& training, StopSignals& signals)
      : training_(training),
        config_(training.config),
        signals_(signals),
        directory_(begun.directory),
        state_(first_state(training, begun)),
        saved_at_(begun.is_on_disk(state_.step) ? state_.step : 0),
        graphed_(wants_graphs(training, training.steps - state_.step)),
        report_(training, state_),
        not_finite_(training),
        feed_(training.corpus->training(training.share(), state_.position)),
        steps_(training, graphed_, [] { return StopSignals::received() != 0; }),
        profile_(training, graphed_),
        memory_plan_(training),
        memory_saves_(training, memory_checkpoints(), state_.step),
        stalls_(StepHistory(config_.train.stall, config_.train.stall_least),
                [this](const Stall& stall) {
                  report(stall, training_.directory, training_.world.rank());
                }) {
    keep_settings(training, begun.directory);
    introduce(report_, training, request, state_);
    if (config_.train.deterministic && !training.world.device().is_cpu())
      show_cost_of_determinism(report_, training,
                               training.corpus->training(training.share(), 0)->next());
    if (!memory_saves_.why_off().empty()) report_.line(memory_saves_.why_off());
    if (graphed_)
      report_.line("graph      after a few steps, the GPU replays the step as a CUDA graph");
  }

  Ended run() {
    try {
      steps();
      finish();
      return state_.step < training_.steps ? Ended::kStopped : Ended::kDone;
    } catch (const std::exception& problem) {
      note_failure(problem);
      if (!is_out_of_memory(problem))
        say(problem, signals_, training_.world);  // with_memory() does
      throw;
    }
  }

 private:
  struct UnderWay {  // a step without a known outcome
    RunState state;
    StepCost cost;
  };

  // The last event of a run that an error ends.
  void note_failure(const std::exception& problem) noexcept {
    try {
      const std::string text = log::plain(problem).substr(0, kFailureLength);
      report_.event(is_out_of_memory(problem) ? "out_of_memory" : "error", {{"text", text}});
      comm::flight::write(comm::flight::Cause::kFault, text.c_str());
    } catch (const std::exception&) {  // the failure itself is what matters
    }
  }

  void steps() {
    while (state_.step < training_.steps && !stop_) {
      const std::string profiled = step();
      const bool last = state_.step == training_.steps;
      const bool evaluates = due(config_.train.eval_every, state_.step);
      const bool samples = due(config_.train.sample_every, state_.step);
      const bool saves = due(config_.checkpoint.every, state_.step);
      memory_saves_.pass_on();
      const bool keeps = memory_saves_.due(state_.step);
      if (last || evaluates || samples || saves || keeps) steps_.finish();
      read_outcomes();
      if (!profiled.empty()) report_.line(profiled);
      memory_plan_.after_step(report_);
      prepare_saves();
      report_.compare_window(state_.step);
      if (last || stop_) continue;  // finish() does the rest
      if (evaluates || samples || saves) stalls_.pause();
      if (evaluates || saves) report_.compare_ranks();
      if (evaluates) evaluate_now(report_, training_, state_, signals_);
      if (samples) sample_now(report_, training_, state_, signals_);
      if (saves) {
        report_.settle();  // a run killed later then has all lines up to its checkpoint
        save_now(/*must=*/false);
      } else if (keeps) {
        report_.settle();
        report_.timed(Report::kCheckpoint, [&] { memory_saves_.save(state_, step_seconds_); });
      }
    }
  }

  void finish() {
    stalls_.pause();
    steps_.finish();
    read_outcomes();
    if (std::string text = profile_.finish(); !text.empty()) report_.line(text);
    const bool stopped = stop_ && state_.step < training_.steps;
    if (stopped) {
      const std::string text = formatted("stopping after step {}, as requested", state_.step);
      report_.line(text);
      report_.event("stop", {{"text", text}});
    }
    // Save first: what follows may fail or be killed.
    const bool wanted = config_.checkpoint.at_end || due(config_.checkpoint.every, state_.step);
    if (wanted && saved_at_ != state_.step) save_now(/*must=*/true);
    signals_.begin_part("save", kSaveSeconds);
    report_.timed(Report::kCheckpoint, [&] { training_.saving.wait(); });
    if (!stopped) {
      evaluate_now(report_, training_, state_, signals_);
      sample_now(report_, training_, state_, signals_);
    }
    report_.finish(stopped);
    if (training_.world.rank() == 0)
      say_what_is_next(training_, directory_.checkpoint(saved_at_), stopped);
  }

  // Takes or launches a step. Returns what its profile says, if anything.
  std::string step() {
    const std::chrono::nanoseconds waited = feed_->waited();
    const bool eager = profile_.active();
    profile_.before_step(state_.step + 1);
    memory_plan_.before_step();
    signals_.begin_part("step");
    rank_status::set_step(state_.step + 1);
    stalls_.begin_step(state_.step + 1);
    report_.timed(Report::kStep, [&] {
      Samples batch;
      {
        RECORD_USER_SCOPE(observe::kLoadingScope);
        batch = feed_->next();
      }
      steps_.take(batch, eager);
    });
    std::string profiled = profile_.after_step();
    ++state_.step;
    state_.position = feed_->position();
    state_.tokens += config_.train.batch * training_.task.tokens_per_sample;
    under_way_.push_back({state_, report_.cost(feed_->waited() - waited, steps_.host_is_ahead())});
    training_.scheduler->set_steps(state_.step);
    return profiled;
  }

  void read_outcomes() {
    while (std::optional<StepOutcome> outcome = steps_.outcome()) {
      UnderWay done = under_way_.front();
      under_way_.pop_front();
      if (!done.cost.comm_s) done.cost.seconds = outcome->seconds;  // the host ran ahead
      state_.skipped += outcome->updated ? 0 : 1;
      stop_ = stop_ || outcome->stop;
      report_.step(done.state, *outcome, done.cost);
      step_seconds_ =
          step_seconds_ > 0 ? 0.9 * step_seconds_ + 0.1 * done.cost.seconds : done.cost.seconds;
      not_finite_.saw(done.state, *outcome, report_);
    }
  }

  // After the first step, which is when the optimizer has its states.
  void prepare_saves() {
    if (prepared_) return;
    prepared_ = true;
    const bool keeps = memory_saves_.wanted();
    if (!config_.checkpoint.async || (config_.checkpoint.every == 0 && !keeps)) return;
    const auto pool = static_cast<int64_t>(config_.checkpoint.pool * (1 << 30));
    const auto room = checkpoint::prepare_async(training_.sharded, training_.optimizer.get(), pool,
                                                load_options(config_).only);
    if (const std::string text = memory_saves_.begin(room); !text.empty()) report_.line(text);
    if (room.pool < room.bytes)
      report_.line(formatted(
          "checkpoints of {} per rank pass through {} of host memory: after a save, the next "
          "update waits until the last {} of it are copied (checkpoint.pool)",
          human_bytes(static_cast<double>(room.bytes)), human_bytes(static_cast<double>(room.pool)),
          human_bytes(static_cast<double>(room.pool))));
  }

  void save_now(bool must) {
    signals_.begin_part("save", kSaveSeconds);
    const std::string name = directory_.checkpoint(state_.step).filename().string();
    bool saved = false;
    // One in memory that isn't finished yet is no reason to skip this one: it takes a moment.
    const bool waits = must || memory_saves_.came_last();
    const double held =
        report_.timed(Report::kCheckpoint, [&] { saved = save(training_, state_, waits); });
    if (saved) memory_saves_.other_save_came();
    if (!saved) {
      const std::string text = skipped(name);
      report_.line(text);
      return report_.event("skip", {{"text", text}});
    }
    saved_at_ = state_.step;
    report_.line(formatted("checkpoint {}: training waited {}", name, milliseconds(held)));
    report_.event("checkpoint", {{"name", name}, {"waited_ms", 1e3 * held}});
  }

  // Says why a save was skipped, and how often saves may come.
  std::string skipped(const std::string& name) const {
    const auto before = training_.saving.progress();
    std::string line =
        formatted("checkpoint {} skipped: the one before is still being written", name);
    if (before.written == 0 || step_seconds_ <= 0) return line;
    const double rate = static_cast<double>(before.written) / before.seconds;
    const double all = static_cast<double>(before.bytes) / rate;
    return line +
           formatted(" ({} at {:.2f} GB/s); none would be with checkpoint.every = {} or more",
                     human_bytes(static_cast<double>(before.bytes)), rate / 1e9,
                     static_cast<int64_t>(std::ceil(all / step_seconds_)) + 1);
  }

  Training& training_;
  const Config& config_;
  StopSignals& signals_;
  const RunDirectory& directory_;
  RunState state_;           // after the last step
  int64_t saved_at_;         // step
  double step_seconds_ = 0;  // a running average
  const bool graphed_;
  Report report_;
  NotFinite not_finite_;
  std::unique_ptr<Feed> feed_;
  Steps steps_;
  StepProfile profile_;
  MemoryPlan memory_plan_;
  MemorySaves memory_saves_;
  StallWatch stalls_;
  std::deque<UnderWay> under_way_;
  bool stop_ = false, prepared_ = false;
};

// Runs work(), and explains an out-of-memory error.
template <typename Work>
auto with_memory(const World& world, const Config& config, const Sharded& sharded,
                 const RunDirectory& directory, StopSignals& signals, Work work) {
  try {
    return work();
  } catch (const std::exception& problem) {
    if (!is_out_of_memory(problem)) {
      say(problem, signals, world);
      throw;
    }
    const Error why = explain_out_of_memory(world, config, sharded, directory, problem);
    const CodedError explained(kExitNoMemory, why.message(), why.hint());
    say(explained, signals, world);
    throw explained;
  }
}

}  // namespace

Ended train(const World& world, RunRequest request) {
  check(request.config, world.size());
  ignore_size_signal();
  StopSignals signals(request.config.train.grace, world.rank());
  signals.begin_part("setup");
  if (request.config.train.deterministic) set_deterministic(true);
  prepare_allocator(world.device());
  Begun begun = begin(world, request);
  request.config.resumes = !begun.points.empty();
  const bool lora = request.config.lora.rank > 0;  // needs its base again, wherever it is used
  if (!request.config.init_from.empty() && (lora || !request.config.resumes))
    request.config.init_from = from_rank_0(world, "fsdp/train/origin", [&] {
      const Config& config = request.config;  // the latest checkpoint there may change
      return (lora ? std::filesystem::absolute(base_of_adapters(config))
                   : find_origin(config.init_from).weights)
          .string();
    });
  if (!request.config.optim_from.empty() && !request.config.resumes)
    request.config.optim_from = from_rank_0(world, "fsdp/train/states", [&] {
      return find_checkpoint(request.config.optim_from).checkpoint.string();
    });
  watch_memory(world.device());
  const RunDirectory& directory = begun.directory;
  Training training = with_memory(world, request.config, Sharded(), directory, signals,
                                  [&] { return assemble(world, request.config, directory); });
  training.owner = begun.owner;
  if (is_complete(training, begun)) return Ended::kDone;
  return with_memory(world, training.config, training.sharded, directory, signals, [&] {
    Loop loop(request, begun, training, signals);
    return loop.run();
  });
}

}  // namespace fsdp::train
