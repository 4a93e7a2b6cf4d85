// Models of different kinds to plan, each with a step. Small by default; the GPU tests use larger
// ones.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/rnn.h>

#include <string>

#include "fsdp/models/gpt2.h"
#include "fsdp/models/llama.h"
#include "fsdp/models/mlp.h"
#include "fsdp/nn/fp8.h"
#include "fsdp/plan.h"

namespace fsdp::testing {

struct PlannedModel {
  std::string name;
  PlanModel model;
  WrapPolicy wrap = {};
  int64_t batch = 4;
  bool onednn = true;  // off for LSTMs: oneDNN packs their weights into extra memory
};

inline at::Tensor ids_for(const PlanStep& step, int64_t tokens, int64_t vocab) {
  return at::randint(vocab, {step.batch, tokens}, at::TensorOptions(at::kLong).device(step.device));
}

inline PlannedModel mlp(int64_t width = 256, int64_t layers = 6) {
  return {
      "mlp",
      plan_model([=] { return models::MLP(models::MLPConfig{.width = width, .layers = layers}); },
                 [=](models::MLP& model, const PlanStep& step) {
                   return model->predict(at::randn({step.batch, width}, step.device)).sum();
                 }),
      wrap::modules<torch::nn::Linear>(), 64};
}

inline PlannedModel llama(
    models::LlamaConfig config = {.vocab = 512, .dim = 128, .layers = 3, .heads = 4, .kv_heads = 2},
    int64_t tokens = 64, int64_t tile = 0) {
  return {"llama",
          plan_model(
              [=] {
                models::Llama model(config);
                model->tile_feed_forward(tile);
                return model;
              },
              [=](models::Llama& model, const PlanStep& step) {
                at::Tensor ids = ids_for(step, tokens, config.vocab);
                return model->loss_sum({.ids = ids}, ids);
              }),
          wrap::modules<models::LlamaBlock>()};
}

inline PlannedModel fp8_llama(
    fsdp::nn::Fp8 recipe = fsdp::nn::Fp8::kTensorwise,
    models::LlamaConfig config = {.vocab = 512, .dim = 128, .layers = 3, .heads = 4, .kv_heads = 4},
    int64_t tokens = 64) {
  return {"llama in fp8",
          plan_model(
              [=] {
                models::Llama model(config);
                fsdp::nn::convert_to_fp8(*model, {.recipe = recipe});
                return model;
              },
              [=](models::Llama& model, const PlanStep& step) {
                at::Tensor ids = ids_for(step, tokens, config.vocab);
                return model->loss_sum({.ids = ids}, ids);
              }),
          wrap::modules<models::LlamaBlock>()};
}

// With windows that are computed in blocks, norms of queries and keys, and GeGLU.
inline PlannedModel gemma3() {
  models::DecoderConfig config = models::of_family(
      models::Family::kGemma3, {.vocab = 512, .dim = 128, .layers = 3, .heads = 4, .kv_heads = 2});
  config.window = 24;
  config.full_every = 3;
  PlannedModel made = llama(config, 160);
  made.name = "gemma3";
  return made;
}

inline PlannedModel gpt2() {
  models::GPT2Config config{.vocab = 512, .max_tokens = 64, .dim = 128, .layers = 3, .heads = 4};
  return {"gpt2",
          plan_model([config] { return models::GPT2(config); },
                     [](models::GPT2& model, const PlanStep& step) {
                       at::Tensor ids = ids_for(step, 64, 512);
                       return model->loss_sum({.ids = ids}, ids);
                     }),
          wrap::modules<models::GPT2Block>()};
}

struct ResidualImpl : torch::nn::Module {
  explicit ResidualImpl(int64_t channels)
      : first(torch::nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)),
        second(torch::nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)),
        norm(channels),
        last_norm(channels) {
    register_module("first", first);
    register_module("second", second);
    register_module("norm", norm);
    register_module("last_norm", last_norm);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = norm(first(x)).relu();
    return (last_norm(second(y)) + x).relu();
  }
  torch::nn::Conv2d first, second;
  torch::nn::BatchNorm2d norm, last_norm;
};
TORCH_MODULE(Residual);

struct ResNetImpl : torch::nn::Module {
  ResNetImpl(int64_t channels, int count)
      : stem(torch::nn::Conv2dOptions(3, channels, 3).padding(1)), head(channels, 10) {
    register_module("stem", stem);
    for (int i = 0; i < count; ++i) blocks->push_back(Residual(channels));
    register_module("blocks", blocks);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = at::max_pool2d(blocks->forward(stem(x)), 2);
    return head(at::adaptive_avg_pool2d(y, {1, 1}).flatten(1));
  }
  torch::nn::Conv2d stem;
  torch::nn::Sequential blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(ResNet);

inline PlannedModel resnet(int blocks = 12, int64_t channels = 16, int64_t side = 16) {
  return {"resnet",
          plan_model(
              [=] { return ResNet(channels, blocks); },
              [=](ResNet& model, const PlanStep& step) {
                at::Tensor y = model->forward(at::randn({step.batch, 3, side, side}, step.device));
                at::Tensor to =
                    at::zeros({step.batch}, at::TensorOptions(at::kLong).device(step.device));
                return at::cross_entropy_loss(y, to);
              }),
          wrap::modules<Residual>(), 8};
}

inline PlannedModel lstm(int64_t inputs = 64, int64_t hidden = 192, int64_t layers = 2,
                         int64_t steps = 8) {
  return {"lstm",
          plan_model(
              [=] {
                return torch::nn::LSTM(torch::nn::LSTMOptions(inputs, hidden).num_layers(layers));
              },
              [=](torch::nn::LSTM& model, const PlanStep& step) {
                auto x = at::randn({steps, step.batch, inputs}, step.device);
                return std::get<0>(model->forward(x)).sum();
              }),
          {},
          4,
          /*onednn=*/false};
}

}  // namespace fsdp::testing
