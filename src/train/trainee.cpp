#include "train/trainee.h"

#include <algorithm>

#include <ATen/ops/mse_loss.h>

#include <set>

#include "fsdp/deferred_init.h"
#include "observe/throughput.h"
#include "shard/deferred_trial.h"
#include "train/model_shape.h"

namespace fsdp::train {
namespace {

Trainee language_model(std::shared_ptr<models::CausalLMImpl> model, WrapPolicy blocks,
                       WrapPolicy feed_forwards, int64_t seq) {
  Trainee trainee;
  trainee.module = model;
  trainee.text = model;
  trainee.blocks = std::move(blocks);
  trainee.feed_forwards = std::move(feed_forwards);
  trainee.loss_sum = [model](const Samples& samples) {
    return model->loss_sum({.ids = samples.inputs, .documents = samples.documents},
                           samples.targets);
  };
  trainee.flops_per_sample = model->flops_per_token(seq) * static_cast<double>(seq);
  trainee.tokens_per_sample = seq;
  return trainee;
}

Trainee mlp(const ModelConfig& model) {
  models::MLP module(models::MLPConfig{.width = model.width, .layers = model.layers});
  Trainee trainee;
  trainee.module = module.ptr();
  trainee.blocks = wrap::modules<torch::nn::Linear>();
  trainee.loss_sum = [module](const Samples& samples) mutable {
    at::Tensor out = module->predict(samples.inputs).to(at::kFloat);
    return at::mse_loss(out, samples.targets, at::Reduction::Sum);
  };
  trainee.flops_per_sample = module->flops_per_row();
  trainee.tokens_per_sample = 1;
  return trainee;
}

}  // namespace

Samples part_of(const Samples& samples, int64_t first, int64_t count) {
  auto part = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.narrow(0, first, count) : tensor;
  };
  return {.inputs = part(samples.inputs),
          .targets = part(samples.targets),
          .documents = part(samples.documents),
          .count = count};
}

std::vector<Samples> micro_batches_of(const Samples& samples, int64_t micro_batch) {
  const int64_t size = micro_batch > 0 ? std::min(micro_batch, samples.count) : samples.count;
  std::vector<Samples> parts;
  for (int64_t first = 0; first < samples.count; first += size)
    parts.push_back(part_of(samples, first, std::min(size, samples.count - first)));
  return parts;
}

Samples on_device(const Samples& samples, at::Device device) {
  auto moved = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(device, /*non_blocking=*/true) : tensor;
  };
  return {.inputs = moved(samples.inputs),
          .targets = moved(samples.targets),
          .documents = moved(samples.documents),
          .count = samples.count,
          .counted = samples.counted};
}

Trainee make_trainee(const Config& config, int64_t vocab) {
  const ModelConfig& model = config.model;
  int64_t seq = config.data.seq;
  Trainee trainee;
  if (model.type == ModelType::kMlp) {
    trainee = mlp(model);
  } else {
    models::AnyConfig shape = model_shape(config, vocab);
    if (const auto* gpt2 = std::get_if<models::GPT2Config>(&shape))
      trainee = language_model(models::GPT2(*gpt2).ptr(), wrap::modules<models::GPT2Block>(),
                               wrap::modules<models::GPT2MLP>(), seq);
    else
      trainee =
          language_model(models::Llama(std::get<models::LlamaConfig>(shape)).ptr(),
                         wrap::modules<models::LlamaBlock>(), wrap::modules<models::SwiGLU>(), seq);
  }
  std::set<const void*> seen;  // tied parameters have two names
  for (const at::Tensor& parameter : trainee.module->parameters())
    if (seen.insert(parameter.unsafeGetTensorImpl()).second)
      trainee.parameters += parameter.numel();
  constexpr const char* kTitles[] = {"Llama", "Qwen2", "GPT-2", "MLP"};  // of each ModelType
  trainee.title = std::string(kTitles[static_cast<int>(model.type)]) + ", " +
                  observe::human_count(static_cast<double>(trainee.parameters)) + " parameters";
  return trainee;
}

Trainee make_unfilled_trainee(const Config& config, int64_t vocab) {
  shard::deferred::ShapesOnly shapes_only;
  return deferred_init([&] { return make_trainee(config, vocab); });
}

}  // namespace fsdp::train
