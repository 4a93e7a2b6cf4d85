#include "shard/models.h"

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>

#include <stdexcept>

#include "shard/more_models.h"

namespace fsdp::testing {
namespace {

at::Generator generator(int step, int rank, int what) {
  uint64_t seed = 1'000'003ull * (step + 1) + 1'009ull * (rank + 1) + what;
  return at::detail::createCPUGenerator(seed);
}

ModelCase mlp() {
  return {.name = "mlp",
          .build =
              [] {
                Mlp model;
                return built(model.ptr(), [model](const Batch& batch) mutable {
                  return mean_square(model(batch.x), batch.y);
                });
              },
          .batch =
              [](int step, int rank) {
                return Batch{step, random_normal(step, rank, 0, {4, 16}),
                             random_normal(step, rank, 1, {4, 16})};
              },
          .wrap = wrap::modules<nn::Linear>()};
}

ModelCase transformer() {
  return {.name = "transformer",
          .build =
              [] {
                Transformer model;
                return built(model.ptr(), [model](const Batch& batch) mutable {
                  return model->loss(batch.x, batch.y);
                });
              },
          .batch =
              [](int step, int rank) {
                std::vector<int64_t> sizes = {2, TransformerImpl::kTokens};
                int64_t below = TransformerImpl::kVocabulary;
                return Batch{step, random_integers(step, rank, 0, below, sizes),
                             random_integers(step, rank, 1, below, sizes)};
              },
          .wrap = wrap::modules<Block>()};
}

}  // namespace

at::Tensor random_normal(int step, int rank, int what, at::IntArrayRef sizes) {
  return at::randn(sizes, generator(step, rank, what), at::TensorOptions());
}

at::Tensor random_integers(int step, int rank, int what, int64_t below, at::IntArrayRef sizes) {
  return at::randint(below, sizes, generator(step, rank, what), at::TensorOptions(at::kLong));
}

at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return (output.to(at::kFloat) - target.to(at::kFloat)).square().mean();
}

Batch moved(Batch batch, at::Device device, std::optional<at::ScalarType> type) {
  batch.x = batch.x.to(device);
  if (type && batch.x.is_floating_point()) batch.x = batch.x.to(*type);
  batch.y = batch.y.to(device);
  return batch;
}

at::Tensor Built::parameter(const std::string& name) const {
  for (const auto& [own, tensor] : parameters)
    if (own == name) return tensor;
  throw std::out_of_range("no parameter " + name);
}

Built built(std::shared_ptr<nn::Module> module, std::function<at::Tensor(const Batch&)> loss) {
  Built result{.module = module, .loss = std::move(loss)};
  auto add = [](NamedTensors& to, const std::string& name, const at::Tensor& tensor) {
    for (const auto& known : to)
      if (known.second.is_same(tensor)) return;
    to.emplace_back(name, tensor);
  };
  for (const auto& item : module->named_parameters())
    add(result.parameters, item.key(), item.value());
  for (const auto& item : module->named_buffers()) add(result.buffers, item.key(), item.value());
  return result;
}

const std::vector<ModelCase>& model_cases() {
  static const std::vector<ModelCase> cases = [] {
    std::vector<ModelCase> all = {mlp(), transformer()};
    for (auto& more : more_model_cases()) all.push_back(std::move(more));
    return all;
  }();
  return cases;
}

const ModelCase& model_case(const std::string& name) {
  for (const auto& model : model_cases())
    if (model.name == name) return model;
  throw std::out_of_range("no model " + name);
}

MlpImpl::MlpImpl(int64_t width, int64_t depth) : width(width), depth(depth) {
  reset();
}

void MlpImpl::reset() {
  layers = register_module("layers", nn::ModuleList());
  for (int64_t i = 0; i < depth; ++i) layers->push_back(nn::Linear(width, width));
}

at::Tensor MlpImpl::forward(at::Tensor x) {
  for (int64_t i = 0; i < depth; ++i) {
    x = layer(i)->forward(x);
    if (i + 1 < depth) x = x.tanh();
  }
  return x;
}

nn::Linear MlpImpl::layer(size_t index) const {
  return nn::Linear(layers->ptr<nn::LinearImpl>(index));
}

BlockImpl::BlockImpl(int64_t dim, int64_t heads)
    : heads(heads),
      attention_norm(register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({dim})))),
      mlp_norm(register_module("mlp_norm", nn::LayerNorm(nn::LayerNormOptions({dim})))),
      qkv(register_module("qkv", nn::Linear(dim, 3 * dim))),
      out(register_module("out", nn::Linear(dim, dim))),
      up(register_module("up", nn::Linear(dim, 4 * dim))),
      down(register_module("down", nn::Linear(4 * dim, dim))) {}

at::Tensor BlockImpl::forward(at::Tensor x) {
  int64_t batch = x.size(0), tokens = x.size(1), dim = x.size(2);
  auto parts = qkv(attention_norm(x))
                   .view({batch, tokens, 3, heads, dim / heads})
                   .permute({2, 0, 3, 1, 4})
                   .unbind(0);  // [batch, heads, tokens, dim / heads] each
  auto attended =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
  x = x + out(attended.transpose(1, 2).reshape({batch, tokens, dim}));
  return x + down(at::gelu(up(mlp_norm(x))));
}

TiedHeadImpl::TiedHeadImpl(at::Tensor embedding)
    : weight(register_parameter("weight", std::move(embedding))) {}

at::Tensor TiedHeadImpl::forward(at::Tensor x) {
  return at::linear(x, weight);
}

TransformerImpl::TransformerImpl(int64_t dim, int64_t heads, int64_t depth)
    : embedding(register_module("embedding", nn::Embedding(kVocabulary, dim))),
      position(register_parameter("position", 0.1 * at::randn({kTokens, dim}))),
      blocks(register_module("blocks", nn::ModuleList())),
      norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({dim})))),
      head(register_module("head", TiedHead(embedding->weight))) {
  for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block(dim, heads));
}

at::Tensor TransformerImpl::forward(at::Tensor ids) {
  auto x = embedding(ids) + position;
  for (size_t i = 0; i < blocks->size(); ++i) x = block(i)->forward(x);
  return head(norm(x));
}

at::Tensor TransformerImpl::loss(at::Tensor ids, at::Tensor targets) {
  return nn::functional::cross_entropy(forward(ids).flatten(0, 1).to(at::kFloat),
                                       targets.flatten());
}

Block TransformerImpl::block(size_t index) const {
  return Block(blocks->ptr<BlockImpl>(index));
}

}  // namespace fsdp::testing
