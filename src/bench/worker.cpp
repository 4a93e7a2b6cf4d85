// A rank of a benchmark of training steps: the model of a row with a batch of random data, the same
// weights and data as in bench/peers/peer_fsdp2.py; its step, sharded or not; and its measurements.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <utility>

#include "base/log.h"
#include "bench/harness.h"
#include "fsdp/error.h"
#include "fsdp/init_parameters.h"
#include "fsdp/models.h"
#include "fsdp/plan.h"
#include "fsdp/recompute.h"
#include "fsdp/train_step.h"
#include "kernels/update.h"
#include "observe/trace.h"
#include "shard/deferred.h"
#include "shard/model.h"
#include "shard/update.h"
#include "train/device.h"
#include "train/plan_config.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

using Inputs = TrainStep::Inputs;
using Draw = std::function<void(torch::nn::Module& one)>;
using Passed = std::function<void(const std::string& stage)>;

constexpr double kMiB = 1 << 20;
const AdamWOptions kAdamW = {.lr = 1e-4, .betas = {0.9, 0.95}, .weight_decay = 0.1};  // the peer's

// --- the model and its data ---

TrainStep::Loss loss_of(const train::TrainTask& task) {
  return [text = task.text, module = task.module](const Inputs& inputs) {
    return text ? text->forward(inputs[0], inputs[1])
                : module->as<models::MLP>()->forward(inputs[0], inputs[1]);
  };
}

// On the device or, with offload, on the host, as a data loader provides it.
Inputs draw_inputs(const Row& row, const World& world) {
  const at::Device where = row.offloads() ? at::Device(at::kCPU) : world.device();
  at::Generator random = at::detail::createCPUGenerator(1234 + world.rank());
  if (row.model == "mlp") {
    // Without sharding, nothing else casts them.
    const auto type = row.mode == "plain" && row.dtype != "fp32" ? at::kBFloat16 : at::kFloat;
    const at::Tensor x = at::randn({row.batch, row.width}, random, at::kFloat);
    const at::Tensor targets = at::randn({row.batch, row.width}, random, at::kFloat);
    return {x.to(where, type), targets.to(where, type)};
  }
  const at::Tensor data =
      at::randint(0, row.vocab, {row.batch, row.seq + 1}, random, at::kLong).to(where);
  return {data.slice(1, 0, row.seq).contiguous(), data.slice(1, 1).contiguous()};
}

// Draws what a constructor would, module by module. The seed of each matrix of a Llama is its index
// among the model's parameters, as in the peer, so both draw the same in any order.
Draw draw_of(const train::TrainTask& task) {
  if (!task.text)
    return [](torch::nn::Module& one) {
      if (auto* linear = one.as<torch::nn::LinearImpl>()) linear->reset_parameters();
    };
  struct Start {
    uint64_t seed;
    Distribution distribution;
  };
  std::unordered_map<const c10::TensorImpl*, Start> starts;
  for (const auto& parameter : task.module->named_parameters())  // tied ones share a seed
    starts.try_emplace(
        parameter.value().unsafeGetTensorImpl(),
        Start{starts.size(), task.initial(parameter.key(), parameter.value().sizes())});
  return [starts](torch::nn::Module& one) {
    for (const at::Tensor& parameter : one.parameters(/*recurse=*/false)) {
      const Start& start = starts.at(parameter.unsafeGetTensorImpl());
      if (parameter.dim() > 1) torch::manual_seed(start.seed);
      init_tensor_(parameter, start.distribution);
    }
  };
}

// torch.optim.AdamW(fused=True) and torch.nn.utils.clip_grad_norm_, over whole parameters. This is
// as fast as plain C++ on LibTorch gets.
class PlainAdamW {
 public:
  // In bfloat16, the model gets float32 masters.
  PlainAdamW(torch::nn::Module& model, bool bf16) {
    for (const at::Tensor& parameter : model.parameters()) {
      const auto same = [&](const at::Tensor& other) { return other.is_same(parameter); };
      if (std::ranges::any_of(parameters_, same)) continue;  // tied
      parameters_.push_back(parameter);
      const at::Tensor values = parameter.detach().view(-1);
      const at::Tensor master = bf16 ? values.clone() : values;
      states_.push_back({master, {}, at::zeros_like(master), at::zeros_like(master)});
    }
    if (!bf16) return;
    model.to(at::kBFloat16);
    for (size_t i = 0; i < states_.size(); ++i) states_[i].low = parameters_[i].detach().view(-1);
  }

  void clip(double max_norm) {
    torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
    const at::Tensor total = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients)));
    at::_foreach_mul_(gradients, (max_norm / (total + 1e-6)).clamp_max(1.0));
  }

  void step() {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < states_.size(); ++i)
      states_[i].grad = std::exchange(parameters_[i].mutable_grad(), {}).view(-1);
    ++how_.step;
    kernels::aten::adamw(states_, {&how_, 1}, /*factor=*/{});
    for (kernels::AdamWTensors& state : states_) state.grad.reset();
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<kernels::AdamWTensors> states_;  // of each parameter, flat
  kernels::AdamWStep how_ = {kAdamW.lr,  kAdamW.betas.first,  kAdamW.betas.second,
                             kAdamW.eps, kAdamW.weight_decay, /*step=*/0};
};

// --- the step ---

struct Training {
  Row row;
  at::Device device;
  train::TrainTask task;
  Inputs inputs;                     // this rank's batch
  Sharded sharded;                   // no model if row.mode is plain
  std::shared_ptr<Optimizer> optimizer;  // of the sharded model; null: it isn't updated
  TrainStepOptions how;
  std::shared_ptr<TrainStep> step;    // null: steps are taken stage by stage
  std::shared_ptr<PlainAdamW> plain;  // of a model that isn't sharded
  // Steps before the memory peak counts. A graph allocates while it is captured and not when it is
  // replayed, so its peak counts from just before the capture.
  int settled = 0;
};

Training make_training(const Row& row, const World& world) {
  const bool unfilled = row.init == "device", graph = row.mode == "graph", offload = row.offloads();
  const train::Config config = config_of(row);
  torch::manual_seed(0);
  Training training{.row = row,
                    .device = world.device(),
                    .task = unfilled ? train::make_unfilled_task(config, row.vocab)
                                     : train::make_task(config, row.vocab),
                    .inputs = draw_inputs(row, world),
                    .settled = offload ? 0 : row.warmup};
  const Draw draw = unfilled ? draw_of(training.task) : Draw();
  if (row.mode == "plain") {
    torch::nn::Module& model = *training.task.module;
    shard::deferred::allocate(model, world.device());
    if (draw) model.apply(draw);
    model.to(world.device());
    training.plain = std::make_shared<PlainAdamW>(model, row.dtype != "fp32");
    return training;
  }
  training.sharded = train::shard_task(world, config, training.task, /*initialize=*/!unfilled);
  if (draw) training.sharded.materialize(world.device(), draw);
  if (row.mode == "tape") return training;
  if (row.optim == "muon")
    training.optimizer = train::make_optimizer(config, training.sharded);
  else
    training.optimizer = std::make_shared<AdamW>(training.sharded, kAdamW);
  training.how = {.clip = row.clip,
                  .graph = graph,
                  .warmup = std::max(1, row.warmup - 2),  // then one step captures and one replays
                  .reduce_once = !graph && !offload && row.on.ranks > 1,
                  .step_in_backward = offload && row.mode != "off" && row.clip <= 0};
  if (graph) training.settled = training.how.warmup;
  if (!row.stages)
    training.step = std::make_shared<TrainStep>(training.sharded, *training.optimizer,
                                                loss_of(training.task), training.how);
  return training;
}

Inputs loaded(const Training& training) {
  RECORD_USER_SCOPE(observe::kLoadingScope);
  Inputs inputs = training.inputs;
  for (at::Tensor& input : inputs) input = input.to(training.device);
  return inputs;
}

// Takes a step by training.step and returns the mean loss of all micro-batches and ranks.
at::Tensor take_step(const Training& training) {
  const auto count = static_cast<size_t>(training.row.accumulate);
  return (*training.step)(std::vector<Inputs>(count, loaded(training))).loss;
}

// Takes a step stage by stage and returns the loss of the last micro-batch on this rank. `passed`
// is called when the host has passed forward, backward, clip and update.
at::Tensor take_stages(
    const Training& training, const Passed& passed = [](const auto&) {}) {
  const Row& row = training.row;
  const Inputs inputs = loaded(training);
  at::Tensor loss;
  for (int64_t i = 1; i <= row.accumulate; ++i) {
    const bool last = i == row.accumulate;
    if (training.how.reduce_once) training.sharded.set_requires_gradient_sync(last);
    if (training.how.step_in_backward && last) training.optimizer->step_in_backward();
    loss = loss_of(training.task)(inputs);
    passed("forward");
    (row.accumulate > 1 ? loss / static_cast<double>(row.accumulate) : loss).backward();
    passed("backward");
  }
  if (row.clip > 0 && training.plain) training.plain->clip(row.clip);
  if (row.clip > 0 && !training.plain) training.sharded.clip_grad_norm_(row.clip);
  passed("clip");
  if (training.plain) training.plain->step();
  if (training.optimizer) training.optimizer->step();
  if (!training.plain) training.sharded.zero_grad();
  passed("update");
  return loss.detach();
}

// --- measurements ---

// Means or maxima over ranks of each value.
std::vector<double> reduced(const std::vector<double>& values, ReduceOp how, const World& world) {
  at::Tensor all = at::tensor(values, at::kDouble).to(world.device());
  world.comm().all_reduce(all, how);
  all = all.cpu();
  return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel()};
}

void add_gpu(Json& line, const World& world) {
  if (world.device().is_cpu()) return;
  line["gpu"] = train::device_name(world.device());
  const int there = c10::impl::VirtualGuardImpl(world.device().type()).deviceCount();
  line["devices"] = std::min(there, world.size());
}

// Takes a step and adds its times; returns the loss.
double time_step(const Training& training, Samples& ms) {
  std::map<std::string, double> stages;  // of all micro-batches
  const Stopwatch watch;
  double before = 0;
  const auto passed = [&](const std::string& stage) {
    const double now = watch.seconds() * 1e3;
    stages[stage + "_ms"] += now - before;
    before = now;
  };
  const at::Tensor loss = training.step ? take_step(training) : take_stages(training, passed);
  ms.add("cpu_issue_ms", watch.seconds() * 1e3);
  train::synchronize(training.device);
  ms.add("step_ms", watch.seconds() * 1e3);
  for (const auto& [stage, time] : stages) ms.add(stage, time);
  return loss.item<double>();
}

// Times are medians over steps on the host's clock, step_ms until the device is done, the others
// until the host has launched the work. mean_ms also waits for updates on the host.
Json time_steps(const Training& training, const World& world) {
  const Row& row = training.row;
  Samples ms;
  std::vector<double> losses;
  Stopwatch timed;
  for (int i = -row.warmup; i < row.steps; ++i) {
    if (i + row.warmup == training.settled) train::reset_peak_memory(world.device());
    if (i == 0) {
      world.comm().barrier();
      if (!training.plain) training.sharded.reset_traffic();
      ms = {};
      timed = {};
    }
    losses.push_back(time_step(training, ms));
  }
  if (!training.plain) shard::await_updates(*shard::lock(training.sharded));
  const double mean = timed.seconds() * 1e3 / row.steps, step = ms.median("step_ms") / 1e3;
  Json line = {{"ours", row.mode},
               {"world", world.size()},
               {"params", training.task.parameters},
               {"best_ms", std::ranges::min(ms.all["step_ms"])},
               {"mean_ms", mean},
               {"tok_s_rank", static_cast<double>(row.tokens()) / step},
               {"tflops_rank", row.flops() / step / 1e12},
               {"peak_alloc_mb", train::peak_memory_mb(world.device())},
               {"peak_reserved_mb", train::peak_reserved_mb(world.device())},
               {"maxrss_mb", train::peak_memory_mb(at::kCPU)}};
  ms.fill(line);
  if (!training.step)
    losses = reduced(losses, ReduceOp::AVG, world);  // else they are means already
  line["loss0"] = losses.front();
  line["loss"] = losses.back();
  for (double& loss : losses) loss = std::round(loss * 1e4) / 1e4;  // as the peer rounds them
  line["losses"] = losses;
  add_gpu(line, world);
  return line;
}

// Takes one more step and records what the engine and autograd keep at the end of forward, and what
// the engine keeps after backward: in total on rank 0; by kind, and with the bytes sent per step,
// on the rank that has most.
void add_memory(Json& line, const Training& training, const World& world) {
  const bool cpu = world.device().is_cpu();
  const Traffic sent = training.sharded.traffic();
  MemoryReport memory;
  training.sharded.count_activations(true);
  train::reset_peak_memory(world.device());
  take_stages(training, [&](const std::string& stage) {
    if (stage != "forward" && stage != "backward") return;
    memory = training.sharded.memory();
    line[stage + "_memory_mb"] = static_cast<double>(memory.total()) / kMiB;
    if (stage == "forward") line["activations_mb"] = static_cast<double>(memory.activations) / kMiB;
    if (!cpu) line[stage + "_peak_mb"] = train::peak_memory_mb(world.device());
  });
  training.sharded.count_activations(false);
  line["device_bytes"] =
      cpu ? memory.total() - memory.host : std::llround(line["peak_alloc_mb"].get<double>() * kMiB);
  line["host_bytes"] = memory.host;
  const int64_t steps = training.row.steps;
  const std::vector<std::pair<const char*, int64_t>> bytes = {
      {"parameters", memory.parameters},
      {"gathered_from", memory.gathered_from},
      {"gradients", memory.gradients},
      {"optimizer", memory.optimizer},
      {"unsharded", memory.unsharded},
      {"secondary", memory.secondary},
      {"reduce_buffers", memory.reduce_buffers},
      {"accumulated", memory.accumulated},
      {"total", memory.total()},
      {"all_gather", sent.all_gather / steps},
      {"reduce_scatter", sent.reduce_scatter / steps},
      {"all_reduce", sent.all_reduce / steps},
      {"all_to_all", sent.all_to_all / steps}};
  for (const auto& [kind, own] : bytes)
    line[kind] = std::llround(reduced({static_cast<double>(own)}, ReduceOp::MAX, world).front());
}

// The allocator's peak that a plan expects for eager steps; a warning if it can't be planned.
void add_plan(Json& line, const Row& row, const World& world) {
  try {
    train::ConfigPlan planned = train::plan_of(config_of(row), world.size(),
                                               train::gpu_of(world.device()), world.local_size());
    planned.options.clip = row.clip;
    const auto peak = plan(planned.model, planned.options).memory.peak();
    line["planned_mb"] = static_cast<double>(peak) / kMiB;
  } catch (const Error& problem) {
    log::warn(formatted("{}: memory can't be planned: {}", title_of(row), problem.what()));
  }
}

// Takes as many steps again under the profiler and records the nanoseconds of each part of a step.
void add_parts(Json& line, const Training& training) {
  try {
    observe::Trace trace;
    trace.start(/*all_threads=*/true);  // updates run on their own threads
    {
      RECORD_USER_SCOPE(observe::kSplitScope);
      for (int i = 0; i < training.row.steps; ++i) take_step(training);
      shard::await_updates(*shard::lock(training.sharded));
      train::synchronize(training.device);
    }
    for (const int64_t part : trace.split()) line["parts"].push_back(part / training.row.steps);
  } catch (const std::exception& problem) {  // keep what was timed
    log::warn(
        formatted("the profiler failed, so the parts of a step are left out: {}", problem.what()));
  }
}

// The cost of recording for recomputation (docs/recompute.md): times forwards without a policy and
// with one that records every block. The two alternate in one process, so that a slow period
// affects both. After each switch one step isn't timed: the engine checks the parameters again.
Json time_tape(Row row, const World& world) {
  constexpr int kTurn = 4;  // timed forwards between two switches
  row.accumulate = 1;
  row.clip = 0;
  row.activations = "none";
  const Training training = make_training(row, world);
  const RecomputePolicy policy(training.task.blocks);
  Json line = {{"ours", row.mode}, {"world", world.size()}};
  Samples ms;
  for (int i = 0; i < row.warmup; ++i) take_stages(training);
  for (int turn = 0; turn * kTurn < row.steps; ++turn)
    for (const std::string records : {"", "recorded_"}) {
      if (records.empty())
        remove_activation_checkpointing(training.sharded);
      else
        apply_activation_checkpointing(training.sharded, policy);
      take_stages(training);
      for (int i = 0; i < kTurn; ++i) {
        train::synchronize(training.device);
        const Stopwatch watch;
        const at::Tensor loss = take_stages(training, [&](const std::string& stage) {
          if (stage != "forward") return;
          ms.add(records + "forward_host_ms", watch.seconds() * 1e3);
          train::synchronize(training.device);
          ms.add(records + "forward_ms", watch.seconds() * 1e3);
        });
        line[records + "loss"] = loss.item<double>();
      }
    }
  const double without = ms.median("forward_ms"), with = ms.median("recorded_forward_ms");
  line["step_ms"] = with;  // every line has it
  line["more_percent"] = (with / without - 1) * 100;
  ms.fill(line);
  add_gpu(line, world);
  return line;
}

}  // namespace

Lines train_row(const Row& row, const World& world) {
  if (row.mode == "tape") return {time_tape(row, world)};
  const Training training = make_training(row, world);
  Json line = time_steps(training, world);
  if (row.mode == "graph") {
    line["replayed"] = training.step->replayed() ? 1 : 0;
    line["recordings"] = training.step->recordings();
    if (!training.step->why_eager().empty()) line["why_eager"] = training.step->why_eager();
  }
  if (row.memory) add_memory(line, training, world);
  if (row.plan && !training.plain && world.rank() == 0) add_plan(line, row, world);
  if (row.offloads()) add_parts(line, training);
  return {line};
}

}  // namespace fsdp::bench
