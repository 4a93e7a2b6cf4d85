#include "train/trainee.h"

#include <ATen/ops/mse_loss.h>

#include <set>

#include "fsdp/error.h"
#include "observe/throughput.h"

namespace fsdp::train {
namespace {

models::LlamaConfig llama_config(const ModelConfig& model, int64_t vocab) {
  models::LlamaConfig config{.vocab = vocab,
                             .dim = model.dim,
                             .layers = model.layers,
                             .heads = model.heads,
                             .kv_heads = model.kv_heads,
                             .ffn = model.ffn,
                             .tied = model.tied,
                             .qkv_bias = model.type == "qwen2",
                             .norm_eps = model.norm_eps,
                             .rope_base = model.rope_base,
                             .init_std = model.init_std};
  if (model.rope_scaling == "llama3")
    config.rope_scaling =
        models::RopeScaling{.factor = model.rope_factor,
                            .low_freq_factor = model.rope_low_freq,
                            .high_freq_factor = model.rope_high_freq,
                            .original_max_position_embeddings = model.rope_original_tokens};
  return config;
}

models::GPT2Config gpt2_config(const ModelConfig& model, int64_t vocab, int64_t seq) {
  return {.vocab = vocab,
          .max_tokens = model.max_tokens > 0 ? model.max_tokens : seq,
          .dim = model.dim,
          .layers = model.layers,
          .heads = model.heads,
          .ffn = model.ffn,
          .tied = true,
          .norm_eps = model.norm_eps,
          .embd_dropout = model.dropout,
          .attn_dropout = model.dropout,
          .resid_dropout = model.dropout,
          .init_std = model.init_std};
}

Trainee language_model(std::shared_ptr<models::CausalLMImpl> model, WrapPolicy blocks,
                       int64_t seq) {
  Trainee trainee;
  trainee.module = model;
  trainee.text = model;
  trainee.blocks = std::move(blocks);
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
  int64_t words = model.vocab > 0 ? model.vocab : vocab;
  if (model.type != "mlp" && words < 1)
    throw Error("the vocabulary of the model is not known: token files do not say it.",
                "give --model.vocab, or --data.tokenizer with the one that made the files.");
  Trainee trainee;
  if (model.type == "mlp") {
    trainee = mlp(model);
  } else if (model.type == "gpt2") {
    models::GPT2 module(gpt2_config(model, words, seq));
    trainee = language_model(module.ptr(), wrap::modules<models::GPT2Block>(), seq);
  } else {
    models::Llama module(llama_config(model, words));
    trainee = language_model(module.ptr(), wrap::modules<models::LlamaBlock>(), seq);
  }
  std::set<const void*> seen;  // a tied one has two names
  for (const at::Tensor& parameter : trainee.module->parameters())
    if (seen.insert(parameter.unsafeGetTensorImpl()).second)
      trainee.parameters += parameter.numel();
  std::string name = model.type == "mlp"     ? "MLP"
                     : model.type == "gpt2"  ? "GPT-2"
                     : model.type == "qwen2" ? "Qwen2"
                                             : "Llama";
  trainee.title =
      name + ", " + observe::human_count(static_cast<double>(trainee.parameters)) + " parameters";
  return trainee;
}

}  // namespace fsdp::train
