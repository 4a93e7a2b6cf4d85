// A rank of `fsdp bench train`: builds the model, trains it, and prints its measurements as one
// JSON object with the keys of bench/peers/peer_fsdp2.py.
//
// Modes ours and none also time the parts of a step, for the table of the CPU. eager, graph and
// plain are for named rows: whole steps, with accumulation and peak memory. none and plain are the
// same model without sharding.
#include <ATen/Parallel.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <iostream>

#include "bench/train.h"
#include "fsdp/fully_shard.h"
#include "fsdp/optim.h"
#include "fsdp/train_step.h"
#include "train/device.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

using std::chrono::steady_clock;

// torch.optim.AdamW(fused=True) and torch.nn.utils.clip_grad_norm_, over whole parameters.
// Parameters that aren't float32 have float32 masters.
class PlainAdamW {
 public:
  PlainAdamW(std::vector<at::Tensor> parameters, std::vector<at::Tensor> masters)
      : parameters_(std::move(parameters)), masters_(std::move(masters)) {
    for (const at::Tensor& master : masters_) {
      averages_.push_back(at::zeros_like(master));
      squares_.push_back(at::zeros_like(master));
      steps_.push_back(at::zeros({}, master.options().dtype(at::kFloat)));
    }
  }

  void clip(double max_norm) {
    torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients = all_gradients();
    at::Tensor total = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients)));
    at::Tensor factor = (max_norm / (total + 1e-6)).clamp_max(1.0);
    at::_foreach_mul_(gradients, factor);
  }

  void step() {
    torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients = all_gradients();
    for (at::Tensor& gradient : gradients)
      gradient = gradient.to(at::kFloat);  // no copy if it already is
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(masters_, gradients, averages_, squares_, {}, steps_, kLearningRate, kBeta1,
                      kBeta2, kWeightDecay, /*eps=*/1e-8, /*amsgrad=*/false, /*maximize=*/false);
    if (!masters_.front().is_same(parameters_.front())) at::_foreach_copy_(parameters_, masters_);
    for (at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
  }

 private:
  std::vector<at::Tensor> all_gradients() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& parameter : parameters_) all.push_back(parameter.grad());
    return all;
  }

  std::vector<at::Tensor> parameters_, masters_, averages_, squares_, steps_;
};

// Each parameter once: a tied one has two names.
std::vector<at::Tensor> distinct_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : module.parameters())
    if (std::none_of(found.begin(), found.end(),
                     [&](const at::Tensor& other) { return other.is_same(parameter); }))
      found.push_back(parameter);
  return found;
}

// A model without sharding, in the dtype of its row with float32 masters, and its optimizer: as
// fast as plain C++ on LibTorch gets.
struct Plain {
  Workload work;
  std::vector<at::Tensor> inputs;
  PlainAdamW optimizer;
  at::Tensor loss() const { return work.loss_of(inputs); }
};

Workload workload(const TrainBench& options, const World& world) {
  return make_workload(options.shape, world, options.init == "device");
}

Plain make_plain(const TrainBench& options, const World& world) {
  Workload work = workload(options, world);
  if (work.unfilled) draw_whole(work, world.device());
  work.module->to(world.device());
  std::vector<at::Tensor> parameters = distinct_parameters(*work.module), masters = parameters;
  std::vector<at::Tensor> inputs = work.inputs;
  if (options.shape.dtype == "bf16") {
    for (at::Tensor& master : masters) master = master.detach().clone();
    work.module->to(at::kBFloat16);
    for (at::Tensor& input : inputs)
      if (input.is_floating_point()) input = input.to(at::kBFloat16);
  }
  return {work, inputs, PlainAdamW(parameters, masters)};
}

ShardOptions shard_options(const TrainBench& options, const MixedPrecision& precision) {
  return {.strategy = train::parse_strategy(options.strategy), .mixed_precision = precision};
}

memory::ActivationsConfig rank_activations(const TrainBench& options) {
  const auto mode = parse_enum<memory::ActivationsMode>(options.activations);
  return {.mode = mode.value_or(memory::ActivationsMode::kNone), .keep_last = options.keep_last};
}

Sharded shard(const TrainBench& options, const Workload& work, const World& world,
              const MixedPrecision& precision) {
  return shard_workload(work, world, shard_options(options, precision), rank_activations(options));
}

AdamWOptions adamw_options() {
  return {.lr = kLearningRate, .betas = {kBeta1, kBeta2}, .weight_decay = kWeightDecay};
}

// --- steps by their parts ---

Timing train_sharded(const TrainBench& options, const World& world) {
  Workload work = workload(options, world);
  Sharded sharded = shard(options, work, world, mixed_precision(options.shape));
  AdamW optimizer(sharded, adamw_options());
  auto clip = [&] {
    if (options.clip > 0) sharded.clip_grad_norm_(options.clip);
  };
  auto update = [&] {
    optimizer.step();
    optimizer.zero_grad();
  };
  return time_steps({work.loss, clip, update}, options.warmup, options.steps, world);
}

Timing train_without(const TrainBench& options, const World& world) {
  Plain plain = make_plain(options, world);
  auto clip = [&] {
    if (options.clip > 0) plain.optimizer.clip(options.clip);
  };
  return time_steps({[&] { return plain.loss(); }, clip, [&] { plain.optimizer.step(); }},
                    options.warmup, options.steps, world);
}

// --- whole steps ---

double peak_reserved_mb(at::Device device) {
  if (device.is_cpu()) return train::peak_memory_mb(device);
  auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<double>(stats.reserved_bytes[kAll].peak) / (1 << 20);
}

struct WholeSteps {
  std::function<at::Tensor()> step;  // returns the loss
  bool of_all_ranks = false;         // the loss is already the mean over ranks
  // Steps after which the memory peak is reset. A graph allocates while it is captured and not when
  // it is replayed, so its peak counts from just before the capture.
  int settled = 0;
};

Json time_whole_steps(const TrainBench& options, const WholeSteps& whole, const World& world) {
  std::vector<double> times, issued, losses;
  for (int i = -options.warmup; i < options.steps; ++i) {
    if (i + options.warmup == whole.settled) train::reset_peak_memory(world.device());
    if (i == 0) world.comm().barrier();
    auto start = steady_clock::now();
    auto since = [&] { return std::chrono::duration<double>(steady_clock::now() - start).count(); };
    at::Tensor loss = whole.step();
    double host = since();
    train::synchronize(world.device());
    double all = since();
    losses.push_back(loss.item<double>());
    if (i < 0) continue;
    times.push_back(all);
    issued.push_back(host);
  }
  if (!whole.of_all_ranks) losses = means_over_ranks(losses, world);
  double step = median(times), tokens = static_cast<double>(tokens_of(options.shape));
  double flops = flops_of(options.shape);
  Json line = {{"ours", options.worker},
               {"world", world.size()},
               {"params", parameter_count(options.shape)},
               {"step_ms", step * 1e3},
               {"best_ms", *std::min_element(times.begin(), times.end()) * 1e3},
               {"cpu_issue_ms", median(issued) * 1e3},
               {"tok_s_rank", tokens / step},
               {"tflops_rank", flops / step / 1e12},
               {"peak_alloc_mb", train::peak_memory_mb(world.device())},
               {"peak_reserved_mb", peak_reserved_mb(world.device())},
               {"maxrss_mb", train::peak_memory_mb(at::kCPU)}};
  line.update(losses_of(losses));
  if (!world.device().is_cpu()) {
    line["gpu"] = train::device_name(world.device());
    int there = c10::impl::VirtualGuardImpl(world.device().type()).deviceCount();
    line["devices"] = std::min(there, world.size());
  }
  return line;
}

MixedPrecision precision_of(const TrainBench& options, const World& world) {
  return row_precision(options.shape, world, options.grad_dtype);
}

void add_plan(Json& line, const TrainBench& options, const World& world) {
  if (world.rank() != 0) return;
  if (auto mb =
          planned_mb(options.shape, world, shard_options(options, precision_of(options, world)),
                     rank_activations(options), options.clip))
    line["planned_mb"] = *mb;
}

// Takes one more step and records memory(), the activations that autograd keeps, and the
// allocator's peak at the end of forward, when nothing else is allocated.
void add_memory(Json& line, const Sharded& sharded, const Workload& work, Optimizer& optimizer,
                at::Device device) {
  auto mb = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  sharded.count_activations(true);
  train::reset_peak_memory(device);
  at::Tensor loss = work.loss();
  MemoryReport forward = sharded.memory();
  if (!device.is_cpu()) line["forward_peak_mb"] = train::peak_memory_mb(device);
  line["forward_memory_mb"] = mb(forward.total());
  line["activations_mb"] = mb(forward.activations);
  loss.backward();
  if (!device.is_cpu()) line["backward_peak_mb"] = train::peak_memory_mb(device);
  line["backward_memory_mb"] = mb(sharded.memory().total());
  sharded.count_activations(false);
  optimizer.zero_grad();
}

Json train_eager(const TrainBench& options, const World& world) {
  Workload work = workload(options, world);
  Sharded sharded = shard(options, work, world, precision_of(options, world));
  AdamW optimizer(sharded, adamw_options());
  auto parts = static_cast<double>(options.shape.accumulate);
  auto step = [&] {
    at::Tensor loss;
    for (int64_t i = 1; i <= options.shape.accumulate; ++i) {
      if (world.size() > 1) sharded.set_requires_gradient_sync(i == options.shape.accumulate);
      loss = work.loss();
      (parts > 1 ? loss / parts : loss).backward();
    }
    if (options.clip > 0) sharded.clip_grad_norm_(options.clip);
    optimizer.step();
    optimizer.zero_grad();
    return loss.detach();
  };
  Json line = time_whole_steps(options, {step, /*of_all_ranks=*/false, options.warmup}, world);
  add_memory(line, sharded, work, optimizer, world.device());
  add_plan(line, options, world);
  return line;
}

Json train_graphed(const TrainBench& options, const World& world) {
  Workload work = workload(options, world);
  Sharded sharded = shard(options, work, world, precision_of(options, world));
  AdamW optimizer(sharded, adamw_options());
  int warmup =
      std::max(1, options.warmup - 2);  // one step captures and one replays before timing starts
  TrainStep step(sharded, optimizer, work.loss_of, {.clip = options.clip, .warmup = warmup});
  std::vector<std::vector<at::Tensor>> batches(static_cast<size_t>(options.shape.accumulate),
                                               work.inputs);
  Json line = time_whole_steps(
      options, {[&] { return step(batches).loss; }, /*of_all_ranks=*/true, warmup}, world);
  line["replayed"] = step.replayed() ? 1 : 0;
  line["recordings"] = step.recordings();
  if (!step.why_eager().empty()) line["why_eager"] = step.why_eager();
  add_plan(line, options, world);
  return line;
}

Json train_plain(const TrainBench& options, const World& world) {
  Plain plain = make_plain(options, world);
  auto parts = static_cast<double>(options.shape.accumulate);
  auto step = [&] {
    at::Tensor loss;
    for (int64_t i = 0; i < options.shape.accumulate; ++i) {
      loss = plain.loss();
      (parts > 1 ? loss / parts : loss).backward();
    }
    if (options.clip > 0) plain.optimizer.clip(options.clip);
    plain.optimizer.step();
    return loss.detach();
  };
  return time_whole_steps(options, {step, /*of_all_ranks=*/false, options.warmup}, world);
}

}  // namespace

int run_rank(const TrainBench& options) {
  // Independent processes join a world, too: it gives each its device and a common start.
  World world = init({.backend = options.backend});
  at::set_num_threads(options.threads);
  Json line = options.worker == "ours"    ? line_of(train_sharded(options, world))
              : options.worker == "none"  ? line_of(train_without(options, world))
              : options.worker == "eager" ? train_eager(options, world)
              : options.worker == "graph" ? train_graphed(options, world)
              : options.worker == "tape"  ? time_tape(options, world)
                                          : train_plain(options, world);
  if (world.rank() == 0) std::cout << line.dump() << std::endl;
  world.comm().barrier();
  return 0;
}

}  // namespace fsdp::bench
