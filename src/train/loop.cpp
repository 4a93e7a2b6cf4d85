#include "train/loop.h"

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cmath>
#include <deque>
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "base/rank_status.h"
#include "base/table.h"
#include "base/terminal.h"
#include "fsdp/error.h"
#include "fsdp/out_of_memory.h"
#include "observe/step_trace.h"
#include "train/config_check.h"
#include "train/config_write.h"
#include "train/device.h"
#include "train/init_from.h"
#include "train/looks.h"
#include "train/memory_plan.h"
#include "train/memory_snapshot.h"
#include "train/report.h"
#include "train/shell.h"
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

// The string that `say` returns on rank 0, on all ranks; throws if it throws there.
std::string from_rank_0(const World& world, const std::string& key,
                        const std::function<std::string()>& say) {
  if (world.size() == 1) return say();
  c10::intrusive_ptr<c10d::Store> store = world.store();
  if (world.rank() == 0) {
    try {
      std::string text = say();
      store->set(key, "=" + text);
      return text;
    } catch (const std::exception& problem) {
      store->set(key, formatted("!{}", problem.what()));
      throw;
    }
  }
  std::string text = store->get_to_str(key);
  if (text.starts_with("!"))
    throw Error("rank 0 couldn't start the run.", "see its error message.");
  return text.substr(1);
}

// The run's directory, and the checkpoint it resumes from ("": none).
struct Begun {
  RunDirectory directory;
  std::string checkpoint;
};

Begun begin(const World& world, const RunRequest& request) {
  std::string root = from_rank_0(world, "fsdp/train/dir", [&] {
    if (!request.config.dir.empty()) return request.config.dir;
    return free_directory(request.name).string();
  });
  Begun begun{.directory = {root}};
  begun.checkpoint = from_rank_0(world, "fsdp/train/from", [&] {
    auto found = prepare(begun.directory, request.config.resume);
    return found ? found->string() : std::string();
  });
  return begun;
}

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

// Prints a few commands to try next.
void suggest_next(const Training& training) {
  std::string fsdp = fsdp_command(), run = shell_word(training.directory.root.string());
  auto row = [&](const std::string& command, const std::string& what) {
    std::cout << "  " << paint(STDOUT, "1", fsdp + " " + command) << "\n      " << what << "\n";
  };
  std::cout << "\nNext:\n";
  if (training.task.text && training.corpus->tokenizer()) {
    const Config& config = training.config;  // without data.train it learned to write C++
    std::string prompt = config.data.train.empty() ? "class " : config.train.sample_prompt;
    row(formatted("generate {}{}", run, prompt.empty() ? "" : " --prompt " + shell_word(prompt)),
        "let the model continue a text");
  }
  row(formatted("train --dir {} --resume --steps {}", run, 2 * training.steps),
      "train on from the last checkpoint");
  row(formatted("report {}", run), "see the run as a page in a browser");
  row("explain", "follow one sharded step, line by line");
}

// What rank 0 prints last.
void say_what_is_next(const Training& training, const fs::path& checkpoint, bool stopped) {
  const std::string run = shell_word(training.directory.root.string());
  if (!fs::exists(checkpoint)) {
    std::cout << "\nNo checkpoint was written: checkpoint.at_end is false.\n" << std::flush;
    return;
  }
  std::cout << "\nCheckpoint: " << checkpoint.string() << "\n";
  if (stopped)
    std::cout << "Resume with: "
              << paint(STDOUT, "1", formatted("{} train --dir {} --resume", fsdp_command(), run))
              << "\n";
  else
    suggest_next(training);
  std::cout << std::flush;
}

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
    Config kept = training.config;
    kept.train.profile = 0;  // a resumed run isn't profiled again
    keep_config(directory, to_toml(kept));
    if (auto tokenizer = training.corpus->tokenizer()) tokenizer->save(directory.root.string());
    if (!training.config.init_from.empty() && !training.config.resume)
      keep_origin(find_origin(training.config.init_from), directory.origin());
    return std::string();
  });
}

RunState first_state(Training& training, const Begun& begun) {
  if (begun.checkpoint.empty()) return {};
  RunState state = restore(training, begun.checkpoint);
  if (state.step >= training.steps)
    throw Error(formatted("the run in {} is complete: it has done {} of {} steps.",
                          begun.directory.root, state.step, training.steps),
                "pass a larger --steps to train on.");
  return state;
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
        saved_at_(state_.step),
        graphed_(wants_graphs(training, training.steps - state_.step)),
        report_(training, state_),
        not_finite_(training),
        feed_(training.corpus->training(training.world, state_.position)),
        steps_(training, graphed_, [] { return StopSignals::received() != 0; }),
        profile_(training, graphed_),
        memory_plan_(training) {
    keep_settings(training, begun.directory);
    introduce(report_, training, request, state_);
    if (config_.train.deterministic && !training.world.device().is_cpu())
      show_cost_of_determinism(report_, training,
                               training.corpus->training(training.world, 0)->next());
    if (graphed_)
      report_.line("graph      after a few steps, the GPU replays the step as a CUDA graph");
  }

  void run() {
    try {
      steps();
      finish();
    } catch (const std::exception& problem) {
      note_failure(problem);
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
      std::string text = problem.what();
      text = text.substr(0, text.find("\nframe #")).substr(0, kFailureLength);  // no backtrace
      report_.event(is_out_of_memory(problem) ? "out_of_memory" : "error", {{"text", text}});
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
      if (last || evaluates || samples || saves) steps_.finish();
      read_outcomes();
      if (!profiled.empty()) report_.line(profiled);
      memory_plan_.after_step(report_);
      prepare_saves();
      if (last || stop_) continue;  // finish() does the rest
      if (evaluates || saves) report_.compare_ranks();
      if (evaluates) evaluate_now(report_, training_, state_, signals_);
      if (samples) sample_now(report_, training_, state_, signals_);
      if (saves) {
        report_.settle();  // a run killed later then has all lines up to its checkpoint
        save_now(/*must=*/false);
      }
    }
  }

  void finish() {
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
    if (!config_.checkpoint.async || config_.checkpoint.every == 0) return;
    const auto pool = static_cast<int64_t>(config_.checkpoint.pool * (1 << 30));
    const auto room = checkpoint::prepare_async(training_.sharded, training_.optimizer.get(), pool);
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
    const double held =
        report_.timed(Report::kCheckpoint, [&] { saved = save(training_, state_, must); });
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
  std::deque<UnderWay> under_way_;
  bool stop_ = false, prepared_ = false;
};

// Runs work(), and explains an out-of-memory error.
template <typename Work>
auto with_memory(const World& world, const Config& config, const Sharded& sharded,
                 const RunDirectory& directory, Work work) {
  try {
    return work();
  } catch (const std::exception& problem) {
    if (!is_out_of_memory(problem)) throw;
    throw explain_out_of_memory(world, config, sharded, directory, problem);
  }
}

}  // namespace

void train(const World& world, RunRequest request) {
  check(request.config, world.size());
  StopSignals signals(request.config.train.grace, world.rank());
  signals.begin_part("setup");
  if (request.config.train.deterministic) set_deterministic(true);
  Begun begun = begin(world, request);
  if (!request.config.init_from.empty() &&
      !request.config.resume)  // its latest checkpoint may change
    request.config.init_from = from_rank_0(world, "fsdp/train/origin", [&] {
      return find_origin(request.config.init_from).weights.string();
    });
  watch_memory(world.device());
  const RunDirectory& directory = begun.directory;
  Training training = with_memory(world, request.config, Sharded(), directory,
                                  [&] { return assemble(world, request.config, directory); });
  with_memory(world, training.config, training.sharded, directory, [&] {
    Loop loop(request, begun, training, signals);
    loop.run();
  });
}

}  // namespace fsdp::train
