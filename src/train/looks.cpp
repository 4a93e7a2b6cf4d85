#include "train/looks.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "base/format.h"
#include "base/log.h"
#include "fsdp/error.h"
#include "train/device.h"
#include "train/sample.h"

namespace fsdp::train {
namespace {

int64_t micro_batch(const Training& training) {
  const TrainConfig& config = training.config.train;
  return config.micro_batch > 0 ? config.micro_batch : config.batch / training.share().ranks;
}

}  // namespace

void evaluate_now(Report& report, const Training& training, const RunState& state,
                  StopSignals& signals) {
  std::unique_ptr<Feed> feed = training.corpus->validation(training.share());
  if (!feed) return;
  int64_t batches = training.corpus->validation_batches();
  if (training.config.train.eval_batches > 0)
    batches = std::min(batches, training.config.train.eval_batches);
  signals.begin_part("evaluation", static_cast<double>(batches) * signals.slowest("step"));
  Evaluation result;
  report.timed(Report::kEvaluation, [&] {
    result = evaluate(training.world, training.task, *feed, batches, micro_batch(training));
  });
  report.evaluation(state, result);
}

void sample_now(Report& report, const Training& training, const RunState& state,
                StopSignals& signals) {
  signals.begin_part("sample");
  const TrainConfig& config = training.config.train;
  auto tokenizer = training.corpus->tokenizer();
  if (!training.task.text || !tokenizer || config.sample_tokens == 0) return;
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
    generate(*training.task.text, world.device(), prompt,
             {.temperature = config.sample_temperature,
              .seed = static_cast<uint64_t>(config.seed) + state.step,
              .tokens = config.sample_tokens},
             take, world.size() > 1 ? agree : std::function<int64_t(int64_t)>());
  };
  try {
    report.timed(Report::kEvaluation, write);
    report.sample(state, text + decoder.finish());
  } catch (const Error& problem) {  // non-finite logits, which are the same on every rank
    report.line(formatted("no sample: {}", log::plain(problem)));
  }
}

void show_cost_of_determinism(Report& report, Training& training, const Samples& batch) {
  auto seconds = [&](bool on) {
    set_deterministic(on);
    double best = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 4; ++i) {  // the first warms up
      synchronize(training.world.device());
      auto start = std::chrono::steady_clock::now();
      const Samples part = micro_batches_of(batch, micro_batch(training)).front();
      training.task.loss_sum(on_device(part, training.world.device())).backward();
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
  if (training.task.tally) training.task.tally->zero_();
  report.line(
      formatted("deterministic operators: {:.1f} ms per micro-batch, {:.1f} ms without ({:+.1f} %)",
                fixed * 1e3, free * 1e3, (fixed / free - 1) * 100));
}

}  // namespace fsdp::train
