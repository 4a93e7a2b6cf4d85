#include "bench/workload.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <torch/nn/init.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <unordered_map>

#include "base/log.h"
#include "base/table.h"
#include "fsdp/deferred_init.h"
#include "fsdp/error.h"
#include "fsdp/models.h"
#include "fsdp/plan.h"
#include "shard/deferred.h"
#include "shard/deferred_trial.h"
#include "shard/tensor_access.h"
#include "train/device.h"
#include "train/plan_config.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

using std::chrono::steady_clock;

models::LlamaConfig llama_config(const Shape& shape) {
  return models::checked(models::LlamaConfig{.vocab = shape.vocab,
                                             .dim = shape.dim,
                                             .layers = shape.layers,
                                             .heads = shape.heads,
                                             .kv_heads = shape.kv_heads,
                                             .ffn = shape.ffn,
                                             .tied = shape.tied,
                                             .qkv_bias = shape.qkv_bias});
}

std::string millions(int64_t number) {
  double value = static_cast<double>(number) / 1e6;
  return fsdp::number(value, value < 100 ? 1 : 0).text + "M";
}

// `unfilled`: only shapes, no memory and no random numbers.
template <typename Build>
auto built(bool unfilled, const Build& build) {
  if (!unfilled) return build();
  shard::deferred::ShapesOnly shapes_only;
  return deferred_init(build);
}

// Draws what the Llama's constructor would, module by module. The seed of each matrix is its index
// among the model's parameters, as in the peer, so both draw the same in any order.
std::function<void(torch::nn::Module&)> draw_llama(const torch::nn::Module& model) {
  std::unordered_map<const c10::TensorImpl*, uint64_t> seeds;
  for (const at::Tensor& parameter : model.parameters())  // tied parameters share a seed
    seeds.try_emplace(parameter.unsafeGetTensorImpl(), seeds.size());
  return [seeds](torch::nn::Module& one) {
    for (auto& parameter : one.named_parameters(/*recurse=*/false)) {
      at::Tensor& values = parameter.value();
      torch::manual_seed(seeds.at(values.unsafeGetTensorImpl()));
      if (values.dim() > 1)
        torch::nn::init::normal_(values, 0.0, models::LlamaConfig().init_std);
      else if (parameter.key() == "bias")
        torch::nn::init::zeros_(values);
      else
        torch::nn::init::ones_(values);
    }
  };
}

Workload llama_workload(const Shape& shape, const at::Generator& random, at::Device device,
                        bool unfilled) {
  models::Llama model = built(unfilled, [&] { return models::Llama(llama_config(shape)); });
  at::Tensor data =
      at::randint(0, shape.vocab, {shape.batch, shape.seq + 1}, random, at::kLong).to(device);
  at::Tensor ids = data.slice(1, 0, shape.seq).contiguous(),
             targets = data.slice(1, 1).contiguous();
  auto loss = [model](const std::vector<at::Tensor>& inputs) mutable {
    return model->forward(inputs[0], inputs[1]);
  };
  return {.module = model.ptr(),
          .wrap = wrap::modules<models::LlamaBlock>(),
          .feed_forwards = wrap::modules<models::SwiGLU>(),
          .loss = [model, ids, targets]() mutable { return model->forward(ids, targets); },
          .inputs = {ids, targets},
          .loss_of = loss,
          .unfilled = unfilled,
          .draw = draw_llama(*model)};
}

Workload mlp_workload(const Shape& shape, const at::Generator& random, at::Device device,
                      bool unfilled) {
  models::MLP model =
      built(unfilled, [&] { return models::MLP(models::MLPConfig{.width = shape.width}); });
  at::Tensor x = at::randn({shape.batch, shape.width}, random, at::kFloat).to(device);
  at::Tensor targets = at::randn({shape.batch, shape.width}, random, at::kFloat).to(device);
  auto loss = [model](const std::vector<at::Tensor>& inputs) mutable {
    return model->forward(inputs[0], inputs[1]);
  };
  return {.module = model.ptr(),
          .wrap = wrap::modules<torch::nn::Linear>(),
          .feed_forwards = {},
          .loss = [model, x, targets]() mutable { return model->forward(x, targets); },
          .inputs = {x, targets},
          .loss_of = loss,
          .unfilled = unfilled,
          .draw =
              [](torch::nn::Module& one) {
                if (auto* linear = one.as<torch::nn::LinearImpl>()) linear->reset_parameters();
              }};
}

PlanModel plan_model_of(const Shape& shape) {
  if (shape.model == "mlp")
    return plan_model([=] { return models::MLP(models::MLPConfig{.width = shape.width}); },
                      [=](models::MLP& model, const PlanStep& step) {
                        at::Tensor x = at::randn({step.batch, shape.width}, step.device);
                        return model->forward(x, at::randn_like(x));
                      });
  return plan_model([=] { return models::Llama(llama_config(shape)); },
                    [=](models::Llama& model, const PlanStep& step) {
                      at::Tensor ids =
                          at::randint(shape.vocab, {step.batch, shape.seq},
                                      at::TensorOptions(at::kLong).device(step.device));
                      return model->forward(ids, ids);
                    });
}

}  // namespace

void add_shape_flags(CLI::App& command, Shape& shape) {
  const char* group = "The model";
  auto size = [&](const char* name, int64_t& value, const char* help, int64_t least) {
    command.add_option(name, value, help)
        ->check(CLI::Range(least, int64_t{1} << 40).description(""))
        ->type_name("N")
        ->capture_default_str()
        ->group(group);
  };
  command.add_option("--model", shape.model, "llama, or mlp: 8 linears with ReLU between them")
      ->check(CLI::IsMember({"llama", "mlp"}))
      ->capture_default_str()
      ->group(group);
  size("--layers", shape.layers, "llama: blocks", 1);
  size("--dim", shape.dim, "llama: width of the residual stream", 1);
  size("--heads", shape.heads, "llama: query heads", 1);
  size("--kv-heads", shape.kv_heads, "llama: key and value heads; 0: the same as --heads", 0);
  size("--ffn", shape.ffn, "llama: width of the feed-forward; 0: 8/3 of --dim", 0);
  size("--vocab", shape.vocab, "llama: vocabulary size", 1);
  size("--seq", shape.seq, "llama: tokens per sequence", 1);
  size("--width", shape.width, "mlp: width of each linear", 1);
  size("--batch", shape.batch, "Sequences (llama) or rows (mlp) per micro-batch and rank", 1);
  size("--accumulate", shape.accumulate, "Micro-batches per step", 1);
  command.add_flag("--tied", shape.tied, "llama: share the weights of head and embedding")
      ->group(group);
  command.add_flag("--qkv-bias", shape.qkv_bias, "llama: add biases to queries, keys and values")
      ->group(group);
  command
      .add_option("--dtype", shape.dtype,
                  "Dtype of parameters in forward and backward: fp32 or bf16")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str()
      ->group(group);
}

std::vector<std::string> flags_of(const Shape& shape) {
  auto text = [](int64_t value) { return std::to_string(value); };
  std::vector<std::string> flags = {
      "--model", shape.model,       "--layers",     text(shape.layers),
      "--dim",   text(shape.dim),   "--heads",      text(shape.heads),
      "--ffn",   text(shape.ffn),   "--kv-heads",   text(shape.kv_heads),
      "--vocab", text(shape.vocab), "--seq",        text(shape.seq),
      "--width", text(shape.width), "--batch",      text(shape.batch),
      "--dtype", shape.dtype,       "--accumulate", text(shape.accumulate)};
  if (shape.tied) flags.push_back("--tied");
  if (shape.qkv_bias) flags.push_back("--qkv-bias");
  return flags;
}

std::vector<std::string> peer_flags_of(const Shape& shape) {
  auto text = [](int64_t value) { return std::to_string(value); };
  std::vector<std::string> flags = {"--batch", text(shape.batch), "--dtype", shape.dtype};
  std::vector<std::string> model = {"--mlp", text(shape.width)};
  if (shape.model == "llama")
    model = {"--layers", text(shape.layers), "--dim",      text(shape.dim),
             "--heads",  text(shape.heads),  "--kv-heads", text(shape.kv_heads),
             "--ffn",    text(shape.ffn),    "--vocab",    text(shape.vocab),
             "--seq",    text(shape.seq)};
  flags.insert(flags.end(), model.begin(), model.end());
  if (shape.accumulate > 1) flags.insert(flags.end(), {"--accumulate", text(shape.accumulate)});
  if (shape.model == "llama" && shape.tied) flags.push_back("--tied");
  if (shape.model == "llama" && shape.qkv_bias) flags.push_back("--qkv-bias");
  return flags;
}

std::vector<std::string> peer_recomputes(const std::string& activations) {
  if (activations.empty() || activations == "none") return {};
  return {activations == "selective" ? "--ac=selective" : "--ac"};
}

int64_t parameter_count(const Shape& shape) {
  return shape.model == "mlp" ? models::parameter_count(models::MLPConfig{.width = shape.width})
                              : models::parameter_count(llama_config(shape));
}

int64_t tokens_of(const Shape& shape) {
  return shape.batch * shape.accumulate * (shape.model == "mlp" ? 1 : shape.seq);
}

double flops_of(const Shape& shape) {
  auto tokens = static_cast<double>(tokens_of(shape));
  if (shape.model == "mlp") {
    models::MLPConfig config{.width = shape.width};
    return tokens * 6 * static_cast<double>(config.layers * config.width * config.width);
  }
  models::LlamaConfig config = llama_config(shape);
  int64_t attended = config.heads * config.head_dim;
  int64_t block = config.dim * (2 * attended + 2 * config.kv_heads * config.head_dim) +
                  3 * config.dim * config.ffn;
  int64_t products = config.layers * block + config.vocab * config.dim;
  return tokens * 6 * static_cast<double>(products + config.layers * attended * shape.seq);
}

std::string title(const Shape& shape) {
  return (shape.model == "mlp" ? "MLP " : "Llama ") + millions(parameter_count(shape));
}

std::string description(const Shape& shape) {
  auto text = [](int64_t value) { return std::to_string(value); };
  std::string end =
      ", batch " + text(shape.batch) + " per rank" +
      (shape.accumulate > 1 ? ", " + text(shape.accumulate) + " of them per step" : "") + ", " +
      shape.dtype;
  if (shape.model == "mlp") return title(shape) + ": 8 linears of width " + text(shape.width) + end;
  models::LlamaConfig config = llama_config(shape);
  return title(shape) + ": " + text(config.layers) + " layers, dim " + text(config.dim) + ", " +
         text(config.heads) + " heads (" + text(config.kv_heads) + " of keys and values), ffn " +
         text(config.ffn) + ", vocabulary " + text(config.vocab) + (shape.tied ? " (tied)" : "") +
         ", " + text(shape.seq) + " tokens" + end;
}

Workload make_workload(const Shape& shape, const World& world, bool unfilled) {
  torch::manual_seed(0);
  at::Generator random = at::detail::createCPUGenerator(1234 + world.rank());
  return shape.model == "mlp" ? mlp_workload(shape, random, world.device(), unfilled)
                              : llama_workload(shape, random, world.device(), unfilled);
}

void draw_whole(const Workload& work, at::Device device) {
  for (const at::Tensor& parameter : work.module->parameters()) {
    if (!shard::deferred::is_deferred(parameter)) continue;  // the second of a tied pair
    shard::set_key(parameter, false);
    shard::become(parameter, at::empty(parameter.sizes(), parameter.options().device(device)));
  }
  work.module->apply(work.draw);
}

Sharded shard_workload(const Workload& work, const World& world, ShardOptions how,
                       const memory::ActivationsConfig& activations) {
  how.wrap = work.wrap;
  how.device = world.device();
  how.initialize = !work.unfilled;
  Sharded sharded = fully_shard(work.module, how);
  if (work.unfilled) sharded.materialize(world.device(), work.draw);
  train::TrainTask task;
  task.blocks = work.wrap;
  task.feed_forwards = work.feed_forwards;
  if (auto policy = train::activation_policy(activations, task))
    apply_activation_checkpointing(sharded, *policy);
  return sharded;
}

std::optional<double> planned_mb(const Shape& shape, const World& world, const ShardOptions& how,
                                 const memory::ActivationsConfig& activations, double clip) {
  const bool mlp = shape.model == "mlp";
  PlanOptions options{.shard = how,
                      .world = world.size(),
                      .ranks_per_node = world.local_size(),
                      .gpu = train::gpu_of(world.device()),
                      .batch = shape.batch,
                      .micro_batches = static_cast<int>(shape.accumulate),
                      .clip = clip};
  train::set_recompute(options, activations);
  options.shard.wrap =
      mlp ? wrap::modules<torch::nn::Linear>() : wrap::modules<models::LlamaBlock>();
  if (!mlp) options.inner_modules = wrap::modules<models::SwiGLU>();
  try {
    return static_cast<double>(plan(plan_model_of(shape), options).memory.peak()) / (1 << 20);
  } catch (const Error& problem) {
    log::warn(title(shape) + ": memory can't be planned: " + problem.what());
    return {};
  }
}

MixedPrecision mixed_precision(const Shape& shape) {
  if (shape.dtype == "fp32") return {};
  return {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
}

MixedPrecision row_precision(const Shape& shape, const World& world,
                             const std::string& grad_dtype) {
  if (shape.dtype == "fp32") return {};
  bool alone = world.size() == 1 && shape.accumulate == 1 && !world.device().is_cpu();
  bool bf16 = grad_dtype.empty() ? alone : grad_dtype == "bf16";
  if (!bf16) return mixed_precision(shape);
  return {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16, .grad_dtype = at::kBFloat16};
}

std::vector<double> means_over_ranks(const std::vector<double>& values, const World& world) {
  if (world.size() == 1) return values;
  at::Tensor sums = at::tensor(values, at::kDouble).to(world.device());
  world.comm().all_reduce(sums, ReduceOp::SUM);
  sums = sums.div_(world.size()).cpu();
  return {sums.const_data_ptr<double>(), sums.const_data_ptr<double>() + sums.numel()};
}

Timing time_steps(const Step& step, int warmup, int steps, const World& world) {
  std::vector<double> whole, forward, backward, clip, update;
  Timing timing;
  for (int i = -warmup; i < steps; ++i) {
    if (i == 0) {
      train::synchronize(world.device());
      world.comm().barrier();
    }
    std::vector<double> at;
    auto start = steady_clock::now();
    auto mark = [&] {
      at.push_back(std::chrono::duration<double>(steady_clock::now() - start).count());
    };
    at::Tensor loss = step.forward();
    mark();
    loss.backward();
    mark();
    step.clip();
    mark();
    step.update();
    mark();
    train::synchronize(world.device());
    mark();
    timing.losses.push_back(loss.item<double>());
    if (i < 0) continue;
    forward.push_back(at[0]);
    backward.push_back(at[1] - at[0]);
    clip.push_back(at[2] - at[1]);
    update.push_back(at[3] - at[2]);
    whole.push_back(at[4]);
  }
  timing.losses = means_over_ranks(timing.losses, world);
  timing.step = median(whole);
  timing.forward = median(forward);
  timing.backward = median(backward);
  timing.clip = median(clip);
  timing.update = median(update);
  return timing;
}

Json line_of(const Timing& timing) {
  Json line = {
      {"step_ms", timing.step * 1e3},         {"forward_ms", timing.forward * 1e3},
      {"backward_ms", timing.backward * 1e3}, {"clip_ms", timing.clip * 1e3},
      {"update_ms", timing.update * 1e3},     {"maxrss_mb", train::peak_memory_mb(at::kCPU)}};
  line.update(losses_of(timing.losses));
  return line;
}

Json losses_of(std::vector<double> of_steps) {
  Json line = {{"loss0", of_steps.front()}, {"loss", of_steps.back()}};
  for (double& loss : of_steps) loss = std::round(loss * 1e4) / 1e4;  // as the peer rounds them
  line["losses"] = of_steps;
  return line;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace fsdp::bench
