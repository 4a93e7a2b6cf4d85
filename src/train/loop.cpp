#include "train/loop.h"

#include <ATen/ops/tensor.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cmath>
#include <deque>
#include <iostream>
#include <limits>

#include "base/rank_status.h"
#include "base/terminal.h"
#include "fsdp/error.h"
#include "fsdp/out_of_memory.h"
#include "train/config_check.h"
#include "train/config_write.h"
#include "train/device.h"
#include "train/init_from.h"
#include "train/memory_plan.h"
#include "train/report.h"
#include "train/sample.h"
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
      store->set(key, std::string("!") + problem.what());
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

int64_t micro_batch(const Config& config, const World& world) {
  return config.train.micro_batch > 0 ? config.train.micro_batch
                                      : config.train.batch / world.size();
}

void introduce(Report& report, const Training& training, const RunRequest& request,
               const RunState& start) {
  const World& world = training.world;
  const Config& config = training.config;
  for (const std::string& note : request.notes) report.line(note);
  std::string device = device_name(world.device());
  report.line("model      " + training.trainee.title + ", computed in " +
              enum_name(config.shard.precision) + "\ndata       " + training.corpus->title() +
              "\nranks      " + std::to_string(world.size()) + " over " + world.backend() + " on " +
              (device.empty() ? "the CPU" : device) + ", " + enum_name(config.shard.strategy) +
              " in " + std::to_string(training.sharded.units().size()) + " units\nrun        " +
              training.directory.root.string());
  if (start.step > 0) report.line("resumed    after step " + std::to_string(start.step));
}

// Measures the cost of deterministic operators: a few forward and backward passes of one
// micro-batch with and without them, from the same random state. Updates nothing.
void show_cost_of_determinism(Report& report, Training& training, const Samples& batch) {
  auto seconds = [&](bool on) {
    set_deterministic(on);
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 4; ++i) {  // the first warms up
      synchronize(training.world.device());
      auto start = std::chrono::steady_clock::now();
      Samples part =
          part_of(batch, 0, std::min(batch.count, micro_batch(training.config, training.world)));
      training.trainee.loss_sum(on_device(part, training.world.device())).backward();
      synchronize(training.world.device());
      std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      training.optimizer->zero_grad();
      if (i > 0) best = std::min(best, took.count());
    }
    return best;
  };
  RandomState random = random_state(training.world.device());
  double free = seconds(false), fixed = seconds(true);
  set_random_state(training.world.device(), random);
  char text[160];
  std::snprintf(text, sizeof text,
                "deterministic operators: %.1f ms per micro-batch, %.1f ms without (%+.1f %%)",
                fixed * 1e3, free * 1e3, (fixed / free - 1) * 100);
  report.line(text);
}

void evaluate_now(Report& report, const Training& training, const RunState& state,
                  StopSignals& signals) {
  std::unique_ptr<Feed> feed = training.corpus->validation(training.world);
  if (!feed) return;
  int64_t batches = training.corpus->validation_batches();
  if (training.config.train.eval_batches > 0)
    batches = std::min(batches, training.config.train.eval_batches);
  signals.begin_part("evaluation", static_cast<double>(batches) * signals.slowest("step"));
  Evaluation result;
  report.timed(Report::kEvaluation, [&] {
    result = evaluate(training.world, training.trainee, *feed, batches,
                      micro_batch(training.config, training.world));
  });
  report.evaluation(state, result);
}

void sample_now(Report& report, const Training& training, const RunState& state) {
  const TrainConfig& config = training.config.train;
  auto tokenizer = training.corpus->tokenizer();
  if (!training.trainee.text || !tokenizer || config.sample_tokens == 0) return;
  std::vector<int64_t> prompt;
  for (int32_t id : tokenizer->encode(config.sample_prompt)) prompt.push_back(id);
  if (prompt.empty()) prompt.push_back(tokenizer->eos().value_or(0));  // starts a document
  data::StreamDecoder decoder(tokenizer);
  std::string text = config.sample_prompt;
  const World& world = training.world;
  auto agree = [&](int64_t token) {
    at::Tensor shared = at::tensor({token}, at::kLong).to(world.device());
    world.comm().broadcast(shared, 0, {.label = "sampled token"});
    return shared.item<int64_t>();
  };
  auto take = [&](int64_t token) {
    if (tokenizer->eos() == token) return false;
    if (token < tokenizer->vocab_size()) text += decoder.push(static_cast<int32_t>(token));
    return true;
  };
  auto write = [&] {
    generate(*training.trainee.text, world.device(), prompt,
             {.temperature = config.sample_temperature,
              .seed = static_cast<uint64_t>(config.seed) + state.step,
              .tokens = config.sample_tokens},
             take, world.size() > 1 ? agree : std::function<int64_t(int64_t)>());
  };
  try {
    report.timed(Report::kEvaluation, write);
    report.sample(state, text + decoder.finish());
  } catch (const Error& problem) {  // non-finite logits, which are the same on every rank
    report.line(std::string("no sample: ") + problem.what());
  }
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
    char what[160];
    std::snprintf(what, sizeof what, "step %lld: loss %g, gradient norm %g",
                  static_cast<long long>(state.step), outcome.loss, outcome.norm);
    const TrainConfig& config = training_.config.train;
    if (config.on_nan == OnNan::kStop)
      throw Error(std::string(what) + ": not finite, and train.on_nan is stop.",
                  "resume from the last checkpoint with a lower --optim.lr, a --train.clip, or "
                  "--train.on_nan skip.");
    if (in_a_row_ > config.max_skips)
      throw Error(
          std::string(what) + ": not finite, " + std::to_string(in_a_row_) + " times in a row.",
          "the run has diverged: resume from its last checkpoint with a lower --optim.lr.");
    report.line(std::string(what) + ": not finite, the step is skipped");
  }

 private:
  const Training& training_;
  int64_t in_a_row_ = 0;
};

// Prints three commands to try next.
void suggest_next(const Training& training) {
  std::string fsdp = fsdp_command(), run = shell_word(training.directory.root.string());
  auto row = [&](const std::string& command, const std::string& what) {
    std::cout << "  " << paint(STDOUT, "1", fsdp + " " + command) << "\n      " << what << "\n";
  };
  std::cout << "\nNext:\n";
  if (training.trainee.text && training.corpus->tokenizer()) {
    const Config& config = training.config;  // without data.train it learned to write C++
    std::string prompt = config.data.train.empty() ? "class " : config.train.sample_prompt;
    row("generate " + run + (prompt.empty() ? "" : " --prompt " + shell_word(prompt)),
        "let the model continue a text");
  }
  row("train --dir " + run + " --resume --steps " + std::to_string(2 * training.steps),
      "train on from the last checkpoint");
  row("explain", "follow one sharded step, line by line");
}

std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f ms", seconds < 0.01 ? 1 : 0, seconds * 1e3);
  return text;
}

bool due(int64_t every, int64_t step) {
  return every > 0 && step % every == 0;
}

// The run, from its beginning or its checkpoint to its end.
void run(const RunRequest& request, const Begun& begun, Training& training, StopSignals& signals) {
  const World& world = training.world;
  RunState state;
  if (!begun.checkpoint.empty()) state = restore(training, begun.checkpoint);
  if (state.step >= training.steps && !begun.checkpoint.empty())
    throw Error("the run in " + begun.directory.root.string() + " is complete: it has done " +
                    std::to_string(state.step) + " of " + std::to_string(training.steps) +
                    " steps.",
                "pass a larger --steps to train on.");
  from_rank_0(world, "fsdp/train/kept", [&] {
    Config kept = training.config;
    kept.train.profile = 0;  // a resumed run isn't profiled again
    keep_config(begun.directory, to_toml(kept));
    if (auto tokenizer = training.corpus->tokenizer())
      tokenizer->save(begun.directory.root.string());
    if (!training.config.init_from.empty() && !training.config.resume)
      keep_origin(find_origin(training.config.init_from), begun.directory.origin());
    return std::string();
  });

  Report report(training, state);
  introduce(report, training, request, state);
  const Config& config = training.config;
  std::unique_ptr<Feed> feed = training.corpus->training(world, state.position);
  if (config.train.deterministic && !world.device().is_cpu())
    show_cost_of_determinism(report, training, training.corpus->training(world, 0)->next());
  NotFinite not_finite(training);
  int64_t saved_at = state.step;
  auto save_now = [&] {
    signals.begin_part("save", kSaveSeconds);
    double held = report.timed(Report::kCheckpoint, [&] { save(training, state); });
    saved_at = state.step;
    report.line("checkpoint " + begun.directory.checkpoint(saved_at).filename().string() +
                ": training waited " + milliseconds(held));
  };

  const bool graphed = wants_graphs(training, training.steps - state.step);
  if (graphed)
    report.line("graph      after a few steps, the GPU replays the step as a CUDA graph");
  Steps steps(training, graphed, [] { return StopSignals::received() != 0; });
  StepProfile profile(training, graphed);
  MemoryPlan memory_plan(training);
  struct UnderWay {  // a step without a known outcome
    RunState state;
    StepCost cost;
    std::chrono::steady_clock::time_point begun;
  };
  std::deque<UnderWay> under_way;
  std::chrono::steady_clock::time_point last_known;
  bool stop = false;
  auto settle = [&] {
    while (std::optional<StepOutcome> outcome = steps.outcome()) {
      UnderWay done = under_way.front();
      under_way.pop_front();
      // If the host ran ahead, a step lasts from the end of the previous one to its own.
      if (!done.cost.comm_s)
        done.cost.seconds =
            std::chrono::duration<double>(outcome->known - std::max(last_known, done.begun))
                .count();
      last_known = outcome->known;
      state.skipped += outcome->updated ? 0 : 1;
      stop = stop || outcome->stop;
      report.step(done.state, *outcome, done.cost);
      not_finite.saw(done.state, *outcome, report);
    }
  };

  bool first = true;
  while (state.step < training.steps && !stop) {
    std::chrono::nanoseconds waited = feed->waited();
    const bool eager = profile.active();
    profile.before_step();
    memory_plan.before_step();
    signals.begin_part("step");
    rank_status::set_step(state.step + 1);
    const auto begun_at = std::chrono::steady_clock::now();
    report.timed(Report::kStep, [&] { steps.take(feed->next(), eager); });
    const std::string profiled = profile.after_step();
    ++state.step;
    state.position = feed->position();
    state.tokens += config.train.batch * training.trainee.tokens_per_sample;
    under_way.push_back(
        {state, report.cost(feed->waited() - waited, steps.host_is_ahead()), begun_at});
    training.scheduler->set_steps(state.step);
    const bool last = state.step == training.steps;
    const bool evaluates = due(config.train.eval_every, state.step);
    const bool samples = due(config.train.sample_every, state.step);
    const bool saves = due(config.checkpoint.every, state.step);
    if (last || evaluates || samples || saves) steps.finish();
    settle();
    if (!profiled.empty()) report.line(profiled);
    if (std::string memory = memory_plan.after_step(); !memory.empty()) report.line(memory);
    if (first && config.checkpoint.async && config.checkpoint.every > 0)
      checkpoint::prepare_async(training.sharded, training.optimizer.get());
    first = false;
    const bool goes_on = !last && !stop;
    if (evaluates && goes_on) evaluate_now(report, training, state, signals);
    if (samples && goes_on) signals.begin_part("sample");
    if (samples && goes_on) sample_now(report, training, state);
    if (saves && goes_on) {
      report.settle();  // a run killed later then has all lines up to its checkpoint
      save_now();
    }
  }
  steps.finish();
  settle();
  if (std::string text = profile.finish(); !text.empty()) report.line(text);
  // Save first: what follows may fail or be killed.
  bool stopped = stop && state.step < training.steps;
  bool wanted = config.checkpoint.at_end || due(config.checkpoint.every, state.step);
  if (stopped) report.line("stopping after step " + std::to_string(state.step) + ", as requested");
  if (wanted && saved_at != state.step) save_now();
  signals.begin_part("save", kSaveSeconds);
  report.timed(Report::kCheckpoint, [&] { training.saving.wait(); });
  if (!stopped) {
    evaluate_now(report, training, state, signals);
    signals.begin_part("sample");
    sample_now(report, training, state);
  }
  report.finish();
  if (world.rank() != 0) return;
  fs::path checkpoint = begun.directory.checkpoint(saved_at);
  if (!fs::exists(checkpoint)) {
    std::cout << "\nNo checkpoint was written: checkpoint.at_end is false.\n";
  } else {
    std::cout << "\nCheckpoint: " << checkpoint.string() << "\n";
    if (stopped)
      std::cout << "Resume with: "
                << paint(STDOUT, "1",
                         fsdp_command() + " train --dir " +
                             shell_word(begun.directory.root.string()) + " --resume")
                << "\n";
    else
      suggest_next(training);
  }
  std::cout << std::flush;
}

// Runs work(), and explains an out-of-memory error.
template <typename Work>
auto with_memory(const World& world, const Config& config, const Sharded& sharded, Work work) {
  try {
    return work();
  } catch (const std::exception& problem) {
    if (!is_out_of_memory(problem)) throw;
    throw explain_out_of_memory(world, config, sharded, problem);
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
  Training training = with_memory(world, request.config, Sharded(),
                                  [&] { return assemble(world, request.config, begun.directory); });
  with_memory(world, training.config, training.sharded,
              [&] { run(request, begun, training, signals); });
}

}  // namespace fsdp::train
