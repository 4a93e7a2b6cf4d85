#include "train/report.h"

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/environment.h"
#include "base/format.h"
#include "base/terminal.h"
#include "comm/core/flight_recorder.h"
#include "fsdp/version.h"
#include "observe/event_log.h"
#include "observe/loss_history.h"
#include "observe/progress.h"
#include "observe/tensorboard.h"
#include "observe/throughput.h"
#include "train/device.h"
#include "train/owner.h"
#include "train/preference.h"
#include "train/rank_figures.h"

namespace fsdp::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

constexpr int64_t kWarmup = 3;        // first steps, which say little about the others
constexpr int64_t kAdviceEvery = 20;  // steps, at least, to judge speed by
constexpr size_t kLosses = 50;
constexpr size_t kComparisons = 3;  // of ranks, the latest
constexpr int kPlainWidth = 80;     // columns of the loss curve without a terminal

// A model may write control characters, which would confuse a terminal.
std::string printable(const std::string& text) {
  std::string out = "  ";
  for (char c : text) {
    auto byte = static_cast<unsigned char>(c);
    bool control = (byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7f;
    out += control ? '?' : c;
    if (c == '\n') out += "  ";
  }
  return out;
}

std::string shown_sample(const std::string& text) {
  return formatted("{}\n{}", paint(STDOUT, "1", "The model writes:"), printable(text));
}

// Copies of the model, whose gradients are summed after those of the ranks that share one.
int replicas_of(const shard::ShardConfig& shard, const World& world) {
  if (shard.strategy == ShardingStrategy::NO_SHARD) return world.size();
  if (shard.strategy != ShardingStrategy::HYBRID_SHARD) return 1;
  return world.size() /
         (shard.shard_ranks > 0 ? static_cast<int>(shard.shard_ranks) : world.local_size());
}

observe::RunFacts facts_of(const Training& training) {
  const Config& config = training.config;
  const World& world = training.world;
  observe::RunFacts facts;
  facts.world = world.size();
  facts.ranks_on_host = world.local_size();
  facts.cores = static_cast<int>(std::thread::hardware_concurrency());
  facts.gpu = !world.device().is_cpu();
  facts.backend = world.backend();
  facts.torchrun =
      environment::text("TORCHELASTIC_RUN_ID").has_value() && world.launcher() == "torchrun";
  if (auto threads = environment::integer("OMP_NUM_THREADS"))
    facts.omp_threads = static_cast<int>(*threads);
  facts.precision = config.shard.precision;
  const bool fp32 = config.shard.precision == shard::Precision::kFp32;
  facts.reduce = fp32 ? shard::Reduce::kFp32 : config.shard.reduce;
  facts.replicas = replicas_of(config.shard, world);
  facts.grad_scaler = training.scaler != nullptr;
  facts.clip = config.train.clip;
  int64_t rows = config.train.batch / training.share().ranks;
  facts.micro_batch = config.train.micro_batch > 0 ? config.train.micro_batch : rows;
  facts.accumulation = (rows + facts.micro_batch - 1) / facts.micro_batch;
  int64_t bytes = fp32 ? 4 : 2;
  std::vector<Unit> units = training.sharded.units();
  for (size_t i = 1; i < units.size(); ++i)  // not the root unit, which is what is left over
    facts.units.push_back({units[i].name(), units[i].numel() * bytes});
  return facts;
}

}  // namespace

struct Report::Screen {
  Screen(const Training& training, const RunState& start)
      : metrics(training.directory.metrics().string(), start.step),
        happened(training.directory.events().string()),
        plot{.width = terminal_width(STDOUT) > 0 ? terminal_width(STDOUT) : kPlainWidth,
             .unicode = terminal_width(STDOUT) > 0 && observe::locale_is_utf8(),
             .colour = has_colour(STDOUT)},
        progress(std::cout, {.steps = training.steps,
                             .width = terminal_width(STDOUT),
                             .colour = plot.colour,
                             .unicode = plot.unicode,
                             .every = training.config.log.every}),
        adviser(training.config.log.silence),
        facts(facts_of(training)) {
    if (training.config.log.tensorboard)
      events.emplace(training.directory.tensorboard().string(),
                     start.step > 0 ? std::optional(start.step) : std::nullopt);
    const Config& config = training.config;
    double given = config.log.peak_tflops;
    peak = given > 0 ? given
                     : observe::peak_tflops(device_name(training.world.device()),
                                            enum_name(config.shard.precision));
  }

  observe::MetricsLog metrics;
  observe::EventLog happened;
  observe::PlotOptions plot;
  observe::Progress progress;
  observe::LossHistory losses;
  observe::Adviser adviser;
  observe::RunFacts facts;
  std::optional<observe::EventWriter> events;
  std::optional<double> peak;               // TFLOP/s of one device
  std::optional<observe::StepRecord> held;  // of the last step; an evaluation may add to it
  std::string last_sample;                  // for finish()
};

Report::Report(const Training& training, const RunState& start)
    : training_(training), begin_(Clock::now()), step_(start.step) {
  check_owner();  // opening the files changes them
  if (training.world.rank() == 0) screen_ = std::make_unique<Screen>(training, start);
  nlohmann::ordered_json processes = gather_processes(training.world);
  if (screen_) {
    nlohmann::ordered_json facts = start_facts();
    facts["processes"] = std::move(processes);
    event(start.step > 0 ? "resume" : "start", facts);
    for (const observe::Advice& advice : screen_->adviser.news(screen_->facts)) warn(advice);
  }
  training.sharded.reset_traffic();
}

nlohmann::ordered_json Report::start_facts() const {
  const World& world = training_.world;
  int64_t parameters = 0;
  const std::vector<Unit> units = training_.sharded.units();
  for (const Unit& unit : units) parameters += unit.numel();
  const std::string device = device_name(world.device());
  return {{"version", FSDP_VERSION},
          {"model", training_.task.title},
          {"parameters", parameters},
          {"units", units.size()},
          {"steps", training_.steps},
          {"ranks", world.size()},
          {"ranks_on_host", world.local_size()},
          {"device", device.empty() ? "CPU" : device},
          {"backend", world.backend()},
          {"precision", enum_name(training_.config.shard.precision)},
          {"strategy", enum_name(training_.config.shard.strategy)}};
}

Report::~Report() {
  try {
    settle();                        // if an error ended the run, its last step matters most
  } catch (const std::exception&) {  // the error that ended the run is the one to report
  }
}

double Report::timed(Part part, const std::function<void()>& work) {
  // Excludes the traffic of earlier evaluations and samples.
  if (part == kStep) exposed_before_s_ = seconds(training_.sharded.traffic().exposed);
  const auto waited_before = comm::flight::waited();
  auto start = Clock::now();
  work();
  double took = seconds(Clock::now() - start);
  if (part == kStep) last_step_s_ = took;
  if (part == kStep) last_wait_s_ = seconds(comm::flight::waited() - waited_before);
  if (part == kCheckpoint) summary_.checkpoint_s += took;
  if (part == kEvaluation) summary_.evaluation_s += took;
  return took;
}

StepCost Report::cost(std::chrono::nanoseconds waited, bool replayed) const {
  StepCost cost{.seconds = last_step_s_,
                .data_s = seconds(waited),
                .comm_s = std::nullopt,
                .wait_s = std::nullopt,
                .lr = training_.optimizer->lr()};
  if (replayed) return cost;
  cost.comm_s = seconds(training_.sharded.traffic().exposed) - exposed_before_s_;
  // On a GPU the host doesn't wait; the compute stream waits for the communication's.
  cost.wait_s = training_.world.backend() == "nccl" ? cost.comm_s : last_wait_s_;
  return cost;
}

void Report::step(const RunState& state, const StepOutcome& outcome, const StepCost& cost) {
  const Config& config = training_.config;
  int64_t tokens = config.train.batch * training_.task.tokens_per_sample;
  double flops = training_.task.flops_per_sample * static_cast<double>(config.train.batch);
  double tflops = flops / cost.seconds / 1e12 / training_.world.size();
  double comm = cost.comm_s.value_or(0);

  step_ = state.step;
  ++summary_.steps;
  summary_.skipped += outcome.updated ? 0 : 1;
  summary_.tokens += tokens;
  summary_.data_s += cost.data_s;
  summary_.comm_s += comm;
  waited_s_ += cost.wait_s.value_or(0);
  summary_.compute_s += cost.seconds - cost.data_s - comm;
  window_.steps += 1;
  window_.step_s += cost.seconds;
  window_.data_s += cost.data_s;
  window_.comm_s += comm;
  window_.wait_s += cost.wait_s.value_or(0);
  if (!summary_.first_loss) summary_.first_loss = outcome.loss;
  summary_.last_loss = outcome.loss;
  summary_.peak_memory_mb =  // --profile resets the device's own peak
      std::max(summary_.peak_memory_mb, peak_memory_mb(training_.world.device()));
  if (!screen_) return;

  observe::StepRecord record{
      .step = state.step,
      .epoch = double(state.position) / double(training_.corpus->samples_per_epoch()),
      .loss = outcome.loss,
      .grad_norm = outcome.norm,
      .lr = cost.lr,
      .tokens = state.tokens,
      .tokens_per_s = double(tokens) / cost.seconds,
      .tflops = tflops,
      .mfu = observe::mfu(tflops, screen_->peak),
      .memory_mb = summary_.peak_memory_mb,
      .step_ms = cost.seconds * 1e3,
      .data_ms = cost.data_s * 1e3,
      .skipped = !outcome.updated};
  if (cost.comm_s) record.comm_ms = *cost.comm_s * 1e3;
  if (training_.scaler) record.scale = training_.scaler->scale();
  if (!training_.task.mixtures.all.empty())
    add_experts(record, figures_of(training_.task.mixtures, outcome.tally));
  if (training_.task.prefers && outcome.tally[kPairs] > 0) {
    auto mean = [&](PreferenceTally what) { return outcome.tally[what] / outcome.tally[kPairs]; };
    record.reward_chosen = mean(kChosenRewards);
    record.reward_rejected = mean(kRejectedRewards);
    record.reward_accuracy = mean(kRightOnes);
  }
  settle();
  screen_->held = record;
  screen_->losses.step(record.step, record.loss);
  screen_->progress.step(record);
  advise(record);
}

void Report::add_experts(observe::StepRecord& record, const ExpertFigures& figures) {
  record.expert_load_most = figures.most;
  record.expert_load_least = figures.least;
  record.router_entropy = figures.entropy;
  record.dropped_tokens = figures.dropped;
  const int64_t every = training_.config.log.compare_ranks;
  if (every > 0 && record.step % every == 0) record.expert_load = figures.load;
  std::vector<int64_t>& idle = screen_->facts.expert_idle_steps;
  size_t expert = 0;
  for (const std::vector<double>& mixture : figures.load)
    for (const double load : mixture) {
      if (expert == idle.size()) idle.push_back(0);
      idle[expert] = load > 0 ? 0 : idle[expert] + 1;
      ++expert;
    }
}

void Report::evaluation(const RunState& state, const Evaluation& evaluation) {
  summary_.eval_loss = evaluation.loss;
  summary_.has_perplexity = evaluation.perplexity.has_value();
  if (!screen_) return;
  if (screen_->held) {
    screen_->held->eval_loss = evaluation.loss;
    screen_->held->eval_perplexity = evaluation.perplexity;
  }
  screen_->losses.evaluation(state.step, evaluation.loss);
  screen_->progress.evaluation(state.step, evaluation.loss, evaluation.perplexity);
}

void Report::sample(const RunState& state, const std::string& text) {
  if (!screen_) return;
  if (screen_->events) screen_->events->text("sample", formatted("```\n{}\n```", text), state.step);
  if (state.step >= training_.steps)
    screen_->last_sample = text;
  else
    line(shown_sample(text));
}

void Report::line(const std::string& text) {
  if (screen_) screen_->progress.line(text);
}

void Report::event(const std::string& kind, const nlohmann::ordered_json& facts) {
  if (!screen_) return;
  check_owner();
  screen_->happened.write(kind, step_, facts);
}

void Report::warn(const observe::Advice& advice) {
  line(observe::describe(advice));
  event("warning", {{"name", advice.name}, {"text", advice.text}, {"hint", advice.hint}});
}

void Report::compare_ranks(bool now) {
  ++compared_;
  const bool rare = (compared_ & (compared_ - 1)) == 0;  // 1, 2, 4, 8, …
  if (summary_.steps == 0 || (!now && !rare)) return;
  const auto steps = static_cast<double>(summary_.steps);
  const double all_s = summary_.compute_s + summary_.comm_s + summary_.data_s;
  const std::vector<RankFigures> ranks =
      gather_figures(training_.world, {.step_ms = 1e3 * all_s / steps,
                                       .data_ms = 1e3 * summary_.data_s / steps,
                                       .comm_ms = 1e3 * summary_.comm_s / steps,
                                       .wait_ms = 1e3 * waited_s_ / steps,
                                       .memory_mb = summary_.peak_memory_mb});
  if (screen_) event("ranks", {{"steps", summary_.steps}, {"ranks", to_json(ranks)}});
}

void Report::compare_window(int64_t step) {
  const int64_t every = training_.config.log.compare_ranks;
  if (every == 0 || step % every != 0 || training_.world.size() == 1) return;
  const double to_ms = 1e3 / std::max(1.0, window_.steps);
  const std::vector<RankFigures> ranks =
      gather_figures(training_.world, {.step_ms = window_.step_s * to_ms,
                                       .data_ms = window_.data_s * to_ms,
                                       .comm_ms = window_.comm_s * to_ms,
                                       .wait_ms = window_.wait_s * to_ms,
                                       .memory_mb = summary_.peak_memory_mb});
  window_ = {};
  if (!screen_) return;
  std::vector<observe::RankSpeed> speeds;
  for (const RankFigures& rank : ranks) {
    speeds.push_back({rank.host, rank.step_ms, rank.wait_ms});
    if (!screen_->held) continue;
    screen_->held->rank_step_ms.push_back(rank.step_ms);
    screen_->held->rank_wait_ms.push_back(rank.wait_ms);
  }
  std::vector<std::vector<observe::RankSpeed>>& all = screen_->facts.speeds;
  if (step > kWarmup) all.push_back(std::move(speeds));
  if (all.size() > kComparisons) all.erase(all.begin());
}

void Report::settle() {
  if (!screen_ || !screen_->held) return;
  observe::StepRecord record = *screen_->held;
  screen_->held.reset();
  write(record);
  if (screen_->events) screen_->events->flush();
}

void Report::check_owner() const {
  if (training_.owner) training_.owner->check();
}

void Report::write(const observe::StepRecord& record) {
  check_owner();
  screen_->metrics.write(record);
  if (!screen_->events) return;
  auto scalar = [&](const char* tag, std::optional<double> value) {
    if (value) screen_->events->scalar(tag, *value, record.step);
  };
  scalar("train/loss", record.loss);
  scalar("train/grad_norm", record.grad_norm);
  scalar("train/lr", record.lr);
  scalar("train/epoch", record.epoch);
  scalar("speed/tokens_per_s", record.tokens_per_s);
  scalar("speed/tflops", record.tflops);
  scalar("speed/mfu", record.mfu);
  scalar("speed/step_ms", record.step_ms);
  scalar("speed/data_ms", record.data_ms);
  scalar("speed/comm_ms", record.comm_ms);
  scalar("memory/peak_mb", record.memory_mb);
  scalar("eval/loss", record.eval_loss);
  scalar("eval/perplexity", record.eval_perplexity);
  scalar("train/scale", record.scale);
  scalar("rewards/chosen", record.reward_chosen);
  scalar("rewards/rejected", record.reward_rejected);
  scalar("rewards/accuracy", record.reward_accuracy);
  scalar("experts/load_most", record.expert_load_most);
  scalar("experts/load_least", record.expert_load_least);
  scalar("experts/router_entropy", record.router_entropy);
  scalar("experts/dropped_tokens", record.dropped_tokens);
}

void Report::advise(const observe::StepRecord& record) {
  observe::RunFacts& facts = screen_->facts;
  facts.losses.push_back(record.loss);
  if (facts.losses.size() > kLosses) facts.losses.erase(facts.losses.begin());
  if (summary_.steps > kWarmup) {
    ++facts.steps;
    facts.skipped += record.skipped ? 1 : 0;
    facts.step_s += record.step_ms / 1e3;
    facts.data_s += record.data_ms / 1e3;
    facts.exposed_comm_s += record.comm_ms.value_or(0) / 1e3;
    facts.allocator_retries = allocator_retries(training_.world.device()) - first_retries_;
  } else {
    first_retries_ = allocator_retries(training_.world.device());
  }
  facts.memory_share = memory_share(training_.world.device());
  observe::RunFacts seen = facts;
  if (facts.steps < kAdviceEvery) {
    seen.steps = 0;
    seen.skipped = 0;
    seen.step_s = seen.data_s = seen.exposed_comm_s = 0;
  }
  for (const observe::Advice& advice : screen_->adviser.news(seen)) warn(advice);
}

void Report::finish(bool stopped) {
  compare_ranks(/*now=*/true);
  summary_.total_s = seconds(Clock::now() - begin_);
  if (!screen_) return;
  settle();
  const double known_s = summary_.compute_s + summary_.comm_s + summary_.data_s +
                         summary_.checkpoint_s + summary_.evaluation_s;
  event("end", {{"stopped", stopped},
                {"seconds",
                 {{"compute", summary_.compute_s},
                  {"exposed communication", summary_.comm_s},
                  {"data", summary_.data_s},
                  {"checkpoints", summary_.checkpoint_s},
                  {"evaluation", summary_.evaluation_s},
                  {"other", std::max(0.0, summary_.total_s - known_s)}}}});
  screen_->progress.finish();
  if (summary_.steps > 0) {
    double steps_s = summary_.compute_s + summary_.comm_s + summary_.data_s;
    summary_.tflops = training_.task.flops_per_sample * double(training_.config.train.batch) *
                      double(summary_.steps) / steps_s / 1e12 / training_.world.size();
    summary_.mfu = observe::mfu(*summary_.tflops, screen_->peak);
  }
  std::string curve = screen_->losses.plot(screen_->plot);
  if (!curve.empty()) std::cout << "\n" << curve;
  std::cout << "\n" << observe::describe(summary_, screen_->plot.colour);
  if (!screen_->last_sample.empty())
    std::cout << "\n" << shown_sample(screen_->last_sample) << "\n";
  std::cout << std::flush;
}

}  // namespace fsdp::train
