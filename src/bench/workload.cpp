// The model and data of a row, sharded or not, and its plan.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <torch/utils.h>

#include <unordered_map>

#include "base/format.h"
#include "base/log.h"
#include "bench/training.h"
#include "fsdp/error.h"
#include "fsdp/models.h"
#include "fsdp/plan.h"
#include "fsdp/recompute.h"
#include "shard/deferred.h"
#include "shard/tensor_access.h"
#include "train/plan_config.h"
#include "train/training.h"

namespace fsdp::bench {
namespace {

std::function<at::Tensor(const Inputs&)> loss_of(const train::Trainee& trainee) {
  return [text = trainee.text, module = trainee.module](const Inputs& inputs) {
    return text ? text->forward(inputs[0], inputs[1])
                : module->as<models::MLP>()->forward(inputs[0], inputs[1]);
  };
}

Inputs draw_inputs(const Row& row, const World& world) {
  at::Generator random = at::detail::createCPUGenerator(1234 + world.rank());
  if (row.model == "mlp") {
    const at::Tensor x = at::randn({row.batch, row.width}, random, at::kFloat);
    const at::Tensor targets = at::randn({row.batch, row.width}, random, at::kFloat);
    return {x.to(world.device()), targets.to(world.device())};
  }
  const at::Tensor data =
      at::randint(0, row.vocab, {row.batch, row.seq + 1}, random, at::kLong).to(world.device());
  return {data.slice(1, 0, row.seq).contiguous(), data.slice(1, 1).contiguous()};
}

// Draws what a constructor would, module by module. The seed of each matrix of a Llama is its index
// among the model's parameters, as in the peer, so both draw the same in any order.
std::function<void(torch::nn::Module&)> draw_of(const train::Trainee& trainee) {
  if (!trainee.text)
    return [](torch::nn::Module& one) {
      if (auto* linear = one.as<torch::nn::LinearImpl>()) linear->reset_parameters();
    };
  std::unordered_map<const c10::TensorImpl*, uint64_t> seeds;
  for (const at::Tensor& parameter : trainee.module->parameters())  // tied ones share a seed
    seeds.try_emplace(parameter.unsafeGetTensorImpl(), seeds.size());
  return [seeds](torch::nn::Module& one) {
    for (const at::Tensor& parameter : one.parameters(/*recurse=*/false))
      if (parameter.dim() > 1)  // no module has two matrices
        torch::manual_seed(seeds.at(parameter.unsafeGetTensorImpl()));
    models::init_weights(one);
  };
}

}  // namespace

Workload make_workload(const Row& row, const World& world) {
  const bool unfilled = row.init == "device";
  const train::Config config = config_of(row);
  torch::manual_seed(0);
  Workload work;
  work.trainee = unfilled ? train::make_unfilled_trainee(config, row.vocab)
                          : train::make_trainee(config, row.vocab);
  work.inputs = draw_inputs(row, world);
  work.loss = loss_of(work.trainee);
  if (unfilled) work.draw = draw_of(work.trainee);
  return work;
}

void place_workload(const Workload& work, at::Device device) {
  torch::nn::Module& model = *work.trainee.module;
  for (const at::Tensor& parameter : model.parameters()) {
    if (!shard::deferred::is_deferred(parameter)) continue;  // or the second of a tied pair
    shard::set_key(parameter, false);
    shard::become(parameter, at::empty(parameter.sizes(), parameter.options().device(device)));
  }
  if (work.draw) model.apply(work.draw);
  model.to(device);
}

Sharded shard_workload(const Workload& work, const Row& row, const World& world) {
  const train::Config config = config_of(row);
  ShardOptions how = train::shard_options(world, config, work.trainee);
  how.initialize = !work.draw;
  Sharded sharded = fully_shard(work.trainee.module, how);
  if (work.draw) sharded.materialize(world.device(), work.draw);
  if (auto policy = train::activation_policy(config.activations, work.trainee))
    apply_activation_checkpointing(sharded, *policy);
  return sharded;
}

std::optional<double> planned_mb(const Row& row, const World& world) {
  try {
    train::ConfigPlan planned = train::plan_of(config_of(row), world.size(),
                                               train::gpu_of(world.device()), world.local_size());
    planned.options.clip = row.clip;
    return static_cast<double>(plan(planned.model, planned.options).memory.peak()) / (1 << 20);
  } catch (const Error& problem) {
    log::warn(formatted("{}: memory can't be planned: {}", title_of(row), problem.what()));
    return {};
  }
}

}  // namespace fsdp::bench
